// Evaluations: a table of all of them, one in detail, and success by turns allowed.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { COLORS } from "./curves.js";
import { fill, guarded, h, message } from "./dom.js";
import { cost, count, isolated, number, percent } from "./format.js";
import { link } from "./route.js";
import { bar, runHead, problemList } from "./run.js";

const OWN_DATA_MARK = "†"; // the marks of the report that agentgym-rl eval writes
const PARTIAL_MARK = "*";
const FEWER_ITEMS_MARK = "§";

const lastOf = (evaluation) => evaluation.results.at(-1) ?? null;
const agentOf = (evaluation) => evaluation.config.agent.name || "agent";
const marked = (name, mark) => (mark ? `${isolated(name)} ${mark}` : name);

/** Return the plans of a scenario: its tasks and items, and the reason if a task was not played. */
const plansOf = (evaluation, scenario) => evaluation.config.tasks.filter((plan) => plan.scenario === scenario);
const isOwn = (plans) => plans.some((plan) => plan.own_data && plan.items);

/** Return "whole", "fewer items" or "part". Older versions did not record it, so it is inferred from missing data. */
function coverageOf(cell, plans) {
  const missing = plans.some((plan) => plan.items) && plans.some((plan) => plan.missing);
  return cell?.coverage ?? (missing ? "part" : "whole");
}

const inPart = (evaluation) => Object.entries(lastOf(evaluation)?.scenarios ?? {}).some(([name, cell]) => cell && coverageOf(cell, plansOf(evaluation, name)) === "part");

/**
 * Return a function from a scenario to its column. An evaluation of an environment uses the environment's name, that of
 * a suite the suite's name. If both have the same kind of data, they share a column.
 */
function columnNames(evaluations) {
  const kind = (plan) => JSON.stringify([plan.env, plan.own_data]);
  const plans = evaluations.flatMap((evaluation) => evaluation.config.tasks);
  const named = new Map(plans.filter((plan) => plan.scenario !== plan.env).map((plan) => [kind(plan), plan.scenario]));
  const planOf = (evaluation, scenario) => plansOf(evaluation, scenario).find((plan) => plan.env === scenario);
  return (evaluation, scenario) => {
    const plan = planOf(evaluation, scenario);
    return (plan && named.get(kind(plan))) ?? scenario;
  };
}

/** Return [{name, own, cells: Map(evaluation -> {cell, coverage, plans})}] of scenarios with a result. */
function columnsOf(evaluations) {
  const nameOf = columnNames(evaluations);
  const columns = new Map();
  for (const evaluation of evaluations) {
    for (const [scenario, cell] of Object.entries(lastOf(evaluation)?.scenarios ?? {})) {
      if (!cell?.success) continue;
      const [name, plans] = [nameOf(evaluation, scenario), plansOf(evaluation, scenario)];
      if (!columns.has(name)) columns.set(name, { name, own: false, cells: new Map() });
      columns.get(name).own ||= isOwn(plans);
      columns.get(name).cells.set(evaluation, { cell, plans, coverage: coverageOf(cell, plans) });
    }
  }
  return [...columns.values()];
}

const hasInterval = (rate) => rate.low !== undefined && rate.high !== undefined;
const interval = (rate) => (hasInterval(rate) ? `${(100 * rate.low).toFixed(0)}–${(100 * rate.high).toFixed(0)}` : "");

function rate(cell, mark = "", note = "") {
  const success = cell?.success;
  if (!success) return h("td", { class: "rate none" }, "–");
  return h("td", { class: "rate" }, h("b", {}, marked((100 * success.value).toFixed(1), mark)), h("small", {}, interval(success)), note ? h("small", { class: "note" }, note) : null, bar(success.value));
}

function table(headings, rows) {
  return h("div", { class: "table-scroll" }, h("table", { class: "numbers" }, h("thead", {}, h("tr", {}, headings.map((text) => h("th", {}, text)))), h("tbody", {}, rows)));
}

