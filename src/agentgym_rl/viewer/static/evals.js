// Evaluations: who solved what, how surely, at what cost, and how success grows with the turns allowed.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { COLORS } from "./curves.js";
import { h, message } from "./dom.js";
import { number, percent } from "./format.js";
import { link } from "./route.js";
import { bar, runHead } from "./run.js";

const lastOf = (evaluation) => evaluation.results?.at?.(-1) ?? null;
const agentOf = (evaluation) => String(evaluation.config?.agent?.name ?? evaluation.agent ?? "agent");

function rate(cell) {
  const success = cell?.success;
  if (!success) return h("td", { class: "rate none" }, "–");
  const interval = success.low === undefined ? "" : `${Math.round(100 * success.low)}–${Math.round(100 * success.high)}`;
  return h("td", { class: "rate" }, h("b", {}, (100 * success.value).toFixed(1)), h("small", {}, interval), bar(success.value));
}

function table(headings, rows) {
  return h("div", { class: "table-scroll" }, h("table", { class: "numbers" }, h("thead", {}, h("tr", {}, headings.map((text) => h("th", {}, text)))), h("tbody", {}, rows)));
}

/** All evaluations in one table, one line each. */
export async function evalsPage() {
  const overview = await get("overview");
  const places = overview.runs.filter((run) => run.kind === "eval");
  const found = await Promise.all(places.map(async (place) => ({ place, evaluation: await get("eval", { run: place.id }) })));
  const done = found.filter(({ evaluation }) => lastOf(evaluation));
  const scenarios = [...new Set(done.flatMap(({ evaluation }) => Object.keys(lastOf(evaluation).scenarios ?? {})))];
  const node = h("div", { class: "page" }, h("header", { class: "page-head" }, h("h1", {}, "Evaluations"), h("p", {}, "Success in percent, with 95% intervals.")));
  if (!found.length) {
    node.append(message("info", "No evaluations here yet. agentgym-rl eval writes them; give its folder to agentgym-rl view."));
    return { node, title: "Evaluations", keys: [] };
  }
  node.append(
    h("section", { class: "card" }, table(["Agent", ...scenarios, "Mean", "Episodes"], found.map(({ place, evaluation }) => {
      const last = lastOf(evaluation);
      return h("tr", {}, h("th", { scope: "row" }, h("a", { href: link("eval", place.id) }, agentOf(evaluation)), h("small", {}, place.id)), scenarios.map((name) => rate(last?.scenarios?.[name])), rate(last?.overall), h("td", {}, h("a", { href: link("episodes", place.id) }, number(place.episodes))));
    }))),
  );
  const scaling = scalingChart(done);
  if (scaling) node.append(scaling.node);
  return { node, title: "Evaluations", dispose: scaling?.dispose, keys: [] };
}

