// A list of any length: only the rows in sight exist, and only their pages are asked for.

import { fill, h } from "./dom.js";

const PAGE = 100;
const TALLEST = 12_000_000; // browsers cut elements off somewhere above this
const SPARE = 8;

/** rowHeight() -> px; fetchPage(offset, limit, signal) -> {total, rows}; renderRow(row, index) -> element. */
export function virtualList({ rowHeight, fetchPage, renderRow, onOpen, onTotal, label, empty }) {
  const inner = h("div", { class: "rows" });
  const node = h("div", { class: "list card", tabindex: 0, role: "listbox", "aria-label": label }, inner);
  let pages = new Map();
  let total = 0;
  let chosen = -1;
  let generation = 0;
  let waiting = new AbortController();
  let framed = 0;
  const made = new WeakMap(); // row -> its element: one that is drawn again stays the one a pointer is pressed on

  function geometry() {
    const height = rowHeight();
    const whole = total * height;
    return { height, whole: Math.min(whole, TALLEST), stretch: whole > TALLEST ? (whole - node.clientHeight) / (TALLEST - node.clientHeight) : 1 };
  }

  function firstInSight() {
    const { height, stretch } = geometry();
    return Math.max(0, Math.floor((node.scrollTop * stretch) / height));
  }

  async function ask(page) {
    if (pages.has(page)) return;
    pages.set(page, null);
    const mine = generation;
    try {
      const answer = await fetchPage(page * PAGE, PAGE, waiting.signal);
      if (mine !== generation) return;
      pages.set(page, answer.rows);
      if (answer.total !== total) setTotal(answer.total);
      schedule();
    } catch (error) {
      if (mine !== generation || error.name === "AbortError") return;
      pages.delete(page);
      fill(inner, h("p", { class: "empty" }, error.message));
    }
  }

  function setTotal(next) {
    total = next;
    onTotal?.(total);
  }

  function schedule() {
    framed ||= requestAnimationFrame(draw);
  }

  function draw() {
    framed = 0;
    const { height, whole, stretch } = geometry();
    inner.style.height = `${whole}px`;
    if (!total) {
      if (pages.get(0)) fill(inner, h("p", { class: "empty" }, empty ?? "nothing here"));
      return;
    }
    const first = Math.max(0, firstInSight() - SPARE);
    const last = Math.min(total, firstInSight() + Math.ceil(node.clientHeight / height) + SPARE);
    const origin = node.scrollTop - node.scrollTop * stretch;
    const rows = [];
    for (let i = first; i < last; i++) {
      const page = pages.get(Math.floor(i / PAGE));
      if (page === undefined) ask(Math.floor(i / PAGE));
      const row = page?.[i % PAGE];
      const element = row ? elementOf(row, i) : h("div", { class: "row blank" });
      element.style.transform = `translateY(${origin + i * height}px)`;
      element.setAttribute("aria-selected", String(i === chosen));
      rows.push(element);
    }
    if (rows.length !== inner.childNodes.length || rows.some((row, i) => row !== inner.childNodes[i])) inner.replaceChildren(...rows);
  }

  function elementOf(row, i) {
    if (!made.has(row)) made.set(row, renderRow(row, i));
    return made.get(row);
  }

  /** Begin again from the top; with `stay` read what is in sight anew and stay there. */
  async function reload(stay = false) {
    const mine = ++generation;
    waiting.abort();
    waiting = new AbortController();
    if (!stay) {
      pages = new Map();
      node.scrollTop = 0;
      chosen = -1;
      await ask(0);
      if (mine === generation && !pages.has(0)) return setTotal(0); // refused: what it says stands in place of rows
    } else {
      const page = Math.floor(firstInSight() / PAGE);
      const answer = await fetchPage(page * PAGE, PAGE, waiting.signal);
      if (mine !== generation) return;
      pages = new Map([[page, answer.rows]]);
      setTotal(answer.total);
    }
    schedule();
  }

  function move(by) {
    if (!total) return;
    chosen = Math.min(total - 1, Math.max(0, (chosen < 0 ? firstInSight() - Math.sign(by) : chosen) + by));
    const { height, stretch } = geometry();
    const top = (chosen * height) / stretch;
    if (top < node.scrollTop) node.scrollTop = top;
    else if (top + height > node.scrollTop + node.clientHeight) node.scrollTop = top + height - node.clientHeight;
    schedule();
  }

  function open() {
    const row = pages.get(Math.floor(chosen / PAGE))?.[chosen % PAGE];
    if (row) onOpen(row);
  }

  node.addEventListener("scroll", schedule, { passive: true });
  const observer = new ResizeObserver(schedule);
  observer.observe(node);
  return {
    node, reload, move, open,
    page: (by) => move(by * Math.max(1, Math.floor(node.clientHeight / rowHeight()) - 1)),
    dispose: () => observer.disconnect(),
  };
}
