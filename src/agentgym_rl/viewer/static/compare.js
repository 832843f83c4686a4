// Comparison of two episodes of one item, aligned turn by turn. If none are chosen, comparison of two runs: the
// settings in which they differ, and the tasks that both played.

import { get } from "./api.js";
import { differences } from "./config.js";
import { fill, guarded, h, message, select } from "./dom.js";
import { badges, block, cutNote, sectionOf } from "./episode.js";
import { outcome } from "./browse.js";
import { count, isolated, KINDS, number, STOPS, taskName } from "./format.js";
import { pictureBox } from "./picture.js";
import { preferenceBar } from "./prefer.js";
import { link } from "./route.js";
import { turnsOf } from "./turns.js";

function parts(text) {
  const at = (text ?? "").lastIndexOf("|");
  return at < 0 ? null : { run: text.slice(0, at), key: text.slice(at + 1) };
}

const nameOf = (row) => `${row.run}|${row.key}`;

export async function comparePage(route) {
  const node = h("div", { class: "page" });
  const a = parts(route.query.get("a"));
  if (!a) return compareRuns(route);
  const first = await get("episode", a);
  const same = await get("same_task", { env: first.env, item: first.item });
  const others = same.filter((row) => nameOf(row) !== nameOf(a));
  const b = parts(route.query.get("b")) ?? suggestion(a, first, others);
  const second = b ? await get("episode", b) : null;
  const boxes = [];
  const withPictures = route.query.get("pictures") !== "no";

  // The episode on the other side is left out. Episodes with equal labels get their keys added.
  const chooser = (current, side, other) =>
    select(
      labelled(same.filter((row) => nameOf(row) !== nameOf(other))),
      nameOf(current),
      (value) => (location.hash = link("compare", { a: nameOf(a), b: b && nameOf(b), ...Object.fromEntries(route.query), [side]: value })),
      side === "a" ? "Left episode" : "Right episode",
    );

  const head = h("header", { class: "page-head" }, h("p", { class: "crumbs" }, h("a", { href: link(sectionOf(first)[0]) }, sectionOf(first)[1]), " / "), h("h1", {}, `Compare ${taskName(first)}`), pictureToggle());

  function pictureToggle() {
    const box = h("input", { type: "checkbox", checked: withPictures, onchange: () => (location.hash = link("compare", { ...Object.fromEntries(route.query), pictures: box.checked ? "" : "no" })) });
    return h("label", { class: "check" }, box, "pictures");
  }

  if (!second) {
    fill(node, head, h("p", { class: "message info" }, "This is the only episode of this item. Every evaluation plays the same items, so a run with several evaluations can be compared with itself."));
    return { node, title: "Compare", keys: [] };
  }
  const sides = [first, second].map((episode, i) => ({ episode, letter: "AB"[i], ...turnsOf(episode) }));
  const longest = Math.max(...sides.map((side) => side.turns.length));
  const split = firstDifference(sides);

  const rows = Array.from({ length: longest + 1 }, (_, k) => [
    k === split ? h("div", { class: "split", role: "separator" }, splitNote(k, sides)) : null,
    h("div", { class: "pair" }, h("span", { class: "pair-number" }, k < longest ? `Turn ${k + 1}` : "End"), sides.map((side) => cellOf(side, k))),
  ]);

  function cellOf(side, k) {
    const turn = side.turns[k];
    if (!turn && k > side.turns.length) return h("div", { class: "side none" });
    const picture = withPictures ? pictureBox(`turn ${k + 1}`) : null;
    if (picture) {
      boxes.push(picture);
      whenSeen(picture.node, () => picture.show("frame", { run: side.episode.run, key: side.episode.key, turn: k }));
    }
    if (!turn) return h("div", { class: "side card" }, picture?.node, block("Last observation", side.ending || "(not recorded)", "observation"), h("p", { class: "paid" }, `${side.letter}: ${STOPS[side.episode.stop] ?? side.episode.stop}, reward ${number(side.episode.reward)}`));
    return h("div", { class: "side card" }, cutNote(turn), picture?.node, h("details", { class: "block observation" }, h("summary", {}, "Observation"), h("pre", {}, turn.observation)), block("Thought", turn.thought, "thought"), block("Action", turn.action, "action"), turn.reward || turn.info.valid === false ? h("p", { class: "paid" }, turn.reward ? `reward ${number(turn.reward)}` : null, turn.info.valid === false ? h("span", { class: "invalid" }, "invalid action") : null) : null);
  }

  const preference = first.env === second.env && first.item === second.item ? preferenceBar(first, second) : null;
  fill(
    node,
    head,
    preference?.node,
    h("div", { class: "pair heads" }, h("span", { class: "pair-number" }), [[a, "a", first, b], [b, "b", second, a]].map(([current, side, episode, other]) => h("div", { class: "side" }, chooser(current, side, other), h("a", { class: "run-name", href: link("episode", episode.run, episode.key) }, h("span", { class: "letter" }, side.toUpperCase()), episode.run), badges(episode)))),
    rows,
  );
  return {
    node,
    title: `Compare ${taskName(first)}`,
    dispose: () => boxes.forEach((box) => box.dispose()),
    section: "compare",
    keys: [["s", "swap the sides", () => (location.hash = link("compare", { ...Object.fromEntries(route.query), a: nameOf(b), b: nameOf(a) }))], ...(preference?.keys ?? [])],
  };
}

