// The episodes or groups of a run: filters with counts, and a list of any length.

import { get } from "./api.js";
import { fill, h, select } from "./dom.js";
import { count, KINDS, number, signed, STOPS, taskName } from "./format.js";
import { virtualList } from "./list.js";
import { link } from "./route.js";
import { runHead, problemList } from "./run.js";

const ORDERS = [
  ["step", "newest step first"], ["oldest", "oldest step first"], ["reward", "highest reward"], ["worst", "lowest reward"],
  ["turns", "most turns"], ["sampled", "most tokens"], ["seconds", "slowest"],
];
const NAMES = { kind: "kind", step: "step", env: "environment", subset: "subset", success: "outcome", stop: "ending", horizon: "horizon" };

function label(facet, value) {
  if (facet === "kind") return KINDS[value] ?? value;
  if (facet === "stop") return STOPS[value] ?? value;
  if (facet === "success") return value ? "success" : "no success";
  if (facet === "horizon") return `${value} turns`;
  if (facet === "step") return `step ${value}`;
  return value;
}

export function outcome(row) {
  const kind = row.stop === "error" ? "error" : row.success ? "good" : "bad";
  return h("span", { class: `outcome ${kind}`, title: kind === "error" ? "error" : row.success ? "success" : "no success" });
}

const isPhone = () => matchMedia("(max-width: 720px)").matches;

/** The common part of the episodes and groups pages: head, filters and list. */
async function browser(route, current, { path, extra, renderRow, open, nouns, orders }) {
  const id = route.parts[0];
  const chosen = Object.fromEntries(route.query);
  const choices = h("div", { class: "part" });
  const further = h("div", { class: "part" });
  const tools = h("div", { class: "list-tools" });
  const total = h("span", { class: "total", role: "status" });
  const item = h("input", { type: "number", min: 0, placeholder: "item", "aria-label": "item", class: "item", onchange: () => change("item", item.value) });
  item.value = chosen.item ?? "";
  // The field is kept while the filters beside it are redrawn, because a user may be typing.
  const filters = h("div", { class: "filters" }, choices, item, further);
  let drawing = 0;

  const list = virtualList({
    label: nouns[1],
    empty: `no ${nouns[1]} match these filters`,
    rowHeight: () => (isPhone() ? 66 : 42),
    fetchPage: (offset, limit, signal) => get(path, { ...parameters(), offset, limit }, signal),
    renderRow: (row) => renderRow(row, id),
    onOpen: (row) => (location.hash = open(row, id)),
    onTotal: (all) => fill(total, count(all, nouns[0], nouns[1])),
  });

  function parameters() {
    const { mixed, order, ...rest } = chosen;
    return { run: id, ...rest, ...(path === "groups" ? { mixed } : { order }) };
  }

  async function change(name, value) {
    if (value === "" || value === null) delete chosen[name];
    else chosen[name] = value;
    route.set({ [name]: value });
    await Promise.all([drawFilters(), list.reload()]);
  }

  async function drawFilters() {
    const request = ++drawing;
    const { order, mixed, ...rest } = chosen;
    const clearButton = Object.keys(chosen).length ? h("button", { type: "button", class: "quiet", onclick: clear }, "Clear") : null;
    fill(tools, total, orders ? select(ORDERS, order ?? "step", (value) => change("order", value), "order") : null);
    let facets;
    try {
      facets = await get("facets", { run: id, ...rest });
    } catch (error) {
      if (request !== drawing) return;
      fill(choices, h("span", { class: "invalid" }, error.message));
      fill(further, clearButton);
      return;
    }
    if (request !== drawing) return; // the filters changed meanwhile
    const shown = Object.keys(NAMES).filter((name) => facets[name].length > 1 || chosen[name] !== undefined);
    fill(
      choices,
      shown.map((name) => {
        const options = facets[name].map(([value, total]) => {
          const given = name === "success" ? String(Boolean(value)) : String(value);
          return [given, `${label(name, value)}  (${total.toLocaleString("en")})`];
        });
        if (chosen[name] !== undefined && !options.some(([value]) => value === chosen[name])) {
          options.unshift([chosen[name], `${label(name, chosen[name])}  (0)`]);
        }
        const node = select([["", `any ${NAMES[name]}`], ...options], chosen[name] ?? "", (value) => change(name, value), NAMES[name]);
        node.dataset.filter = name;
        if (chosen[name] !== undefined) node.classList.add("on");
        return node;
      }),
    );
    fill(further, extra?.(chosen, change), clearButton);
  }

  function clear() {
    const nothing = Object.fromEntries(Object.keys(chosen).map((name) => [name, ""]));
    for (const name of Object.keys(chosen)) delete chosen[name];
    item.value = "";
    route.set(nothing);
    return Promise.all([drawFilters(), list.reload()]);
  }

  // Load the rows without waiting for the filters, whose counts take longer.
  drawFilters();
  const [run] = await Promise.all([get("run", { run: id }), list.reload()]);
  return {
    node: h("div", { class: "page tall" }, runHead(run, current), problemList(run), h("div", { class: "filter-bar" }, filters, tools), list.node),
    section: run.kind === "eval" ? "evals" : "runs",
    title: `${nouns[1]} · ${id}`,
    focus: list.node,
    dispose: list.dispose,
    async onChange(changes) {
      if (!changes.grown) return;
      await Promise.all([list.reload(true), filters.parentNode?.contains(document.activeElement) ? null : drawFilters()]);
    },
    keys: [
      ["ArrowDown", "next row", () => list.move(1)],
      ["ArrowUp", "previous row", () => list.move(-1)],
      ["PageDown", "a page down", () => list.page(1)],
      ["PageUp", "a page up", () => list.page(-1)],
      ["Enter", "open", () => list.open()],
      ["x", "clear the filters", clear],
    ],
  };
}

