// The playground: an item of an environment, played by hand or by a policy, one turn at a time.

import { get, isExport, post } from "./api.js";
import { fill, h, message, select } from "./dom.js";
import { number } from "./format.js";
import { pictureBox } from "./picture.js";

const MAX_BUTTONS = 60;
const TURN_MS = 700;

export async function playPage(route) {
  const node = h("div", { class: "page" });
  if (isExport()) {
    fill(node, message("info", "An exported page cannot play episodes: start agentgym-rl view."));
    return { node, title: "Playground", keys: [] };
  }
  const { environments, policies } = await get("environments");
  const installed = environments.filter((env) => env.installed);
  if (!installed.length) {
    fill(node, message("warning", "No environment is installed: ", environments.map((env) => env.missing).join("; ")));
    return { node, title: "Playground", keys: [] };
  }
  const setup = h("div", { class: "filters setup" });
  const table = h("div", { class: "replay" });
  const notes = h("div", {});
  const picture = pictureBox("the state of the game");
  const input = h("input", { type: "text", class: "action-input", placeholder: "type an action", "aria-label": "Action", autocomplete: "off", spellcheck: "false" });
  const filter = h("input", { type: "search", placeholder: "filter actions", "aria-label": "Filter actions", oninput: () => drawActions() });
  const actions = h("div", { class: "action-buttons" });
  const story = h("div", { class: "story" });
  let chosen = installed.find((env) => env.name === route.query.get("env")) ?? installed[0];
  let item = Number(route.query.get("item") ?? NaN);
  let policy = policies[0];
  let game = null;
  let requested = 0; // counts requested games, so that a late answer for an earlier one is ignored
  let busy = false;
  let running = false;

  const itemInput = h("input", { type: "number", class: "item", "aria-label": "Item", onchange: () => { item = itemInput.value.trim() === "" ? NaN : Number(itemInput.value); start(); } });
  const policyChoice = select(policies.map((name) => [name, name]), policy, (value) => (policy = value), "Policy");

  function drawSetup() {
    const ranges = Object.entries(chosen.ranges);
    if (Number.isNaN(item)) item = ranges[0]?.[1][0] ?? 0;
    itemInput.value = String(item);
    const subset = select([["", "any subset"], ...chosen.subsets.map((name) => [name, name])], route.query.get("subset") ?? "", (value) => { route.set({ subset: value }); random(); }, "Subset");
    fill(
      setup,
      select(installed.map((env) => [env.name, env.name]), chosen.name, change, "Environment"),
      chosen.subsets.length ? subset : null,
      h("label", { class: "check" }, "item", itemInput),
      h("button", { type: "button", class: "quiet", onclick: random }, "Random item"),
      h("button", { type: "button", class: "quiet", onclick: start }, "Restart"),
      h("small", { class: "hint" }, chosen.summary),
    );
  }

  function change(name) {
    chosen = installed.find((env) => env.name === name);
    route.set({ subset: "" });
    item = NaN;
    drawSetup();
    start();
  }

  async function random() {
    const split = "train" in chosen.ranges ? "train" : Object.keys(chosen.ranges)[0];
    const subset = route.query.get("subset");
    const request = ++requested;
    if (!split) return showError(`${chosen.name} does not list its items: type a number`);
    if (subset) {
      try {
        const { items } = await get("items", { env: chosen.name, split, subset });
        if (request !== requested) return;
        if (!items.length) throw new Error(`${chosen.name} has no items of ${subset} in its split ${split}`);
        item = items[Math.floor(Math.random() * items.length)];
      } catch (error) {
        if (request === requested) showError(error.message);
        return;
      }
    } else {
      const [from, to] = chosen.ranges[split];
      item = from + Math.floor(Math.random() * (to - from));
    }
    await start();
  }

  /** Show an error and clear the page, because the game on it is not the requested one. */
  function showError(text) {
    leave();
    fill(notes, message("error", text));
    fill(story);
    fill(controls);
    picture.clear();
    setBusy(false);
  }

  function leave() {
    running = false;
    if (game) post("play/close", { session: game.session }).catch(() => {});
    game = null;
  }

  function setBusy(on) {
    busy = on;
    node.classList.toggle("busy", on);
  }

  /** Open the chosen game. It replaces any game that is open or being opened. */
  async function start() {
    const request = ++requested;
    leave();
    itemInput.value = Number.isNaN(item) ? "" : String(item);
    if (!Number.isInteger(item)) {
      const ranges = Object.entries(chosen.ranges).map(([name, [from, to]]) => `${name} ${from}–${to - 1}`);
      return showError(`an item must be a whole number; ${chosen.name} has ${ranges.join(", ")}`);
    }
    route.set({ env: chosen.name, item });
    fill(notes);
    setBusy(true);
    try {
      const opened = await post("play/open", { env: chosen.name, item });
      if (request !== requested) return void post("play/close", { session: opened.session }).catch(() => {});
      setBusy(false);
      game = opened;
      draw();
      input.focus({ preventScroll: true });
    } catch (error) {
      if (request === requested) showError(error.message);
    }
  }

  /** Play one turn. Return false if it failed, or if another game was requested meanwhile. */
  async function attempt(work) {
    if (busy) return false;
    const request = requested;
    setBusy(true);
    fill(notes);
    try {
      const next = await work();
      if (request !== requested) return false;
      game = next;
      setBusy(false);
      draw();
      return true;
    } catch (error) {
      if (request !== requested) return false;
      fill(notes, message("error", error.message));
      running = false;
      setBusy(false);
      return false;
    }
  }

  async function act(action) {
    if (!action.trim() || !game || game.done) return;
    input.value = "";
    filter.value = "";
    await attempt(() => post("play/act", { session: game.session, action }));
    input.focus({ preventScroll: true });
  }

  const policyTurn = () => game && !game.done && attempt(() => post("play/policy", { session: game.session, policy }));

  async function run() {
    if (!game) return;
    if (running) {
      running = false;
      draw();
      return;
    }
    running = true;
    draw();
    const request = requested;
    while (running && request === requested && game && !game.done) {
      if (!(await policyTurn())) break;
      await new Promise((resolve) => setTimeout(resolve, TURN_MS));
    }
    if (request !== requested) return;
    running = false;
    if (game) draw();
  }

  function drawActions() {
    if (!game) return;
    const text = filter.value.toLowerCase();
    const matching = game.actions.filter((action) => action.toLowerCase().includes(text));
    fill(
      actions,
      matching.slice(0, MAX_BUTTONS).map((action) => h("button", { type: "button", class: "action-button", onclick: () => act(action) }, action)),
      matching.length > MAX_BUTTONS ? h("small", {}, `and ${matching.length - MAX_BUTTONS} more: filter them`) : null,
      !game.actions.length && !game.done ? h("small", {}, game.note || "This environment does not list actions: type one.") : null,
    );
  }

  function draw() {
    picture.show("play/frame", { session: game.session, turn: game.turns.length });
    fill(
      story,
      game.instruction ? h("details", { class: "block instruction" }, h("summary", {}, "Instruction"), h("pre", {}, game.instruction)) : null,
      game.turns.map((turn, k) => h("article", { class: "past" }, h("pre", {}, turn.observation), h("p", { class: "act" }, h("small", {}, `${k + 1} · ${turn.by}`), turn.reply, turn.reward ? h("span", { class: "plus" }, ` reward ${number(turn.reward)}`) : null, turn.valid === false ? h("span", { class: "invalid" }, " invalid") : null))),
      h("article", { class: "now" }, h("pre", {}, game.observation)),
      game.done ? h("p", { class: `verdict ${game.success ? "good" : "bad"}` }, game.success ? `Success in ${game.turns.length} turns, reward ${number(game.reward)}.` : `Ended without success, reward ${number(game.reward)}.`) : null,
    );
    story.scrollTop = story.scrollHeight;
    filter.hidden = game.actions.length < 12;
    drawActions();
    fill(controls, game.done ? h("button", { type: "button", class: "primary", onclick: start }, "Play again") : [
      h("form", { class: "action-form", onsubmit: (event) => { event.preventDefault(); act(input.value); } }, input, h("button", { type: "submit", class: "primary" }, "Send")),
      filter, actions,
      h("div", { class: "policy-row" }, "Let", policyChoice, "play", h("button", { type: "button", onclick: policyTurn }, "one turn"), h("button", { type: "button", onclick: run }, running ? "Stop" : "to the end")),
    ]);
  }

  const controls = h("div", { class: "hand" });
  fill(table, h("div", { class: "see" }, picture.node, controls), story);
  fill(node, h("header", { class: "page-head" }, h("h1", {}, "Playground"), h("p", {}, "Episodes played here are not saved.")), setup, notes, table);
  drawSetup();
  await start();
  return {
    node,
    title: "Playground",
    dispose() {
      requested++;
      leave();
      picture.dispose();
    },
    keys: [
      ["o", "let the policy play one turn", policyTurn],
      ["a", "let the policy play to the end", run],
      ["i", "type an action", () => input.focus()],
      ["r", "restart", start],
    ],
  };
}
