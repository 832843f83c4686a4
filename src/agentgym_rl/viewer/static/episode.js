// One episode: a replay turn by turn, the transcript, and the tokens.

import { get } from "./api.js";
import { fill, h, s, segmented, select } from "./dom.js";
import { count, KINDS, number, signed, STOPS, taskName } from "./format.js";
import { pictureBox } from "./picture.js";
import { link } from "./route.js";
import { tokenView } from "./tokens.js";
import { turnsOf } from "./turns.js";

const SPEEDS = [["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]];
const TURN_MS = 1400;

const ICONS = {
  first: "M3 2v10M12 2 6 7l6 5z", back: "M10 2 4 7l6 5z", next: "M4 2l6 5-6 5z", last: "M11 2v10M2 2l6 5-6 5z",
};

function icon(name) {
  return s("svg", { class: "glyph", width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** Return the section of an episode as [page, name]. */
export function sectionOf(episode) {
  return episode.run_kind === "eval" ? ["evals", "Evaluations"] : ["runs", "Runs"];
}

export function badges(episode) {
  const facts = [
    h("span", { class: `badge ${episode.stop === "error" ? "error" : episode.success ? "good" : "bad"}` }, episode.stop === "error" ? "error" : episode.success ? "success" : "no success"),
    `reward ${number(episode.reward)}`,
    episode.advantage === null || episode.advantage === undefined ? null : `advantage ${signed(episode.advantage)}`,
    `${episode.turns} of ${episode.horizon} turns`,
    episode.role ? `${episode.role}, played by ${episode.player}` : null,
    STOPS[episode.stop] ?? episode.stop,
    episode.kind === "train" ? `step ${episode.step}` : `${KINDS[episode.kind] ?? episode.kind}${episode.step ? `, step ${episode.step}` : ""}`,
    episode.sampled ? `${number(episode.sampled)} sampled tokens` : null,
    episode.segments > 1 ? `${episode.segments} segments` : null,
    episode.subset || null,
  ];
  return h("div", { class: "badges" }, facts.filter(Boolean).map((fact) => (fact instanceof Node ? fact : h("span", { class: "badge" }, fact))));
}

/** The scores of every source of rewards, and what a judge said. */
function verdicts(episode) {
  const rows = episode.verdicts ?? [];
  if (!rows.length) return null;
  const sum = (scores) => scores.reduce((total, score) => total + score, 0);
  const failed = rows.some((row) => row.error);
  const total = failed ? "not trained on" : `trained on ${number(sum(rows.map((row) => row.weight * sum(row.scores))))}`;
  const turns = (row) => (row.scores.filter(Boolean).length > 1 ? h("span", { class: "hint" }, ` by turn: ${row.scores.map(number).join(", ")}`) : null);
  const line = (row) => h("div", { class: "verdict" }, h("dt", {}, row.source, h("span", { class: "hint" }, ` × ${number(row.weight)}`)), h("dd", {}, row.error ? h("span", { class: "invalid" }, row.error) : [h("b", {}, number(sum(row.scores))), turns(row)], row.reason ? h("pre", {}, row.reason) : null));
  return h("details", { class: "verdicts card", open: failed }, h("summary", {}, `Rewards: ${total}`), h("dl", {}, rows.map(line)));
}

export function block(name, text, kind) {
  if (!text) return null;
  return h("section", { class: `block ${kind}` }, h("h3", {}, name), h("pre", {}, text));
}

/** Return the line that says where the context was cut, and the summary that replaced it. */
export function cutNote(turn) {
  if (!turn.cut) return null;
  return [h("div", { class: "cut", role: "separator" }, turn.cut), block("Summary by the model", turn.summary, "summary")];
}

/** Return the observation and the reply of a turn. Tool calls and their results have a block each. */
function turnBlocks(turn) {
  return [
    cutNote(turn),
    observationBlocks(turn.parts),
    block("Thought", turn.thought, "thought"),
    turn.calls ? turn.calls.map(callBlock) : block(turn.message.calls ? "Reply without a tool call" : "Action", turn.action, "action"),
    rewardLine(turn),
  ];
}

function observationBlocks(parts, label = "Observation") {
  return parts.map((part) => (part.label === "Observation" ? block(label, part.text, "observation") : block(part.label, part.text, "observation result")));
}

function callBlock(call) {
  if (call.error) return h("section", { class: "block action call" }, h("h3", {}, "Malformed call"), h("pre", {}, call.raw || call.name), h("p", { class: "invalid" }, call.error));
  const lines = call.arguments.map(([name, value]) => h("span", { class: "argument" }, h("b", {}, name), ` ${value}`));
  return h("section", { class: "block action call" }, h("h3", {}, "Tool call"), h("pre", {}, call.name, lines));
}

function rewardLine(turn) {
  const facts = [h("span", { class: turn.reward > 0 ? "plus" : turn.reward < 0 ? "minus" : "zero" }, `reward ${number(turn.reward)}`)];
  if (turn.info.valid === false) facts.push(h("span", { class: "invalid" }, "invalid action"));
  if (turn.info.mistake) facts.push(h("span", { class: "invalid" }, "injected mistake, not in the loss"));
  if (turn.info.success !== undefined) facts.push(h("span", {}, turn.info.success ? "success" : "no success"));
  for (const name of ["attempt", "env_reward"]) if (turn.info[name] !== undefined) facts.push(h("span", {}, `${name.replace("_", " ")} ${turn.info[name]}`));
  return h("p", { class: "paid" }, facts);
}

export async function episodePage(route) {
  const [run, key] = route.parts;
  const episode = await get("episode", { run, key });
  const { instruction, turns, endingParts } = turnsOf(episode);
  let view = route.query.get("view") ?? "replay";
  let colour = route.query.get("colour") ?? "logprob";
  let turn = Math.min(turns.length, Math.max(0, Number(route.query.get("turn") ?? 0) || 0));
  const stage = h("div", { class: "stage-area" });
  const tabs = segmented([["replay", "Replay"], ["transcript", "Transcript"], ["tokens", "Tokens"]], view, show, "View");
  const replay = makeReplay(episode, turns, endingParts, instruction, () => turn, go);

  function show(next) {
    view = next;
    route.set({ view: view === "replay" ? "" : view });
    replay.pause();
    if (view === "replay") {
      fill(stage, replay.node);
      replay.draw();
    } else if (view === "transcript") {
      fill(stage, transcript(episode, turns, instruction, endingParts));
    } else {
      fill(stage, tokenView(episode, colour, (mode) => {
        colour = mode;
        route.set({ colour });
      }));
    }
  }

  function go(next) {
    turn = Math.min(turns.length, Math.max(0, next));
    route.set({ turn: turn || "" });
    replay.draw();
  }

  function choose(next) {
    tabs.choose(next, true);
  }

  const { before, after } = episode.neighbours;
  const visit = (other) => other && (location.hash = link("episode", run, other, view === "replay" ? {} : { view }));
  show(view);
  return {
    node: h("div", { class: "page" }, head(episode, run, key, before, after), h("div", { class: "view-tabs" }, tabs), stage),
    title: taskName(episode),
    section: sectionOf(episode)[0],
    dispose: replay.dispose,
    keys: [
      ["ArrowRight", "next turn", () => view === "replay" && go(turn + 1)],
      ["ArrowLeft", "previous turn", () => view === "replay" && go(turn - 1)],
      [" ", "play or pause", () => view === "replay" && replay.toggle()],
      ["Home", "first turn", () => view === "replay" && go(0)],
      ["End", "the end", () => view === "replay" && go(turns.length)],
      ["n", "next episode", () => visit(after)],
      ["b", "previous episode", () => visit(before)],
      ["r", "replay", () => choose("replay")],
      ["t", "transcript", () => choose("transcript")],
      ["k", "tokens", () => choose("tokens")],
      ["g", "its group", () => (location.hash = link("group", run, key))],
      ["c", "compare with another", () => (location.hash = link("compare", { a: `${run}|${key}` }))],
    ],
  };
}

function head(episode, run, key, before, after) {
  const step = (other, text, label) => (other ? h("a", { class: "button quiet", href: link("episode", run, other), "aria-label": label }, text) : h("span", { class: "button quiet off", "aria-hidden": "true" }, text));
  return h(
    "header",
    { class: "page-head episode-head" },
    h("p", { class: "crumbs" }, h("a", { href: link(sectionOf(episode)[0]) }, sectionOf(episode)[1]), " / ", h("a", { href: link("episodes", run) }, run), " / "),
    h("h1", {}, taskName(episode)),
    h("div", { class: "actions" }, step(before, "←", "previous episode"), step(after, "→", "next episode"), episode.group.length > 1 ? h("a", { class: "button quiet", href: link("group", run, key) }, `Group of ${episode.group.length}`) : null, h("a", { class: "button quiet", href: link("compare", { a: `${run}|${key}` }) }, "Compare")),
    badges(episode),
    episode.error ? h("p", { class: "message error" }, episode.error) : null,
    verdicts(episode),
  );
}

function makeReplay(episode, turns, endingParts, instruction, current, go) {
  const picture = pictureBox(`${episode.env}, item ${episode.item}`);
  const side = h("div", { class: "turn" });
  const strip = h("div", { class: "strip", role: "tablist", "aria-label": "Turns" });
  const playButton = h("button", { type: "button", class: "play", onclick: toggle, "aria-label": "Play" }, "Play");
  const speedChoice = select(SPEEDS, "1", () => timer && (pause(), toggle()), "Speed");
  const place = h("span", { class: "place" });
  let timer = 0;
  let drawn = null;

  const cells = [...turns, null].map((turn, k) => {
    const kind = turn === null ? "end" : turn.reward > 0 ? "plus" : turn.reward < 0 ? "minus" : turn.info.valid === false ? "invalid" : "";
    const [cut, note] = turn?.cut ? [" cut-before", " (another context from here on)"] : ["", ""];
    return h("button", { type: "button", class: `tick ${kind}${cut}`, role: "tab", title: turn ? `turn ${k + 1}: ${turn.action.slice(0, 80)}${note}` : "the end", onclick: () => go(k) }, turn ? k + 1 : "end");
  });
  strip.append(...cells);

  const controls = h(
    "div",
    { class: "controls" },
    h("button", { type: "button", onclick: () => go(0), "aria-label": "First turn" }, icon("first")),
    h("button", { type: "button", onclick: () => go(current() - 1), "aria-label": "Previous turn" }, icon("back")),
    playButton,
    h("button", { type: "button", onclick: () => go(current() + 1), "aria-label": "Next turn" }, icon("next")),
    h("button", { type: "button", onclick: () => go(turns.length), "aria-label": "The end" }, icon("last")),
    speedChoice,
    place,
  );
  // A clicked button loses focus, so that the space bar plays. A button reached by Tab keeps it.
  const release = (event) => event.detail > 0 && event.target.closest("button")?.blur();
  const node = h("div", { class: "replay" }, h("div", { class: "see", onclick: release }, picture.node, controls, strip), side);

  function draw() {
    const k = current();
    cells.forEach((cell, i) => cell.setAttribute("aria-selected", String(i === k)));
    // In the next frame, because the strip is drawn before the page is shown. Only the strip scrolls.
    requestAnimationFrame(() => (strip.scrollLeft = cells[k].offsetLeft - strip.offsetLeft - (strip.clientWidth - cells[k].offsetWidth) / 2));
    fill(place, k < turns.length ? `turn ${k + 1} of ${turns.length}` : "the end");
    if (drawn !== k) picture.show("frame", { run: episode.run, key: episode.key, turn: k });
    drawn = k;
    const turn = turns[k];
    fill(
      side,
      k === 0 && instruction ? h("details", { class: "block instruction" }, h("summary", {}, "Instruction"), h("pre", {}, instruction)) : null,
      turn ? turnBlocks(turn) : [endingParts.length ? observationBlocks(endingParts, "Last observation") : block("Last observation", "(not recorded)", "observation"), h("p", { class: "paid" }, h("b", {}, STOPS[episode.stop] ?? episode.stop), ` after ${count(turns.length, "turn")}, reward ${number(episode.reward)}`)],
    );
  }

  function toggle() {
    if (timer) return pause();
    if (current() >= turns.length) go(0);
    playButton.textContent = "Pause";
    playButton.setAttribute("aria-label", "Pause");
    timer = setInterval(() => {
      if (current() >= turns.length) pause();
      else go(current() + 1);
    }, TURN_MS / Number(speedChoice.value));
  }

  function pause() {
    clearInterval(timer);
    timer = 0;
    playButton.textContent = "Play";
    playButton.setAttribute("aria-label", "Play");
  }

  return { node, draw, toggle, pause, dispose: () => (pause(), picture.dispose()) };
}

function transcript(episode, turns, instruction, endingParts) {
  return h(
    "div",
    { class: "transcript" },
    instruction ? block("Instruction", instruction, "instruction") : null,
    turns.map((turn, k) => h("article", { class: "card" }, h("a", { class: "turn-number", href: link("episode", episode.run, episode.key, { turn: k }) }, `Turn ${k + 1}`), turnBlocks(turn))),
    observationBlocks(endingParts, "Last observation"),
  );
}