export function episodesPage(route) {
  return browser(route, "episodes", {
    path: "episodes",
    nouns: ["episode", "episodes"],
    orders: true,
    renderRow: episodeRow,
    open: (row, id) => link("episode", id, row.key),
  });
}

function episodeRow(row, id) {
  return h(
    "a",
    { class: "row", href: link("episode", id, row.key), role: "option", tabindex: -1 },
    outcome(row),
    h("span", { class: "task" }, taskName(row), h("small", {}, row.subset)),
    h("span", { class: "when" }, row.kind === "train" ? `step ${row.step}` : `${KINDS[row.kind] ?? row.kind} ${row.step}`),
    h("span", { class: "cell" }, h("b", {}, row.turns), h("small", {}, ` of ${row.horizon} turns`)),
    h("span", { class: "cell reward" }, h("small", {}, "reward "), number(row.reward)),
    h("span", { class: "cell" }, row.advantage === null ? "" : [h("small", {}, "advantage "), h("span", { class: row.advantage > 0 ? "plus" : row.advantage < 0 ? "minus" : "" }, signed(row.advantage))]),
    h("span", { class: "cell" }, h("small", {}, row.sampled ? `${number(row.sampled)} tokens` : "")),
    h("span", { class: `stop ${row.stop}` }, STOPS[row.stop] ?? row.stop),
  );
}

export function groupsPage(route) {
  return browser(route, "groups", {
    path: "groups",
    nouns: ["group", "groups"],
    renderRow: groupRow,
    open: (row, id) => link("group", id, row.key),
    extra: (chosen, change) => {
      const box = h("input", { type: "checkbox", checked: chosen.mixed === "true", onchange: () => change("mixed", box.checked ? "true" : "") });
      return h("label", { class: "check" }, box, "only with variance");
    },
  });
}

function groupRow(row, id) {
  return h(
    "a",
    { class: "row group-row", href: link("group", id, row.key), role: "option", tabindex: -1 },
    h("span", { class: "task" }, taskName(row), h("small", {}, row.subset)),
    h("span", { class: "when" }, row.kind === "train" ? `step ${row.step}` : `${KINDS[row.kind] ?? row.kind} ${row.step}`),
    h("span", { class: "members" }, row.members.slice(0, 32).map(([success, reward]) => h("i", { class: success ? "good" : "bad", title: `reward ${reward}` }))),
    h("span", { class: "cell" }, h("b", {}, `${row.successes} / ${row.size}`), h("small", {}, " succeeded")),
    h("span", { class: "cell" }, h("small", {}, "mean reward "), number(row.reward)),
    h("span", { class: "cell" }, row.spread > 1e-6 ? [h("small", {}, "spread "), number(row.spread)] : h("small", {}, "no variance")),
  );
}
