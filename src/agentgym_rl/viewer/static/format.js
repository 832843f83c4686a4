// Formatting of numbers, times and texts.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value); // a damaged file: show the value unchanged
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
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

/** Format the cost of an API. Unknown without prices; a lower bound, or unknown, if answers had no usage. */
export function cost({ cost_usd: dollars, unreported }) {
  if (unreported && !dollars) return "unknown";
  if (dollars === null || dollars === undefined) return "–";
  if (dollars === 0) return "$0";
  // Two significant digits, as in the report.
  const digits = dollars >= 1 ? 2 : dollars >= 0.01 ? 4 : Math.min(20, 1 - Math.floor(Math.log10(dollars)));
  const options = { minimumFractionDigits: 2, maximumFractionDigits: digits };
  if (!unreported) return `$${dollars.toLocaleString("en", options)}`;
  // A lower bound: round down, but not because of the rounding error of a value such as 0.00068.
  const least = Math.floor(dollars * 10 ** digits + 1e-6) / 10 ** digits;
  return `≥ $${least.toLocaleString("en", options)}`;
}

const DIRECTIONS = /[\u202a-\u202e\u2066-\u2069]/;

/** Isolate bidirectional control characters in untrusted text, so that they do not affect the text around it. */
export function isolated(text) {
  if (!DIRECTIONS.test(text)) return text;
  let open = 0;
  let inside = "";
  for (const letter of text) {
    if (letter === "\u2069" && open === 0) continue; // has no opening character
    if (letter === "\u2069") open--;
    if (letter >= "\u2066" && letter <= "\u2068") open++;
    inside += letter;
  }
  return `\u2068${inside}${"\u2069".repeat(open + 1)}`;
}

export const taskName = (row) => `${isolated(String(row.env))} / ${row.item}`;

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
  length: "reply truncated",
  timeout: "out of time",
  error: "error",
};

export const KINDS = { train: "training", eval: "held out", warmstart: "warm start" };
