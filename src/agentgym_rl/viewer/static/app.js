// The frame around the pages: navigation, theme, keyboard, live updates.

import { get, isExport, prepare } from "./api.js";
import { episodesPage, groupsPage } from "./browse.js";
import { comparePage } from "./compare.js";
import { configPage } from "./config.js";
import { fill, h, message } from "./dom.js";
import { episodePage } from "./episode.js";
import { evalPage, evalsPage } from "./evals.js";
import { bytes } from "./format.js";
import { groupPage } from "./group.js";
import { homePage } from "./home.js";
import { watch } from "./live.js";
import { playPage } from "./play.js";
import { link, readRoute } from "./route.js";
import { runPage } from "./run.js";

const PAGES = {
  "": homePage, runs: homePage, run: runPage, episodes: episodesPage, groups: groupsPage, episode: episodePage,
  group: groupPage, compare: comparePage, play: playPage, evals: evalsPage, eval: evalPage, config: configPage,
};
const SECTIONS = [["runs", "Runs"], ["evals", "Evals"], ["compare", "Compare"], ["play", "Play"]];
const BELONGS = { "": "runs", run: "runs", episodes: "runs", groups: "runs", episode: "runs", group: "runs", config: "runs", eval: "evals" };
const THEMES = ["auto", "light", "dark"];

const main = h("main", { id: "main" }, h("p", { class: "starting", role: "status" }, "Loading"));
const notice = h("div", { class: "notice", role: "status" });
const nav = h("nav", { "aria-label": "Main" });
const help = h("dialog", { class: "help", "aria-label": "Keyboard" });
let page = null;
let openCount = 0;
let opening = false;
let following = false;
let pendingChanges = null; // changes that the page has not handled yet

function frame() {
  const theme = h("button", { type: "button", class: "quiet icon", onclick: nextTheme }, "◐");
  const keys = h("button", { type: "button", class: "quiet icon", title: "Keyboard (?)", "aria-label": "Keyboard", onclick: showHelp }, "?");
  document.body.replaceChildren(
    h("header", { class: "top" }, h("a", { class: "brand", href: link("runs") }, "AgentGym-RL"), nav, h("div", { class: "tools" }, theme, keys)),
    notice, main, help,
  );
  applyTheme(stored("theme") ?? "auto");

  function applyTheme(name) {
    document.documentElement.dataset.theme = name;
    theme.title = `Theme: ${name}`;
    theme.setAttribute("aria-label", `Theme: ${name}`);
  }

  function nextTheme() {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    store("theme", next);
    applyTheme(next);
  }
}

function stored(name) {
  try {
    return localStorage.getItem(`agentgym-rl ${name}`);
  } catch {
    return null; // a page opened from a file may have no storage
  }
}

function store(name, value) {
  try {
    localStorage.setItem(`agentgym-rl ${name}`, value);
  } catch {
    // without storage the setting lasts until the page is closed
  }
}

function drawNavigation(current) {
  fill(nav, SECTIONS.filter(([name]) => !(isExport() && name === "play")).map(([name, text]) => h("a", { href: link(name), "aria-current": name === current ? "page" : null }, text)));
}

async function open() {
  const current = ++openCount;
  opening = true;
  pendingChanges = null; // the new page loads everything
  const route = readRoute();
  drawNavigation(BELONGS[route.page] ?? route.page);
  main.classList.add("loading");
  let next;
  try {
    const make = PAGES[route.page];
    if (!make) throw new Error(`no page ${route.page}`);
    next = await make(route);
  } catch (error) {
    const node = h("div", { class: "page" }, message("error", error.message), h("p", {}, h("a", { href: link("runs") }, "All runs")));
    // The run may appear later, for example if the link is to an evaluation that is about to start.
    next = { node, title: "Error", keys: [], onChange: (changes) => (changes.runs.size || changes.grown ? open() : null) };
  }
  if (current !== openCount) {
    next.dispose?.();
    return;
  }
  page?.dispose?.();
  page = next;
  if (page.section) drawNavigation(page.section);
  main.classList.remove("loading");
  fill(main, page.node);
  document.title = `${page.title} · AgentGym-RL`;
  scrollTo(0, 0);
  page.focus?.focus({ preventScroll: true });
  opening = false;
  follow(); // the page may have loaded before a change that arrived meanwhile
}

/** Pass changes to the page one at a time, so that an older answer never arrives after a newer one. */
async function follow() {
  if (following) return;
  following = true;
  while (pendingChanges && !opening) {
    const changes = pendingChanges;
    pendingChanges = null;
    try {
      await page?.onChange?.(changes);
    } catch {
      // read again after the next change
    }
  }
  following = false;
}

function showHelp() {
  const common = [["?", "this help"], ["1 2 3 4", "runs, evaluations, compare, playground"], ["d", "light, dark, automatic"], ["Backspace", "back"]];
  const names = { " ": "Space", ArrowRight: "→", ArrowLeft: "←", ArrowUp: "↑", ArrowDown: "↓" };
  const rows = [...(page?.keys ?? []).map(([key, action]) => [names[key] ?? key, action]), ...common];
  fill(help, h("h2", {}, "Keyboard"), h("dl", {}, rows.map(([key, action]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, action)])), h("button", { type: "button", onclick: () => help.close() }, "Close"));
  help.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === " " && event.target.closest?.("button, summary, a")) return;
  if (event.key === "Enter" && event.target.closest?.("button, summary, a")) return;
  if (event.key === "?") return showHelp();
  if (event.key === "d") return document.querySelector(".tools button").click();
  if (event.key === "Backspace") return history.back();
  const section = SECTIONS[Number(event.key) - 1];
  if (section) return void (location.hash = link(section[0]));
  const action = page?.keys?.find(([key]) => key === event.key);
  if (!action) return;
  event.preventDefault();
  action[2]();
}

let stale = false;

function onChange(changes) {
  if (changes.lost) {
    fill(notice, "The viewer does not respond. Is it still running?");
    stale = true;
    return;
  }
  const { total, unread, problem } = changes.index;
  if (problem) fill(notice, `The index cannot be updated: ${problem}`);
  else if (unread > 1e6) fill(notice, `Reading trajectories: ${bytes(total - unread)} of ${bytes(total)}`, h("progress", { max: total, value: total - unread }));
  else fill(notice);
  if (stale) changes.grown = true;
  stale = false;
  pendingChanges = pendingChanges ? { ...changes, runs: new Set([...pendingChanges.runs, ...changes.runs]), grown: pendingChanges.grown || changes.grown } : changes;
  follow();
}

async function begin() {
  frame();
  await prepare();
  if (isExport()) {
    const { exported } = await get("overview");
    document.body.classList.add("exported");
    fill(notice, exported);
  }
  addEventListener("hashchange", open);
  addEventListener("keydown", onKey);
  await watch(onChange);
  await open();
}

begin();
