// Which of two episodes is better: three buttons, the name of the person, and what was said before.

import { get, isExport, post } from "./api.js";
import { fill, h, message } from "./dom.js";
import { link } from "./route.js";

const NAME = "agentgym-rl person";
const WORDS = { left: "A is better", right: "B is better", equal: "Equal" };

function storedName() {
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

/** Return {node, keys} for two episodes of one item, or nothing in an exported page. */
export function preferenceBar(a, b) {
  if (isExport()) return null;
  const pair = { left_run: a.run, left_key: a.key, right_run: b.run, right_key: b.key };
  const said = h("p", { class: "hint said", role: "status" });
  const name = h("input", { type: "text", maxlength: 80, placeholder: "your name", "aria-label": "Your name", value: storedName() });
  const buttons = Object.entries(WORDS).map(([better, text]) => h("button", { type: "button", class: `prefer-${better}`, onclick: () => choose(better) }, text));
  const node = h("section", { class: "prefer card", "aria-label": "Preference" }, h("b", {}, "Which episode is better?"), buttons, name, h("button", { type: "button", class: "quiet", onclick: next }, "Another pair"), said);

  async function show() {
    const rows = await get("preferences", pair);
    fill(said, rows.map((row) => `${row.by}: ${WORDS[row.better] ?? row.better}`).join(" · "));
  }

  async function choose(better) {
    if (!name.value.trim()) {
      fill(said, "Give your name first: it is stored with the choice.");
      name.focus();
      return;
    }
    try {
      localStorage.setItem(NAME, name.value.trim());
    } catch {
      // without storage the name must be typed again
    }
    try {
      await post("prefer", { ...pair, better, by: name.value });
      await show();
    } catch (error) {
      fill(said, message("error", error.message));
    }
  }

  /** Open a random pair of another group of the same run. */
  async function next() {
    const { rows } = await get("groups", { run: a.run, limit: 500 });
    const large = rows.filter((row) => row.size > 1 && !(row.step === a.step && row.env === a.env && row.item === a.item));
    if (!large.length) return void fill(said, "This run has no other group of two episodes.");
    const any = (list) => list[Math.floor(Math.random() * list.length)];
    const { group } = await get("episode", { run: a.run, key: any(large).key });
    const first = any(group);
    const second = any(group.filter((member) => member.key !== first.key));
    location.hash = link("compare", { a: `${a.run}|${first.key}`, b: `${a.run}|${second.key}` });
  }

  show().catch((error) => fill(said, error.message));
  return { node, keys: [["a", "A is better", () => choose("left")], ["b", "B is better", () => choose("right")], ["e", "equal", () => choose("equal")]] };
}
