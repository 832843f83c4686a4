// Line charts in SVG: several runs, smoothed and raw values, shaded stages, values on hover.

import { fill, h, s } from "./dom.js";
import { number } from "./format.js";

const MARGIN = { top: 18, right: 14, bottom: 40, left: 68 };
const MAX_POINTS = 600;
const LETTER = 6.6; // px per character of a stage's label, an upper bound

/** Smooth with a Gaussian of standard deviation `width` points, renormalized at the ends. Gaps are skipped. */
export function smooth(values, width) {
  if (width < 0.2) return values;
  const reach = Math.ceil(3 * width);
  const kernel = Array.from({ length: reach + 1 }, (_, d) => Math.exp((-d * d) / (2 * width * width)));
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0;
    let weight = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      if (values[j] === null) continue;
      sum += kernel[Math.abs(i - j)] * values[j];
      weight += kernel[Math.abs(i - j)];
    }
    return sum / weight;
  });
}

/** Return about `wanted` round numbers that cover low to high. */
export function ticks(low, high, wanted) {
  if (!(high - low > 1e-12 * Math.abs(high))) return [low]; // a step would be smaller than the rounding error
  const rough = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough * 0.999) ?? rough;
  const values = [];
  for (let tick = Math.ceil(low / size - 1e-9) * size; tick <= high + size * 1e-6; tick += size) {
    values.push(Math.abs(tick) < size * 1e-9 ? 0 : tick);
  }
  return values;
}

function thin(points) {
  const size = Math.ceil(points.length / MAX_POINTS);
  if (size <= 1) return points;
  const kept = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size).filter(([, y]) => y !== null);
    if (part.length) kept.push([part[0][0], part.reduce((sum, [, y]) => sum + y, 0) / part.length]);
  }
  return kept;
}

function pathOf(points, x, y, stepped) {
  let path = "";
  let pen = false;
  let before = 0;
  for (const [px, py] of points) {
    if (py === null) {
      pen = false;
      continue;
    }
    const [cx, cy] = [x(px).toFixed(1), y(py).toFixed(1)];
    if (pen && stepped && cy !== before) path += `H${cx}`;
    path += `${pen ? "L" : "M"}${cx},${cy}`;
    before = cy;
    pen = true;
  }
  return path;
}

/** Return a pointer position shared by charts, so that all of them show the same step. */
export function sharedCursor() {
  const charts = new Set();
  return {
    add: (chart) => charts.add(chart),
    clear: () => charts.clear(),
    move: (x, source) => charts.forEach((chart) => chart.point(x, chart === source)),
  };
}

/**
 * lines: [{name, color, points: [[x, y]], raw: [[x, y]] or null, stepped, dashed}]
 * marks: [{name, color, points: [{x, y, low, high, text}]}]
 * stages: [{from, to, label, short}]
 * options: {format, range: [low, high], height, xTitle, yTitle, xLabel, formatX, cursor, label}
 */