/** A table with one line per evaluation: success in every scenario, and the mean over them. */
function summary(entries) {
  const columns = columnsOf(entries.map(({ evaluation }) => evaluation));
  const overallOf = (evaluation) => (inPart(evaluation) ? null : lastOf(evaluation)?.overall);
  const overalls = entries.map(({ evaluation }) => overallOf(evaluation)).filter(Boolean);
  const sameScenarios = new Set(overalls.map((overall) => JSON.stringify(overall.scenarios.toSorted()))).size <= 1;
  const rows = entries.map(({ run, evaluation }) => {
    const overall = overallOf(evaluation);
    // Means over different scenarios are not comparable, so each says how many it covers.
    const note = overall && !sameScenarios ? `of ${overall.scenarios.length} scenarios` : "";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: link("eval", run.id) }, agentOf(evaluation)), h("small", {}, run.id), run.problems?.length ? h("small", { class: "invalid" }, "damaged: open it") : null),
      columns.map((column) => {
        const entry = column.cells.get(evaluation);
        // The rate of a part is not shown, because a reader would take it for the whole scenario.
        if (entry?.coverage === "part") return h("td", { class: "rate none" }, `– ${PARTIAL_MARK}`);
        return rate(entry?.cell, entry?.coverage === "fewer items" ? FEWER_ITEMS_MARK : "");
      }),
      overalls.length ? rate(overall, overall?.own_data ? OWN_DATA_MARK : "", note) : null,
      h("td", {}, h("a", { href: link("episodes", run.id) }, number(run.episodes))),
    );
  });
  const headings = ["Agent", ...columns.map((column) => marked(column.name, column.own ? OWN_DATA_MARK : "")), ...(overalls.length ? ["Mean"] : []), "Episodes"];
  return h("section", { class: "card" }, table(headings, rows), notes([...differences(columns), ...markNotes(columns)]));
}

function notes(lines) {
  return lines.length ? h("ul", { class: "notes" }, lines.map((line) => h("li", {}, line))) : null;
}

function markNotes(columns) {
  const own = columns.some((column) => column.own);
  const covered = (kind) => columns.some((column) => [...column.cells.values()].some((cell) => cell.coverage === kind));
  return [
    own ? `${OWN_DATA_MARK} own data, not the benchmark's: not comparable with published results.` : null,
    covered("part") ? `${PARTIAL_MARK} played in part: rates cover the tasks that were played, and there is no overall.` : null,
    covered("fewer items") ? `${FEWER_ITEMS_MARK} fewer items than in the suite: its tasks have other weights in this overall.` : null,
  ].filter(Boolean);
}

/** Keys of an evaluation's config that change the game itself, with their names for people. */
const GAME = { environment: "arguments of the environment", role: "role", opponent: "opponent" };

/** Return the names of GAME in which evaluations differ. Opponents with other weights are other opponents. */
function differentGames(evaluations) {
  const of = ({ config }, key) => JSON.stringify([config[key] ?? null, key === "opponent" ? (config.opponent_weights ?? null) : null]);
  return Object.keys(GAME).filter((key) => new Set(evaluations.map((evaluation) => of(evaluation, key))).size > 1).map((key) => GAME[key]);
}

/** Return a note for each column whose rows differ in what is played. */
function differences(columns) {
  const differ = (cells, of) => new Set(cells.map(({ plans }) => JSON.stringify([...new Set(plans.filter((plan) => plan.items).map(of))].toSorted()))).size > 1;
  return columns.map((column) => {
    const cells = [...column.cells.values()];
    const kinds = [...differentGames([...column.cells.keys()]), differ(cells, (plan) => plan.which_items) ? "items" : null, differ(cells, (plan) => plan.max_turns) ? "turns" : null].filter(Boolean);
    return kinds.length ? `${isolated(column.name)}: the rows differ in ${kinds.join(" and ")}; agentgym-rl compare pairs the items they share.` : null;
  }).filter(Boolean);
}

/** Fill `node` with the result of `make`, and again after every change. Keep the horizontal scroll position. */
function livePage(node, make) {
  let parts = null;
  async function draw() {
    const next = await make();
    const scrolled = [...node.querySelectorAll(".table-scroll")].map((element) => element.scrollLeft);
    parts?.scaling?.dispose();
    parts = next;
    fill(node, next.content);
    [...node.querySelectorAll(".table-scroll")].forEach((element, i) => (element.scrollLeft = scrolled[i] ?? 0));
  }
  return { draw, dispose: () => parts?.scaling?.dispose() };
}

/** The page of all evaluations. */
export async function evalsPage() {
  const node = h("div", { class: "page" });
  const live = livePage(node, async () => {
    const overview = await get("overview");
    const evaluations = overview.runs.filter((run) => run.kind === "eval");
    const entries = await Promise.all(evaluations.map(async (run) => ({ run, evaluation: await get("eval", { run: run.id }) })));
    const head = h("header", { class: "page-head" }, h("h1", {}, "Evaluations"), h("p", {}, "Success in percent, with 95% intervals."));
    if (!entries.length) return { content: [head, message("info", "No evaluations yet. agentgym-rl eval writes them; give its folder to agentgym-rl view.")] };
    const scaling = scalingChart(entries);
    return { content: [head, summary(entries), scaling?.node], scaling };
  });
  await live.draw();
  return { node, title: "Evaluations", dispose: live.dispose, keys: [], onChange: (changes) => (changes.runs.size || changes.grown ? live.draw() : null) };
}