/** One evaluation in full. */
export async function evalPage(route) {
  const id = route.parts[0];
  const [run, evaluation] = await Promise.all([get("run", { run: id }), get("eval", { run: id })]);
  const last = lastOf(evaluation);
  const node = h("div", { class: "page" }, runHead(run, "eval"));
  const facts = [["Agent", agentOf(evaluation)], ["Success", percent(run.success)], ["Episodes", number(run.episodes)], ["Errors", number(last?.total?.errors)], ["Cost", last?.total?.cost_usd ? `$${number(last.total.cost_usd)}` : "–"]];
  node.append(h("div", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  if (!last) {
    node.append(message("info", "No results yet: they are written as episodes end. What was played so far is under Episodes."));
    return { node, title: id, keys: [] };
  }
  const scaling = scalingChart([{ place: run, evaluation }]);
  if (scaling) node.append(scaling.node);
  for (const scenario of Object.keys(last.scenarios)) node.append(scenarioTable(id, scenario, last, evaluation));
  node.append(h("p", { class: "hint" }, "Intervals: Wilson for rates, bootstrap over items for rewards. Episodes that failed are left out of rates. docs/evaluation.md defines every number."));
  return { node, title: id, dispose: scaling?.dispose, keys: [["e", "episodes", () => (location.hash = link("episodes", id))]] };
}

function scenarioTable(id, scenario, result, evaluation) {
  const plans = (evaluation.config?.tasks ?? []).filter((plan) => plan.scenario === scenario);
  const tasks = Object.entries(result.tasks ?? {}).filter(([key]) => key.startsWith(`${scenario}/`));
  const rows = tasks.map(([key, cell]) => [key.slice(scenario.length + 1), cell, plans.find((plan) => `${plan.scenario}/${plan.name}` === key)]);
  if (rows.length > 1) rows.push(["overall", result.scenarios[scenario], null]);
  const cells = rows.map(([, cell]) => cell).filter(Boolean);
  const several = [...new Set(cells.flatMap((cell) => Object.keys(cell).filter((name) => /^(avg|pass)@/.test(name))))];
  const tokens = cells.some((cell) => cell.sampled_tokens !== null && cell.sampled_tokens !== undefined);
  const cost = cells.some((cell) => cell.cost_usd !== null && cell.cost_usd !== undefined);
  const headings = [scenario, "Success", ...several, "Reward", "Turns", ...(tokens ? ["Sampled tokens"] : []), ...(cost ? ["Cost"] : []), "Items", "Episodes", "Errors"];
  return h(
    "section",
    { class: "card" },
    table(headings, rows.map(([name, cell, plan]) => {
      const filter = plan ? { env: plan.env, subset: plan.subset ?? "" } : {};
      const head = h("th", { scope: "row" }, plan ? h("a", { href: link("episodes", id, filter) }, name) : name);
      if (!cell) return h("tr", {}, head, h("td", { colspan: headings.length - 1, class: "none" }, plan?.missing || "not played"));
      const plain = (value) => h("td", {}, number(value));
      return h("tr", { class: plan ? null : "total" }, head, rate(cell), several.map((some) => rate({ success: cell[some] })), h("td", {}, number(cell.reward?.value)), plain(cell.turns), tokens ? plain(cell.sampled_tokens) : null, cost ? h("td", {}, cell.cost_usd === null ? "–" : `$${number(cell.cost_usd)}`) : null, plain(cell.items), plain(cell.episodes), plain(cell.errors));
    })),
  );
}

function scalingChart(found) {
  const lines = [];
  const marks = [];
  for (const { evaluation } of found) {
    const results = (evaluation.results ?? []).filter((result) => result.max_turns);
    if (results.length < 2) continue;
    const names = Object.keys(results[0].scenarios ?? {});
    for (const scenario of names) {
      const color = COLORS[lines.length % COLORS.length];
      const rows = results.map((result) => [result.max_turns, result.scenarios[scenario]?.success]).filter(([, success]) => success);
      const name = found.length > 1 ? `${agentOf(evaluation)} · ${scenario}` : scenario;
      lines.push({ name, color, points: rows.map(([turns, success]) => [turns, success.value]) });
      marks.push({ name: `${name} 95%`, color, points: rows.map(([turns, success]) => ({ x: turns, y: success.value, low: success.low, high: success.high, text: `${percent(success.low)} to ${percent(success.high)}` })) });
    }
  }
  if (!lines.length) return null;
  const xTicks = [...new Set(lines.flatMap((line) => line.points.map(([turns]) => turns)))];
  const made = chart({ format: percent, range: [0, 1], xLabel: "turns", xTicks, height: 260, label: "success by turns allowed" });
  const legend = h("div", { class: "legend-lines" }, lines.map((line) => h("span", {}, h("i", { style: { background: line.color } }), line.name)));
  requestAnimationFrame(() => made.update({ lines, marks }));
  return { node: h("figure", { class: "card chart-card scaling" }, h("figcaption", {}, "Success by turns allowed"), legend, made.node), dispose: made.dispose };
}
