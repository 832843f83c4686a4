// The episodes of one group side by side, turn by turn, with their advantages.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { number, signed, STOPS, taskName } from "./format.js";
import { outcome } from "./browse.js";
import { sectionOf } from "./episode.js";
import { link } from "./route.js";
import { treeOf } from "./tree.js";
import { turnsOf } from "./turns.js";

const MAX_MEMBERS = 16;

export async function groupPage(route) {
  const [run, key] = route.parts;
  const first = await get("episode", { run, key });
  const members = first.group.slice(0, MAX_MEMBERS);
  const episodes = await Promise.all(members.map((member) => (member.key === key ? first : get("episode", { run, key: member.key }))));
  const played = episodes.map((episode) => turnsOf(episode).turns);
  const longest = Math.max(...played.map((turns) => turns.length));
  const most = Math.max(1e-9, ...members.map((member) => Math.abs(member.advantage ?? 0)));
  const recorded = members.some((member) => member.advantage !== null);
  const rewards = members.map((member) => member.reward);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;

  const heads = members.map((member, i) =>
    h(
      "th",
      { class: member.key === key ? "current" : null },
      h("a", { href: link("episode", run, member.key) }, outcome(member), `Episode ${i + 1}`),
      h("div", { class: "member-facts" }, h("span", {}, `reward ${number(member.reward)}`), h("span", {}, STOPS[member.stop] ?? member.stop)),
      recorded ? advantageBar(member.advantage, most) : null,
    ),
  );
  const rows = Array.from({ length: longest }, (_, k) =>
    h("tr", {}, h("th", { scope: "row" }, k + 1), played.map((turns, i) => cell(turns[k], k, members[i]))),
  );

  function cell(turn, k, member) {
    if (!turn) return h("td", { class: "none" });
    const node = h("td", {});
    fill(
      node,
      h("a", { href: link("episode", run, member.key, { turn: k }) }, turn.thought ? h("p", { class: "thought" }, turn.thought) : null, h("p", { class: "act" }, turn.action || "(empty)")),
      turn.reward ? h("span", { class: turn.reward > 0 ? "plus" : "minus" }, `reward ${number(turn.reward)}`) : null,
      turn.info.valid === false ? h("span", { class: "invalid" }, "invalid") : null,
    );
    return node;
  }

  const observation = turnsOf(first).turns[0]?.observation ?? "";
  return {
    node: h(
      "div",
      { class: "page" },
      h("header", { class: "page-head" }, h("p", { class: "crumbs" }, h("a", { href: link(sectionOf(first)[0]) }, sectionOf(first)[1]), " / ", h("a", { href: link("groups", run) }, run), " / "), h("h1", {}, `Group ${taskName(first)}`), h("div", { class: "badges" }, [`step ${first.step}`, `${members.filter((member) => member.success).length} of ${members.length} succeeded`, `mean reward ${number(mean)}`, first.role ? `${first.role}, played by ${first.player}` : null, recorded ? null : "advantages not recorded", first.group.length > MAX_MEMBERS ? `the first ${MAX_MEMBERS} of ${first.group.length}` : null].filter(Boolean).map((fact) => h("span", { class: "badge" }, fact)))),
      h("details", { class: "block observation", open: true }, h("summary", {}, "First observation of all episodes"), h("pre", {}, observation)),
      treeOf(run, key, first.group, new Map(members.map((member, i) => [member.key, played[i]]))),
      h("div", { class: "side-by-side card", style: { "--members": String(members.length) } }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Turn"), heads)), h("tbody", {}, rows))),
    ),
    title: `Group ${taskName(first)}`,
    section: sectionOf(first)[0],
    keys: [["Enter", "open the episode", () => (location.hash = link("episode", run, key))]],
  };
}

function advantageBar(value, most) {
  if (value === null) return h("div", { class: "advantage none" }, "not used for learning");
  const fillBar = h("i", { class: value >= 0 ? "plus" : "minus" });
  fillBar.style.width = `${(50 * Math.abs(value)) / most}%`;
  return h("div", { class: "advantage" }, h("span", {}, signed(value)), h("div", { class: "beam" }, fillBar));
}