/** The page of one evaluation. */
export async function evalPage(route) {
  const id = route.parts[0];
  const node = h("div", { class: "page" });
  const live = livePage(node, async () => {
    const [run, evaluation] = await Promise.all([get("run", { run: id }), get("eval", { run: id })]);
    const last = lastOf(evaluation);
    const top = [runHead(run, "eval"), problemList(run), factsOf(run, evaluation)];
    if (!last) return { content: [...top, message("info", "No results yet: they are written as episodes end. Episodes shows those played so far.")] };
    const scaling = scalingChart([{ run, evaluation }]);
    const scenarios = Object.keys(last.scenarios);
    return {
      scaling,
      content: [
        ...top,
        causesOf(last.total),
        scenarios.length > 1 ? summary([{ run, evaluation }]) : null,
        scaling?.node,
        scenarios.map((scenario) => guarded(scenario, () => scenarioTable(id, scenario, last, evaluation))),
        h("p", { class: "hint" }, "Intervals: Wilson for rates, bootstrap over items for rewards, MOVER for the mean. Rates leave out failed episodes. docs/reference/evaluation.md defines every number."),
      ],
    };
  });
  await live.draw();
  return {
    node, title: id, dispose: live.dispose,
    onChange: (changes) => (changes.runs.has(id) || changes.grown ? live.draw() : null),
    keys: [["e", "episodes", () => (location.hash = link("episodes", id))]],
  };
}

