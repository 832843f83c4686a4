// One run: its state, warnings of the doctor, curves and stages.

import { get } from "./api.js";
import { COLORS, curvesPanel } from "./curves.js";
import { fill, guarded, h, message } from "./dom.js";
import { ago, duration, isolated, number, percent } from "./format.js";
import { problemsOf, stateBadge } from "./home.js";
import { link } from "./route.js";

/** The name and tabs at the top of every page of a run. */
export function runHead(run, current) {
  const tabs = [["run", "Curves"], ["episodes", "Episodes"], ["groups", "Groups"], ["config", "Config"]];
  if (run.kind === "eval") {
    tabs.splice(0, 1, ["eval", "Results"]);
    tabs.pop();
  }
  return h(
    "header",
    { class: "page-head run-head" },
    h("p", { class: "crumbs" }, run.kind === "eval" ? h("a", { href: link("evals") }, "Evaluations") : h("a", { href: link("runs") }, "Runs"), " / "),
    h("h1", {}, run.id),
    run.status ? stateBadge(run.status) : null,
    h("nav", { class: "tabs", "aria-label": "Run" }, tabs.map(([page, text]) => h("a", { href: link(page, run.id), "aria-current": page === current ? "page" : null }, text))),
  );
}

/** A list of the problems of a run's files, or null. */
export function problemList(run) {
  const lines = problemsOf(run);
  return lines.length ? message("warning", h("ul", {}, lines.map((line) => h("li", {}, line)))) : null;
}

export async function runPage(route) {
  const id = route.parts[0];
  let run = await get("run", { run: id });
  const head = h("div", {});
  const facts = h("div", { class: "facts" });
  const warnings = h("div", {});
  const below = h("div", { class: "columns" });
  const state = { axis: route.query.get("axis") ?? undefined };
  if (route.query.has("smooth")) state.smooth = route.query.get("smooth");
  const curves = curvesPanel(state, (change) => route.set(change));

  function draw() {
    fill(head, runHead(run, "run"));
    fill(facts, factsOf(run));
    fill(warnings, doctor(run.doctor), run.status?.error ? message("error", run.status.error) : null, problemList(run));
    fill(below, [["summary.json", () => stages(run.summary)], ["summary.json", () => subsets(run.summary)]].map(([file, make]) => guarded(file, make)));
  }

  draw();
  await curves.show([{ id, color: COLORS[0], evaluations: run.evaluations }]);
  return {
    node: h("div", { class: "page" }, head, facts, warnings, curves.node, below),
    title: id,
    dispose: curves.dispose,
    async onChange(changes) {
      if (!changes.runs.has(id) && !changes.grown) return;
      run = await get("run", { run: id });
      draw();
      await curves.show([{ id, color: COLORS[0], evaluations: run.evaluations }]);
      await curves.refresh(changes.runs);
    },
    keys: [
      ["e", "episodes", () => (location.hash = link("episodes", id))],
      ["g", "groups", () => (location.hash = link("groups", id))],
    ],
  };
}

function factsOf(run) {
  const status = run.status ?? {};
  const last = run.evaluations.at(-1);
  const first = run.evaluations[0];
  const rows = [
    ["Step", status.steps ? `${number(status.step ?? 0)} / ${number(status.steps)}` : number(status.step)],
    ["Training success", percent(run.success)],
    ["Held out", last ? (first === last ? percent(last.success) : `${percent(first.success)} → ${percent(last.success)}`) : "–"],
    ["Episodes", number(run.episodes)],
    ["Environments", run.environments.map(isolated).join(", ") || "–"],
    ["Time", status.started && status.updated ? duration(status.updated - status.started) : "–"],
    ["Updated", ago(run.updated) || "–"],
  ];
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

function doctor(warnings) {
  if (!warnings?.length) return null;
  const rules = new Map();
  for (const warning of warnings) {
    const rule = String(warning.rule ?? "warning");
    if (!rules.has(rule)) rules.set(rule, []);
    rules.get(rule).push(warning);
  }
  return h(
    "section",
    { class: "doctor card" },
    h("h2", {}, "Warnings of the doctor"),
    [...rules].map(([rule, matches]) => {
      const last = matches.at(-1);
      return h("p", {}, h("b", {}, rule.replaceAll("_", " ")), ` ${String(last.message ?? "")} `, h("small", {}, matches.length > 1 ? `steps ${matches[0].step}–${last.step}` : `step ${last.step}`));
    }),
  );
}

function stages(summary) {
  if (!summary?.stages?.length) return null;
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Horizon stages"),
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["Turns", "Steps", "Success", "Turns used"].map((name) => h("th", {}, name)))),
      h("tbody", {}, summary.stages.map((stage) => h("tr", {}, h("td", {}, stage.env ? `${number(stage.turns)} in ${stage.env}` : number(stage.turns)), h("td", {}, `${stage.first_step}–${stage.last_step}`), h("td", {}, percent(stage.success)), h("td", {}, number(stage.turns_used, 2))))),
    ),
  );
}

function subsets(summary) {
  const [before, after] = [summary?.before?.subsets, summary?.after?.subsets];
  if (!before || !after) return null;
  const row = (name, from, to) => h("tr", {}, h("td", {}, name), h("td", {}, percent(from?.success)), h("td", {}, percent(to?.success)), h("td", {}, bar(to?.success)));
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Held-out success before and after"),
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["Subset", "Before", "After", ""].map((name) => h("th", {}, name)))),
      h("tbody", {}, Object.keys(after).map((name) => row(name, before[name], after[name])), h("tr", { class: "total" }, h("td", {}, "all"), h("td", {}, percent(summary.before.success)), h("td", {}, percent(summary.after.success)), h("td", {}, bar(summary.after.success)))),
    ),
  );
}

export function bar(value) {
  const node = h("span", { class: "bar" }, h("i", {}));
  node.firstChild.style.width = `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
  return node;
}
