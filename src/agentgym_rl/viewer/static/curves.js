// Metrics of one or several runs as a grid of charts.

import { get } from "./api.js";
import { chart, sharedCursor, smooth } from "./chart.js";
import { fill, h, segmented } from "./dom.js";
import { count, duration, number, percent } from "./format.js";

const MAIN = [
  { title: "Success", metric: "success/mean", unit: "share of episodes", rate: true, heldOut: true, hint: "Share of episodes that ended in success. Circles: held-out evaluations with 95% intervals." },
  { title: "Reward", metric: "reward/mean", unit: "reward per episode", hint: "Sum of an episode's rewards, averaged over episodes." },
  { title: "Turns and horizon", metric: "turns/mean", unit: "turns per episode", horizon: true, hint: "Turns played per episode; dashed: turns allowed." },
  { title: "Elo rating", metric: "elo/learner", unit: "points", hint: "Rating of the learner against its past snapshots; it starts at 1000." },
  { title: "Entropy", metric: "entropy/mean", unit: "nats per token", hint: "Entropy of the next-token distribution at the sampled tokens, in nats." },
  { title: "KL to the reference", metric: "kl/reference", unit: "nats per token", hint: "KL divergence from the reference model." },
  { title: "Mismatch", metric: "mismatch/abs", unit: "nats per token", hint: "Mean absolute difference between the learner's and the sampler's log-probability of a token. Should be near 0." },
  { title: "Throughput", metric: "tokens/sampled_per_s", unit: "tokens per second", hint: "Tokens sampled per second of rollout." },
  { title: "Truncated", metric: "truncated/rate", unit: "share of episodes", rate: true, hint: "Share of episodes that ran out of turns, context or time, or whose reply was cut." },
  { title: "Groups without variance", metric: "groups/zero_variance", unit: "share of groups", rate: true, hint: "Share of groups whose episodes all have the same reward. They give no learning signal." },
  { title: "Invalid actions", metric: "actions/invalid_rate", unit: "share of turns", rate: true, hint: "Share of turns whose action the environment could not parse or execute." },
  { title: "Gradient norm", metric: "grad/norm", unit: "norm", hint: "Norm of the gradient before clipping." },
  { title: "Loss", metric: "loss", unit: "loss", hint: "The minimized objective." },
  { title: "GPU busy", metric: "system/gpu_busy", unit: "share of time", rate: true, hint: "Share of time in which the GPU ran a kernel, the mean over learner ranks." },
  { title: "GPU memory", metric: "system/gpu_memory_gib", unit: "GiB", hint: "Most memory in use on the GPU, by all processes; the maximum over learner ranks." },
  { title: "Engines' GPUs busy", metric: "system/engine_gpu_busy", unit: "share of time", rate: true, hint: "The same of engines that have GPUs of their own." },
  { title: "Engines' GPU memory", metric: "system/engine_gpu_memory_gib", unit: "GiB", hint: "Most memory in use on a GPU of an engine, by all processes; the maximum over engines." },
  { title: "CPU busy", metric: "system/cpu_busy", unit: "share of time", rate: true, hint: "Share of time in which the cores of the host were busy; the busiest host of a cluster." },
  { title: "Host load", metric: "system/load", unit: "processes", hint: "Load average of the last minute: processes that ran or waited for a core." },
  { title: "Host memory", metric: "system/memory_share", unit: "share of memory", rate: true, hint: "Share of the host's memory in use." },
];

export const COLORS = Array.from({ length: 8 }, (_, i) => `var(--c${i})`);

/** Return stages of equal horizon, those of the first environment if there are several. */
function stagesOf(metrics) {
  const name = Object.keys(metrics.series).find((metric) => metric === "horizon" || metric.startsWith("horizon/"));
  if (!name) return [];
  const stages = [];
  metrics.steps.forEach((step, i) => {
    const turns = metrics.series[name][i];
    if (turns === null) return;
    if (stages.length && stages.at(-1).turns === turns) stages.at(-1).to = step + 0.5;
    else stages.push({ from: step - 0.5, to: step + 0.5, turns, label: count(turns, "turn"), short: `${turns}` });
  });
  return stages.length > 1 ? stages : [];
}