/** The page that compares two chosen runs or evaluations, or one with itself. */
async function compareRuns(route) {
  const node = h("div", { class: "page" });
  const title = h("h1", {}, "Compare");
  const { runs } = await get("overview");
  if (!runs.length) {
    fill(node, h("header", { class: "page-head" }, title), message("info", "No runs yet: there is nothing to compare."));
    return { node, title: "Compare", keys: [] };
  }
  const ids = runs.map((run) => run.id);
  const left = ids.find((id) => id === route.query.get("left")) ?? ids[0];
  const played = new Set(runs.find((run) => run.id === left).environments);
  const likely = runs.find((run) => run.id !== left && run.environments.some((env) => played.has(env)));
  const right = ids.find((id) => id === route.query.get("right")) ?? likely?.id ?? ids.find((id) => id !== left) ?? left;
  const chooser = (value, side, letter) => h("label", {}, h("span", { class: "letter" }, letter), select(ids.map((id) => [id, id]), value, (chosen) => (location.hash = link("compare", { left, right, [side]: chosen })), side === "left" ? "Left run" : "Right run"));
  const [details, shared] = await Promise.all([Promise.all([left, right].map((id) => get("run", { run: id }))), get("shared_tasks", { left, right })]);
  fill(
    node,
    h("header", { class: "page-head" }, title, h("p", {}, "Two runs or evaluations, or one with itself.")),
    h("div", { class: "choose-runs" }, chooser(left, "left", "A"), chooser(right, "right", "B")),
    left === right ? null : guarded("config.toml", () => differences(...details)),
    sharedTasks(shared, left, right),
  );
  return { node, title: "Compare", keys: [["s", "swap the sides", () => (location.hash = link("compare", { left: right, right: left }))]] };
}

function sharedTasks({ total, rows }, left, right) {
  const title = h("h2", {}, left === right ? "Tasks played more than once" : "Tasks that both played");
  if (!rows.length) {
    const withItself = (id) => h("a", { class: "button", href: link("compare", { left: id, right: id }) }, `${isolated(id)} with itself`);
    const hint = left === right ? "This run played no task twice: choose another run on one side." : "These runs have no task in common. Choose other runs, or compare the first and latest episodes of one run.";
    return h("section", { class: "card" }, title, h("p", { class: "hint" }, hint), left === right ? null : h("div", { class: "choose-runs" }, withItself(left), withItself(right)));
  }
  const side = (run, episode) => h("td", {}, outcome(episode), ` ${KINDS[episode.kind] ?? episode.kind} ${episode.step} · reward ${number(episode.reward)} · ${count(episode.turns, "turn")}`);
  const line = (row) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: link("compare", { a: `${left}|${row.left.key}`, b: `${right}|${row.right.key}` }) }, taskName(row))), side(left, row.left), side(right, row.right));
  return h(
    "section",
    { class: "card" },
    title,
    h("div", { class: "table-scroll" }, h("table", { class: "shared" }, h("thead", {}, h("tr", {}, ["Task", "A", "B"].map((name) => h("th", {}, name)))), h("tbody", {}, rows.map(line)))),
    h("p", { class: "hint" }, `${left === right ? "The first and the latest episode" : "The latest episode"} of each task, different outcomes first.`, total > rows.length ? ` The first ${rows.length} of ${total}.` : ""),
  );
}

/** Suggest an episode of the same kind and another checkpoint, if possible with another outcome. */
function suggestion(a, first, others) {
  const rank = (row) => 4 * (row.kind === first.kind) + 2 * (row.step !== first.step || row.run !== a.run) + (row.success !== first.success);
  return others.toSorted((x, y) => rank(y) - rank(x))[0] ?? null;
}

function labelled(rows) {
  const text = (row) => `${isolated(row.run)} · ${KINDS[row.kind] ?? row.kind} ${row.step} · ${row.success ? "success" : "no success"} · reward ${number(row.reward)} · ${row.turns} turns`;
  const counts = new Map();
  for (const row of rows) counts.set(text(row), (counts.get(text(row)) ?? 0) + 1);
  return rows.map((row) => [nameOf(row), counts.get(text(row)) > 1 ? `${text(row)} · ${row.key}` : text(row)]);
}

function splitNote(k, sides) {
  const shorter = sides.find((side) => side.turns.length === k);
  if (shorter) return `all ${k} actions of ${shorter.letter} are the same; ${shorter.letter === "A" ? "B" : "A"} continues`;
  if (k === 0) return "A and B differ from the first action on";
  return `the first ${k === 1 ? "action is" : `${k} actions are`} the same; A and B differ from here on`;
}

function firstDifference([left, right]) {
  const least = Math.min(left.turns.length, right.turns.length);
  for (let k = 0; k < least; k++) if (left.turns[k].action !== right.turns[k].action) return k;
  return left.turns.length === right.turns.length ? -1 : least;
}

function whenSeen(node, run) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    run();
  }, { rootMargin: "200px" });
  observer.observe(node);
}
