// A virtual list of any length: only visible rows exist, and only their pages are loaded.

import { fill, h } from "./dom.js";

const PAGE_SIZE = 100;
const MAX_HEIGHT = 12_000_000; // px; browsers limit the height of elements
const EXTRA_ROWS = 8; // drawn above and below the visible ones

/** rowHeight() -> px; fetchPage(offset, limit, signal) -> {total, rows}; renderRow(row, index) -> element. */
export function virtualList({ rowHeight, fetchPage, renderRow, onOpen, onTotal, label, empty }) {
  const inner = h("div", { class: "rows" });
  const node = h("div", { class: "list card", tabindex: 0, role: "listbox", "aria-label": label }, inner);
  let pages = new Map();
  let total = 0;
  let chosen = -1;
  let generation = 0;
  let requests = new AbortController();
  let frameRequest = 0;
  const elements = new WeakMap(); // element by row, reused by redraws so that a click is not interrupted

  function geometry() {
    const height = rowHeight();
    const whole = total * height;
    return { height, whole: Math.min(whole, MAX_HEIGHT), stretch: whole > MAX_HEIGHT ? (whole - node.clientHeight) / (MAX_HEIGHT - node.clientHeight) : 1 };
  }

  function firstVisible() {
    const { height, stretch } = geometry();
    return Math.max(0, Math.floor((node.scrollTop * stretch) / height));
  }

  async function load(page) {
    if (pages.has(page)) return;
    pages.set(page, null);
    const current = generation;
    try {
      const answer = await fetchPage(page * PAGE_SIZE, PAGE_SIZE, requests.signal);
      if (current !== generation) return;
      pages.set(page, answer.rows);
      if (answer.total !== total) setTotal(answer.total);
      schedule();
    } catch (error) {
      if (current !== generation || error.name === "AbortError") return;
      pages.delete(page);
      fill(inner, h("p", { class: "empty" }, error.message));
    }
  }

  function setTotal(next) {
    total = next;
    onTotal?.(total);
  }

  function schedule() {
    frameRequest ||= requestAnimationFrame(draw);
  }

  function draw() {
    frameRequest = 0;
    const { height, whole, stretch } = geometry();
    inner.style.height = `${whole}px`;
    if (!total) {
      if (pages.get(0)) fill(inner, h("p", { class: "empty" }, empty ?? "no rows"));
      return;
    }
    const first = Math.max(0, firstVisible() - EXTRA_ROWS);
    const last = Math.min(total, firstVisible() + Math.ceil(node.clientHeight / height) + EXTRA_ROWS);
    const origin = node.scrollTop - node.scrollTop * stretch;
    const rows = [];
    for (let i = first; i < last; i++) {
      const page = pages.get(Math.floor(i / PAGE_SIZE));
      if (page === undefined) load(Math.floor(i / PAGE_SIZE));
      const row = page?.[i % PAGE_SIZE];
      const element = row ? elementOf(row, i) : h("div", { class: "row blank" });
      element.style.transform = `translateY(${origin + i * height}px)`;
      element.setAttribute("aria-selected", String(i === chosen));
      rows.push(element);
    }
    if (rows.length !== inner.childNodes.length || rows.some((row, i) => row !== inner.childNodes[i])) inner.replaceChildren(...rows);
  }

  function elementOf(row, i) {
    if (!elements.has(row)) elements.set(row, renderRow(row, i));
    return elements.get(row);
  }

  /** Reload from the top, or with `keepPosition` reload the visible rows. */
  async function reload(keepPosition = false) {
    const current = ++generation;
    requests.abort();
    requests = new AbortController();
    if (!keepPosition) {
      pages = new Map();
      node.scrollTop = 0;
      chosen = -1;
      await load(0);
      if (current === generation && !pages.has(0)) return setTotal(0); // rejected: the error is shown instead of rows
    } else {
      const page = Math.floor(firstVisible() / PAGE_SIZE);
      const answer = await fetchPage(page * PAGE_SIZE, PAGE_SIZE, requests.signal);
      if (current !== generation) return;
      pages = new Map([[page, answer.rows]]);
      setTotal(answer.total);
    }
    schedule();
  }

  function move(by) {
    if (!total) return;
    chosen = Math.min(total - 1, Math.max(0, (chosen < 0 ? firstVisible() - Math.sign(by) : chosen) + by));
    const { height, stretch } = geometry();
    const top = (chosen * height) / stretch;
    if (top < node.scrollTop) node.scrollTop = top;
    else if (top + height > node.scrollTop + node.clientHeight) node.scrollTop = top + height - node.clientHeight;
    schedule();
  }

  function open() {
    const row = pages.get(Math.floor(chosen / PAGE_SIZE))?.[chosen % PAGE_SIZE];
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