/** A panel of charts. `show([{id, color, evaluations}])` sets the runs, `refresh(ids)` reloads those runs. */
export function curvesPanel(state, onState) {
  const cursor = sharedCursor();
  const grid = h("div", { class: "charts" });
  const more = h("div", { class: "charts more" });
  const loaded = new Map();
  let runs = [];
  let charts = new Map();
  let smoothing = Number(state.smooth ?? 0.3);
  let axis = state.axis ?? "step";

  const slider = h("input", {
    type: "range", min: 0, max: 1, step: 0.05, "aria-label": "Smoothing", class: "smoothing",
    oninput: () => {
      smoothing = Number(slider.value);
      onState({ smooth: smoothing });
      drawAll();
    },
  });
  slider.value = String(smoothing);
  const xAxis = segmented([["step", "Step"], ["time", "Time"]], axis, (value) => {
    axis = value;
    onState({ axis });
    rebuild();
  }, "Horizontal axis");
  const controls = h("div", { class: "chart-controls" }, h("label", {}, "Smoothing", slider), xAxis);
  const details = h("details", { class: "more-metrics", ontoggle: () => details.open && drawAll() }, h("summary", {}, "All other metrics"), more);
  const node = h("section", { class: "curves" }, controls, grid, details);

  async function show(next) {
    runs = next;
    await Promise.all(runs.filter((run) => !loaded.has(run.id)).map((run) => load(run.id)));
    arrange();
  }

  async function load(id) {
    loaded.set(id, await get("metrics", { run: id }));
  }

  async function refresh(ids) {
    const changed = runs.filter((run) => ids.has(run.id));
    if (!changed.length) return;
    await Promise.all(changed.map((run) => load(run.id)));
    arrange();
  }

  function allNames() {
    return [...new Set(runs.flatMap((run) => Object.keys(loaded.get(run.id)?.series ?? {})))].sort();
  }

  /** Keep the charts if the metrics are the same, so that hovering is not interrupted. Otherwise rebuild them. */
  function arrange() {
    const metrics = Object.values(specs()).flat().map((spec) => spec.metric);
    if (metrics.length && String(metrics) === String([...charts.keys()])) drawAll();
    else rebuild();
  }

  function specs() {
    const names = allNames();
    const main = MAIN.filter((spec) => names.includes(spec.metric) || (spec.heldOut && runs.some((run) => run.evaluations?.length)));
    const taken = new Set(MAIN.map((spec) => spec.metric));
    const rest = names.filter((name) => !taken.has(name) && !name.startsWith("horizon/")).map((name) => ({ title: name, metric: name, small: true }));
    return { main, rest };
  }

  function rebuild() {
    for (const entry of charts.values()) entry.chart.dispose();
    cursor.clear();
    charts = new Map();
    const { main, rest } = specs();
    fill(grid, main.length ? main.map(card) : h("p", { class: "empty wide" }, runs.length ? "No step is finished yet." : "Select runs above to see their curves."));
    fill(more, rest.map(card));
    details.hidden = !rest.length;
    drawAll();
  }

  function card(spec) {
    const options = {
      cursor, label: spec.title, height: spec.small ? 150 : 206,
      yTitle: spec.unit ?? spec.metric.split("/").at(-1).replaceAll("_", " "), xTitle: axis === "time" ? "time since the first step" : "training step",
      format: spec.rate ? percent : number, range: spec.rate ? [0, 1] : null,
      xLabel: axis === "time" ? "after" : "step", formatX: axis === "time" ? duration : null,
    };
    const plot = chart(options);
    charts.set(spec.metric, { chart: plot, spec });
    return h("figure", { class: spec.small ? "card chart-card small" : "card chart-card" }, h("figcaption", { title: spec.hint ?? "" }, spec.title), plot.node);
  }

  function drawAll() {
    for (const { chart: plot, spec } of charts.values()) {
      if (!spec.small || details.open) plot.update(dataOf(spec));
    }
  }

  function dataOf(spec) {
    const lines = [];
    const marks = [];
    let stages = [];
    for (const run of runs) {
      const metrics = loaded.get(run.id);
      if (!metrics) continue;
      const xs = axis === "time" ? metrics.times.map((time) => time - metrics.times[0]) : metrics.steps;
      const values = metrics.series[spec.metric];
      if (values) {
        const width = (smoothing ** 2 * values.length) / 8;
        const pairs = (ys) => ys.map((value, i) => [xs[i], value]);
        const line = { name: run.id, color: run.color, points: pairs(smooth(values, width)) };
        lines.push({ ...line, raw: smoothing ? pairs(values) : null });
      }
      if (spec.horizon) {
        for (const name of Object.keys(metrics.series).filter((metric) => metric === "horizon" || metric.startsWith("horizon/"))) {
          lines.push({ name: `${runs.length > 1 ? `${run.id} ` : ""}${name}`, color: run.color, dashed: true, stepped: true, points: metrics.series[name].map((value, i) => [xs[i], value]) });
        }
      }
      if (spec.heldOut && run.evaluations && axis === "step") {
        const points = run.evaluations.map((e) => ({
          x: e.step, y: e.success, low: e.low, high: e.high, text: `${percent(e.success)} of ${e.episodes}`,
        }));
        marks.push({ name: runs.length > 1 ? `${run.id} held out` : "held out", color: run.color, points });
      }
      if (runs.length === 1 && axis === "step") stages = stagesOf(metrics);
    }
    return { lines, marks, stages };
  }

  function dispose() {
    for (const entry of charts.values()) entry.chart.dispose();
  }

  return { node, show, refresh, dispose };
}