export function chart(options) {
  const node = h("div", { class: "chart" });
  const tip = h("div", { class: "tip", hidden: true });
  const cursor = options.cursor ?? sharedCursor();
  const format = options.format ?? number;
  const formatX = options.formatX ?? ((value) => number(value));
  const height = options.height ?? 190;
  let data = { lines: [], marks: [], stages: [] };
  let view = null;
  const self = { node, update, point, dispose };
  // The element is never replaced, so that a redraw does not interrupt hovering.
  const drawing = s("svg", {
    role: "img", "aria-label": options.label ?? "chart",
    onpointermove: (event) => view && cursor.move(view.x.invert(event.clientX - drawing.getBoundingClientRect().left), self),
    onpointerleave: () => cursor.move(null, self),
  });

  const observer = new ResizeObserver(() => draw());
  observer.observe(node);
  cursor.add(self);

  function update(next) {
    data = { lines: [], marks: [], stages: [], ...next };
    draw();
  }

  function draw() {
    const width = node.clientWidth;
    if (!width) return;
    const all = [
      ...data.lines.flatMap((line) => [...line.points, ...(line.raw ?? [])]),
      ...data.marks.flatMap((mark) => mark.points.flatMap((p) => [[p.x, p.low ?? p.y], [p.x, p.high ?? p.y]])),
    ].filter(([, y]) => y !== null && Number.isFinite(y));
    if (!all.length) {
      view = null;
      fill(node, h("p", { class: "empty" }, "no data"));
      return;
    }
    const x = scale(extent(all.map(([px]) => px)), [MARGIN.left, width - MARGIN.right]);
    const y = scale(padded(all.map(([, py]) => py), options.range), [height - MARGIN.bottom, MARGIN.top]);
    const rule = s("line", { class: "rule", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    const dots = s("g", {});
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) drawing.setAttribute(name, value);
    fill(
      drawing,
      s("g", { class: "stages" }, data.stages.map((stage, i) => shade(stage, i, x, width))),
      s("g", { class: "axis" }, yAxis(y, width), xAxis(x, width), titles(width)),
      s("g", {}, data.lines.map((line) => drawLine(line, x, y))),
      s("g", {}, data.marks.map((mark) => drawMarks(mark, x, y))),
      rule,
      dots,
    );
    view = { x, y, rule, dots, width };
    if (drawing.parentNode !== node) fill(node, drawing, tip);
  }

  function point(at, here) {
    if (!view) return;
    tip.hidden = true;
    view.rule.setAttribute("visibility", "hidden");
    view.dots.replaceChildren();
    if (at === null) return;
    const hitLines = data.lines
      .map((line) => [line, nearest(line.points, at)])
      .filter(([line, p]) => p && p[1] !== null && Math.abs(p[0] - at) <= reach(line.points));
    const hitMarks = data.marks
      .map((mark) => [mark, nearest(mark.points.map((p) => [p.x, p.y, p.text]), at)])
      .filter(([, p]) => p && Math.abs(view.x(p[0]) - view.x(at)) < 8);
    if (!hitLines.length && !hitMarks.length) return;
    const px = view.x((hitLines[0] ?? hitMarks[0])[1][0]);
    view.rule.setAttribute("x1", px);
    view.rule.setAttribute("x2", px);
    view.rule.setAttribute("visibility", "visible");
    for (const [line, p] of hitLines) {
      view.dots.append(s("circle", { r: 3.5, cx: view.x(p[0]), cy: view.y(p[1]), style: { fill: line.color } }));
    }
    if (!here) return;
    const rows = [
      ...hitLines.map(([line, p]) => [line.color, line.name, format(p[1])]),
      ...hitMarks.map(([mark, p]) => [mark.color, mark.name, p[2] ?? format(p[1])]),
    ];
    fill(
      tip,
      h("b", {}, `${options.xLabel ?? "step"} ${formatX((hitLines[0] ?? hitMarks[0])[1][0])}`),
      rows.map(([color, name, text]) =>
        h("div", {}, h("i", { style: { background: color } }), h("span", {}, name), h("em", {}, text)),
      ),
    );
    tip.hidden = false;
    const tipLeft = px + 14 + tip.offsetWidth > view.width ? px - tip.offsetWidth - 14 : px + 14;
    tip.style.left = `${Math.max(0, tipLeft)}px`;
  }

  function shade(stage, i, x, width) {
    const left = Math.max(MARGIN.left, x(stage.from));
    const right = Math.min(width - MARGIN.right, x(stage.to));
    if (right <= left) return null;
    return [
      s("rect", {
        x: left, y: MARGIN.top, width: right - left, height: height - MARGIN.top - MARGIN.bottom,
        class: i % 2 ? "stage odd" : "stage",
      }, s("title", {}, stage.label)),
      labelOf(stage, right - left, left),
    ];
  }

  /** Return the longest label that fits into the stage, or null. */
  function labelOf(stage, width, left) {
    const text = [stage.label, stage.short].find((label) => label && label.length * LETTER + 4 <= width);
    return text ? s("text", { x: left + 2, y: MARGIN.top - 5, class: "stage-label" }, text) : null;
  }

  function yAxis(y, width) {
    return ticks(y.low, y.high, height > 150 ? 4 : 3).map((tick) => [
      s("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      s("text", { x: MARGIN.left - 7, y: y(tick) + 3.5, "text-anchor": "end" }, format(tick)),
    ]);
  }

  function xAxis(x, width) {
    const marks = options.xTicks ?? ticks(x.low, x.high, Math.max(2, Math.floor(width / 110)));
    return marks
      .filter((tick) => options.formatX || Number.isInteger(tick))
      .map((tick) => s("text", { x: x(tick), y: height - 23, "text-anchor": "middle" }, formatX(tick)));
  }

  function titles(width) {
    const [across, down] = [(MARGIN.left + width - MARGIN.right) / 2, (MARGIN.top + height - MARGIN.bottom) / 2];
    return [
      s("text", { class: "axis-title", x: across, y: height - 6, "text-anchor": "middle" }, options.xTitle ?? ""),
      s("text", { class: "axis-title", x: -down, y: 12, "text-anchor": "middle", transform: "rotate(-90)" }, options.yTitle ?? ""),
    ];
  }

  function dispose() {
    observer.disconnect();
  }
  return self;
}

function drawLine(line, x, y) {
  return [
    line.raw ? s("path", { d: pathOf(thin(line.raw), x, y), class: "raw", style: { stroke: line.color } }) : null,
    s("path", {
      d: pathOf(line.stepped ? line.points : thin(line.points), x, y, line.stepped),
      class: line.dashed ? "line dashed" : "line",
      style: { stroke: line.color },
    }),
  ];
}

function drawMarks(mark, x, y) {
  return mark.points.map((p) => [
    p.low === undefined ? null : s("line", { class: "whisker", x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high), style: { stroke: mark.color } }),
    s("circle", { class: "mark", r: 4, cx: x(p.x), cy: y(p.y), style: { stroke: mark.color } }),
  ]);
}

function scale([low, high], [from, to]) {
  const range = high - low || 1;
  const map = (value) => from + ((value - low) / range) * (to - from);
  map.invert = (position) => low + ((position - from) / (to - from)) * range;
  map.low = low;
  map.high = high;
  return map;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const margin = Math.max(0.5, 1e-3 * Math.abs(low)); // relative to large numbers
  return low === high ? [low - margin, high + margin] : [low, high];
}

function padded(values, range) {
  if (range) return range;
  let [low, high] = extent(values);
  if (low >= 0 && low < 0.5 * high) low = 0;
  const margin = 0.06 * (high - low);
  return [low === 0 ? 0 : low - margin, high + margin];
}

function nearest(points, at) {
  let best = null;
  for (const p of points) if (p[1] !== null && (!best || Math.abs(p[0] - at) < Math.abs(best[0] - at))) best = p;
  return best;
}

function reach(points) {
  return points.length > 1 ? Math.max(1, (points.at(-1)[0] - points[0][0]) / points.length) * 1.5 : Infinity;
}

/** Return a line without axes, for lists. */
export function sparkline(values, color) {
  const [width, height] = [96, 26];
  if (values.length < 2) return h("span", { class: "spark" });
  const x = scale([0, values.length - 1], [2, width - 2]);
  const y = scale(padded(values, [0, Math.max(0.05, ...values)]), [height - 3, 3]);
  return s(
    "svg",
    { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "success so far" },
    s("path", { d: pathOf(values.map((value, i) => [i, value]), x, y), style: { stroke: color } }),
  );
}
