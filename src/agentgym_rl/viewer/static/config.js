// Settings and checkpoints of a run, and the settings in which two runs differ.

import { get } from "./api.js";
import { fill, guarded, h, message } from "./dom.js";
import { ago, bytes, isolated } from "./format.js";
import { link } from "./route.js";
import { runHead, problemList } from "./run.js";

/** Return [["rl.steps", "50"], …]: every setting by its full name, in file order. */
export function flat(table, prefix = "") {
  return Object.entries(table ?? {}).flatMap(([name, value]) => {
    if (Array.isArray(value) && value.some((entry) => entry && typeof entry === "object")) return value.flatMap((entry, i) => flat(entry, `${prefix}${name}.${i}.`));
    if (value && typeof value === "object" && !Array.isArray(value)) return flat(value, `${prefix}${name}.`);
    return [[`${prefix}${name}`, JSON.stringify(value)]];
  });
}

export async function configPage(route) {
  const id = route.parts[0];
  const node = h("div", { class: "page" });

  async function draw() {
    const run = await get("run", { run: id });
    fill(node, runHead(run, "config"), problemList(run), guarded("checkpoints", () => checkpoints(run)), guarded("config.toml", () => settings(run)));
  }

  await draw();
  return { node, title: `${id} config`, keys: [], onChange: (changes) => (changes.runs.has(id) ? draw() : null) };
}

function checkpoints(run) {
  const saved = run.checkpoints ?? [];
  const rows = saved.map((row) => h("tr", {}, h("td", {}, row.step), h("td", {}, row.holds.join(", ") || "empty"), h("td", {}, bytes(row.bytes)), h("td", {}, ago(row.saved))));
  const table = h("table", { class: "checkpoints" }, h("thead", {}, h("tr", {}, ["Step", "Content", "Size", "Saved"].map((name) => h("th", {}, name)))), h("tbody", {}, rows));
  const use = h("p", { class: "hint" }, "agentgym-rl eval --agent RUN@STEP evaluates a checkpoint; agentgym-rl train --resume continues from the last.");
  return h("section", { class: "card" }, h("h2", {}, "Checkpoints"), saved.length ? [h("div", { class: "table-scroll" }, table), use] : h("p", { class: "hint" }, "No checkpoint is saved yet."));
}

function settings(run) {
  const rows = flat(run.config);
  const head = h("div", { class: "card-head" }, h("h2", {}, "Config"), h("a", { class: "button", href: link("compare", { left: run.id }) }, "Compare with another run"));
  if (!rows.length) return h("section", { class: "card" }, head, message("info", "This run has no readable config.toml."));
  const sections = new Map();
  for (const [name, value] of rows) {
    const at = name.indexOf(".");
    const section = at < 0 ? "" : name.slice(0, at);
    if (!sections.has(section)) sections.set(section, []);
    sections.get(section).push([name.slice(at + 1), value]);
  }
  const block = ([section, entries]) => h("section", {}, section ? h("h3", {}, section) : null, h("pre", {}, entries.map(([name, value]) => `${name} = ${value}`).join("\n")));
  return h("section", { class: "card config" }, head, h("div", { class: "config-sections" }, [...sections].map(block)));
}

/** A table of the settings in which two runs differ. Evaluations have no settings. */
export function differences(left, right) {
  const [leftValues, rightValues] = [new Map(flat(left.config)), new Map(flat(right.config))];
  const names = [...new Set([...leftValues.keys(), ...rightValues.keys()])];
  const differing = names.filter((name) => leftValues.get(name) !== rightValues.get(name));
  if (!names.length) return null;
  const title = h("h2", {}, "Settings that differ");
  if (!leftValues.size || !rightValues.size) {
    const without = (leftValues.size ? right : left).id;
    return h("section", { class: "card" }, title, h("p", { class: "hint" }, `${isolated(without)} has no config.toml: only runs have one.`));
  }
  if (!differing.length) return h("section", { class: "card" }, title, h("p", { class: "hint" }, `All ${names.length} settings are the same.`));
  const cell = (value) => h("td", { class: value === undefined ? "none" : null }, value ?? "not set");
  const rows = differing.map((name) => h("tr", {}, h("th", { scope: "row" }, name), cell(leftValues.get(name)), cell(rightValues.get(name))));
  return h(
    "section",
    { class: "card" },
    title,
    h("div", { class: "table-scroll" }, h("table", { class: "differing" }, h("thead", {}, h("tr", {}, ["Setting", left.id, right.id].map((name) => h("th", {}, name)))), h("tbody", {}, rows))),
    h("p", { class: "hint" }, `${names.length - differing.length} settings are the same.`),
  );
}