function factsOf(run, evaluation) {
  const last = lastOf(evaluation);
  const cells = Object.values(last?.scenarios ?? {}).filter(Boolean);
  const part = inPart(evaluation);
  const overall = part ? null : last?.overall;
  const cell = overall ?? (cells.length === 1 ? cells[0] : null);
  const success = cell?.success;
  const total = last?.total ?? {};
  const facts = [
    ["Agent", agentOf(evaluation)],
    [overall ? `Mean of ${overall.scenarios.length} scenarios` : part ? "Success, tasks played" : "Success", success ? `${(100 * success.value).toFixed(1)}%${hasInterval(success) ? ` (${interval(success)})` : ""}` : "–"],
    ["Episodes", number(run.episodes)],
    ["Errors", number(total.errors)],
    total.unplayed ? ["Not played yet", number(total.unplayed)] : null,
    ["Cost", cost(total)],
  ].filter(Boolean);
  return h("div", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A list of error causes, most frequent first. The file contains only the most frequent ones. */
function causesOf({ errors, causes }) {
  if (!causes?.length) return null;
  const listed = causes.reduce((sum, [, times]) => sum + times, 0);
  const lines = causes.map(([text, times]) => h("li", {}, h("b", {}, `${number(times)} × `), text || "no message"));
  const all = Math.max(errors ?? 0, listed);
  if (all > listed) lines.push(h("li", {}, h("b", {}, `${number(all - listed)} × `), "other causes"));
  return message("warning", `${count(all, "episode")} ended as ${all === 1 ? "an error" : "errors"}:`, h("ul", { class: "causes" }, lines));
}

function scenarioTable(id, scenario, result, evaluation) {
  const plans = plansOf(evaluation, scenario);
  const tasks = Object.entries(result.tasks).filter(([key]) => key.startsWith(`${scenario}/`));
  const rows = tasks.map(([key, cell]) => [key.slice(scenario.length + 1), cell, plans.find((plan) => `${plan.scenario}/${plan.name}` === key)]);
  const coverage = coverageOf(result.scenarios[scenario], plans);
  if (rows.length > 1) rows.push([coverage === "part" ? `tasks played ${PARTIAL_MARK}` : "overall", result.scenarios[scenario], null]);
  const cells = rows.map(([, cell]) => cell).filter(Boolean);
  const has = (name) => cells.some((cell) => cell[name] !== null && cell[name] !== undefined);
  // pass@1 equals avg@k.
  const rates = [...new Set(cells.flatMap((cell) => Object.keys(cell).filter((name) => /^(avg|pass)@/.test(name) && name !== "pass@1")))];
  const plain = (name) => (cell) => h("td", {}, number(cell[name]));
  const columns = [
    ["Success", (cell, plan) => rate(cell, !plan && coverage === "fewer items" ? FEWER_ITEMS_MARK : "")],
    ...rates.map((name) => [name, (cell) => rate({ success: cell[name] })]),
    ["Reward", (cell) => h("td", {}, number(cell.reward?.value), cell.reward && hasInterval(cell.reward) ? h("small", {}, ` ${number(cell.reward.low, 2)} to ${number(cell.reward.high, 2)}`) : null)],
    ["Turns", plain("turns")],
    ["Truncated", (cell) => h("td", {}, percent(cell.truncated))],
    has("prompt_tokens") ? ["Prompt tokens", plain("prompt_tokens")] : null,
    has("sampled_tokens") ? ["Sampled tokens", plain("sampled_tokens")] : null,
    has("cost_usd") || cells.some((cell) => cell.unreported) ? ["Cost", (cell) => h("td", {}, cost(cell))] : null,
    ["Items", plain("items")],
    ["Episodes", plain("episodes")],
    ["Errors", plain("errors")],
    cells.some((cell) => cell.errors) ? ["With errors as failures", (cell) => h("td", {}, percent(cell.success_errors_as_failures))] : null,
    cells.some((cell) => cell.unplayed) ? ["Not played yet", plain("unplayed")] : null,
  ].filter((column) => column && cells.length);
  const line = ([name, cell, plan]) => {
    const head = h("th", { scope: "row" }, plan ? h("a", { href: link("episodes", id, { env: plan.env, subset: plan.subset ?? "" }) }, name) : name);
    if (!cell) return h("tr", {}, head, h("td", { colspan: Math.max(1, columns.length), class: "none why" }, plan?.missing || "not played"));
    return h("tr", { class: plan ? null : "total" }, head, columns.map(([, draw]) => draw(cell, plan)));
  };
  const data = [...new Set(plans.filter((plan) => plan.items && plan.data).map((plan) => `Played on ${plan.data}.`))];
  const marks = markNotes([{ own: isOwn(plans), cells: new Map([[evaluation, { coverage }]]) }]);
  return h("section", { class: "card" }, table([marked(scenario, [isOwn(plans) ? OWN_DATA_MARK : "", coverage === "part" ? PARTIAL_MARK : ""].filter(Boolean).join(" ")), ...columns.map(([name]) => name)], rows.map(line)), notes([...data, ...marks]));
}

function scalingChart(entries) {
  const lines = [];
  const marks = [];
  const nameOf = columnNames(entries.map(({ evaluation }) => evaluation));
  for (const { evaluation } of entries) {
    const results = evaluation.results.filter((result) => result.max_turns);
    if (results.length < 2) continue;
    for (const scenario of Object.keys(results[0].scenarios)) {
      const rows = results.map((result) => [result.max_turns, result.scenarios[scenario]?.success]).filter(([, success]) => success);
      if (!rows.length) continue;
      const color = COLORS[lines.length % COLORS.length];
      const plans = plansOf(evaluation, scenario);
      const part = coverageOf(results[0].scenarios[scenario], plans) === "part";
      const label = marked(nameOf(evaluation, scenario), [isOwn(plans) ? OWN_DATA_MARK : "", part ? PARTIAL_MARK : ""].filter(Boolean).join(" "));
      const name = entries.length > 1 ? `${isolated(agentOf(evaluation))} · ${label}` : label;
      lines.push({ name, color, points: rows.map(([turns, success]) => [turns, success.value]) });
      marks.push({ name: `${name} 95%`, color, points: rows.map(([turns, success]) => ({ x: turns, y: success.value, low: success.low, high: success.high, text: `${percent(success.low)} to ${percent(success.high)}` })) });
    }
  }
  if (!lines.length) return null;
  const xTicks = [...new Set(lines.flatMap((line) => line.points.map(([turns]) => turns)))];
  const plot = chart({ format: percent, range: [0, 1], xLabel: "turns", xTitle: "turns allowed", yTitle: "success", xTicks, height: 260, label: "success by turns allowed" });
  const legend = h("div", { class: "legend-lines" }, lines.map((line) => h("span", {}, h("i", { style: { background: line.color } }), line.name)));
  requestAnimationFrame(() => plot.update({ lines, marks }));
  return { node: h("figure", { class: "card chart-card scaling" }, h("figcaption", {}, "Success by turns allowed"), legend, plot.node), dispose: plot.dispose };
}
