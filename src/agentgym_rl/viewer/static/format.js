// Numbers and times for people.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toPrecision(3))}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return trim(value.toPrecision(digits)).replace("-", "−");
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function signed(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

export function count(value, one, many) {
  return `${value.toLocaleString("en")} ${value === 1 ? one : (many ?? `${one}s`)}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (!seconds) return "";
  const passed = Math.max(0, now - seconds);
  if (passed < 10) return "just now";
  return `${duration(passed)} ago`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${trim((seconds / 3600).toFixed(1))} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function bytes(value) {
  if (value < 1e6) return `${Math.ceil(value / 1e3)} kB`;
  if (value < 1e9) return `${(value / 1e6).toFixed(0)} MB`;
  return `${(value / 1e9).toFixed(1)} GB`;
}

export const STOPS = {
  done: "done",
  max_turns: "out of turns",
  max_context: "out of context",
  length: "reply cut",
  error: "error",
};

export const KINDS = { train: "training", eval: "held out", warmstart: "warm start" };
