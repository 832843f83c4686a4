// The tree of a group whose episodes branch off each other: a row per path, a column per turn.

import { h, s } from "./dom.js";
import { number } from "./format.js";
import { link } from "./route.js";

const COLUMN = 132;
const ROW = 44;
const LEFT = 20;
const TOP = 26;
const RADIUS = 7;
const MAX_LABEL = 17;

/** Return the paths below their parents, each with its row and its parent's row. */
export function rowsOf(members) {
  const known = new Set(members.map((member) => member.trajectory));
  const children = new Map();
  for (const member of members) {
    const parent = known.has(member.parent) && member.parent !== member.trajectory ? member.parent : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(member);
  }
  const rows = [];
  const placed = new Set();
  function place(member, above) {
    if (placed.has(member.trajectory)) return; // a damaged file: an episode below itself
    placed.add(member.trajectory);
    const row = rows.length;
    rows.push({ member, above });
    // The latest branch first, so that no line crosses another row's nodes.
    const below = [...(children.get(member.trajectory) ?? [])].sort((a, b) => b.shared - a.shared);
    for (const child of below) place(child, row);
  }
  for (const root of children.get("") ?? []) place(root, null);
  return rows;
}

/** Return the drawing, or null if no episode branches off another. `turnsByKey` has the turns of episodes to label. */
export function treeOf(run, key, members, turnsByKey) {
  if (!members.some((member) => member.parent)) return null;
  const rows = rowsOf(members);
  const longest = Math.max(1, ...rows.map(({ member }) => member.turns));
  const x = (turn) => LEFT + turn * COLUMN + RADIUS;
  const y = (row) => TOP + row * ROW + ROW / 2;
  const width = LEFT + longest * COLUMN + 130;
  const height = TOP + rows.length * ROW + 6;
  const marks = Array.from({ length: longest }, (_, k) => s("text", { class: "tree-turn", x: x(k), y: 16 }, `Turn ${k + 1}`));
  const lines = [];
  const nodes = [];
  rows.forEach(({ member, above }, row) => {
    const shared = above === null ? 0 : Math.min(member.shared, member.turns);
    const turns = turnsByKey.get(member.key);
    if (above !== null) lines.push(s("path", { class: "tree-line", d: branchPath(x(Math.max(0, shared - 1)), y(above), x(shared), y(row), shared) }));
    if (member.turns > shared) lines.push(s("path", { class: "tree-line", d: `M${x(shared)} ${y(row)}H${x(member.turns - 1)}` }));
    for (let k = shared; k < member.turns; k++) {
      const action = (turns?.[k]?.action ?? "").split("\n")[0];
      const label = action.length > MAX_LABEL ? `${action.slice(0, MAX_LABEL - 1)}…` : action;
      const last = k === member.turns - 1;
      const state = !last ? "" : member.success ? "good" : "bad";
      nodes.push(
        s(
          "a",
          { href: link("episode", run, member.key, { turn: k }), class: `tree-node ${state}`, "aria-label": `path ${row + 1}, turn ${k + 1}: ${action}` },
          s("title", {}, `Turn ${k + 1}: ${action}`),
          s("circle", { cx: x(k), cy: y(row), r: RADIUS }),
          s("text", { x: x(k) + RADIUS + 4, y: y(row) - 5 }, label),
        ),
      );
    }
    nodes.push(
      s(
        "a",
        { href: link("episode", run, member.key), class: `tree-end ${member.success ? "good" : "bad"} ${member.key === key ? "current" : ""}` },
        s("text", { x: x(longest - 1) + COLUMN - 12, y: y(row) + 4 }, `reward ${number(member.reward)}`),
      ),
    );
  });
  const shared = rows.reduce((sum, { member, above }) => sum + (above === null ? 0 : member.shared), 0);
  return h(
    "section",
    { class: "card tree" },
    h("h2", {}, "Tree"),
    h("p", { class: "tree-note" }, `Each row is a path; a turn that several paths share is drawn once (${shared} shared). A click on a turn plays the path from there.`),
    h("div", { class: "tree-scroll" }, s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Tree of the group" }, marks, lines, nodes)),
  );
}

function branchPath(fromX, fromY, toX, toY, shared) {
  if (!shared) return `M${toX} ${fromY}V${toY}`;
  const bend = fromX + COLUMN / 2;
  return `M${fromX} ${fromY}H${bend}V${toY - 8}Q${bend} ${toY} ${bend + 8} ${toY}H${toX}`;
}
