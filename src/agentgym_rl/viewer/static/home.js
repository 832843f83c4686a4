// All runs and evaluations with their state, and the curves of selected runs.

import { get, isExport } from "./api.js";
import { sparkline } from "./chart.js";
import { COLORS, curvesPanel } from "./curves.js";
import { fill, guarded, h, message } from "./dom.js";
import { ago, count, isolated, number, percent } from "./format.js";
import { link } from "./route.js";

const SELECTED_BY_DEFAULT = 3;
const colors = new Map(); // a run keeps its colour when the order changes

export function stateBadge(status) {
  const state = status?.state ?? "unknown";
  return h("span", { class: `state ${state}`, title: status?.error ?? "" }, state);
}

function progressOf(status) {
  if (!status?.steps) return status?.step ? `step ${status.step}` : "";
  return h(
    "span",
    { class: "progress-text" },
    `${number(status.step ?? 0)} / ${number(status.steps)}`,
    h("progress", { max: status.steps, value: status.step ?? 0, "aria-label": "steps done" }),
  );
}

/** Return the problems of a run's files. */
export function problemsOf(run) {
  const lines = run.broken ? [`${count(run.broken, "line")} of its trajectory files could not be read and ${run.broken === 1 ? "is" : "are"} left out.`] : [];
  return [...(run.problems ?? []), ...lines];
}

function problemOf(run) {
  const [first, ...rest] = problemsOf(run);
  return first ? h("small", { class: "invalid" }, rest.length ? `${first} (and ${rest.length} more)` : first) : null;
}

export async function homePage(route) {
  const list = h("div", { class: "runs" });
  const evals = h("div", {});
  let chosen = route.query.get("show")?.split(",") ?? null;
  let known = [];
  const state = { smooth: route.query.get("smooth"), axis: route.query.get("axis") ?? undefined };
  if (state.smooth === null) delete state.smooth;
  const curves = curvesPanel(state, (change) => route.set(change));
  const node = h("div", { class: "page" }, list, curves.node, evals);

  async function load() {
    const overview = await get("overview");
    known = overview.runs.filter((run) => run.kind === "run");
    chosen ??= known.slice(0, SELECTED_BY_DEFAULT).map((run) => run.id);
    fill(list, known.length ? [heading(overview), h("ul", { class: "run-list card" }, known.map((run) => guarded(run.id, () => runRow(run))))] : emptyMessage(overview));
    const finished = overview.runs.filter((run) => run.kind === "eval");
    fill(evals, finished.length ? [h("h2", {}, "Evaluations"), h("ul", { class: "run-list card" }, finished.map((run) => guarded(run.id, () => evalRow(run))))] : null);
    curves.node.hidden = !known.length;
  }

  function heading(overview) {
    return h("header", { class: "page-head" }, h("h1", {}, "Runs"), h("p", {}, overview.roots.join(", ")));
  }

  function emptyMessage(overview) {
    if (overview.runs.length) return null;
    return message("info", h("b", {}, "No runs yet. "), `Train one with agentgym-rl train recipes/quickstart.toml. New runs below ${overview.roots.join(", ")} appear automatically.`);
  }

  function colorOf(run) {
    if (!colors.has(run.id)) colors.set(run.id, COLORS[colors.size % COLORS.length]);
    return colors.get(run.id);
  }

  function runRow(run) {
    const box = h("input", { type: "checkbox", checked: chosen.includes(run.id), "aria-label": `Show curves of ${run.id}`, style: { "--color": colorOf(run) }, onchange: () => toggle(run.id, box.checked) });
    const held = run.held_out;
    return h(
      "li",
      { class: "run-row" },
      box,
      h("a", { href: link("run", run.id), class: "run-name" }, run.id, h("small", {}, run.environments.map(isolated).join(", ")), problemOf(run)),
      stateBadge(run.status),
      h("span", { class: "run-progress" }, progressOf(run.status)),
      h("span", { class: "run-spark" }, sparkline(run.spark ?? [], colorOf(run))),
      h("span", { class: "run-success", title: "Success in the last training step" }, percent(run.success), h("small", {}, "training")),
      h("span", { class: "run-success", title: held ? `${held.episodes} held-out episodes after step ${held.step}` : "" }, percent(held?.success), h("small", {}, "held out")),
      h("a", { href: link("episodes", run.id), class: "run-count" }, count(run.episodes, "episode")),
      h("time", {}, ago(run.updated)),
    );
  }

  function evalRow(run) {
    return h(
      "li",
      { class: "run-row eval-row" },
      h("a", { href: link("eval", run.id), class: "run-name" }, run.id, h("small", {}, run.agent || run.environments.join(", ")), problemOf(run)),
      h("span", { class: "run-success" }, typeof run.success === "number" ? percent(run.success) : "", run.in_part ? h("small", {}, "in part") : null),
      h("a", { href: link("episodes", run.id), class: "run-count" }, count(run.episodes, "episode")),
      h("time", {}, ago(run.updated)),
    );
  }

  async function toggle(id, on) {
    chosen = on ? [...chosen, id] : chosen.filter((other) => other !== id);
    route.set({ show: chosen.join(",") || "none" });
    await showCurves();
  }

  async function showCurves() {
    const runs = known.filter((run) => chosen.includes(run.id));
    const details = await Promise.all(runs.map((run) => get("run", { run: run.id })));
    await curves.show(runs.map((run, i) => ({ id: run.id, color: colorOf(run), evaluations: details[i].evaluations })));
  }

  await load();
  await showCurves();
  return {
    node,
    title: "Runs",
    dispose: curves.dispose,
    async onChange(changes) {
      if (!changes.runs.size && !changes.grown) return;
      await load();
      await curves.refresh(changes.runs);
    },
    keys: isExport() ? [] : [["p", "open the playground", () => (location.hash = link("play"))]],
  };
}
