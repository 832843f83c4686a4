// Tokens of an episode, coloured by log-probability, entropy or advantage. Tokens that were not sampled are hatched.

import { fill, h, segmented } from "./dom.js";
import { number, signed } from "./format.js";

const MODES = {
  logprob: { title: "Log-probability", low: "certain", high: "surprising", needs: "sampler" },
  entropy: { title: "Entropy", low: "0 nats", high: null, needs: "learner" },
  advantage: { title: "Advantage", low: null, high: null, needs: "learner" },
};
const MAX_SURPRISE = 5; // nats at which the colour is full

/** Return every token of an episode: {text, id, sampled, trained, logprob, entropy, advantage, learner, turn, role, cut}.
 * `cut` is set on the first token after a change of segment. */
function tokensOf(episode) {
  const tokens = [];
  let turn = 0;
  let trainedIndex = 0;
  let segment = 0;
  for (const message of episode.messages) {
    const cut = (message.segment ?? 0) === segment ? "" : segmentText(message);
    message.token_ids.forEach((id, i) => {
      const sampled = message.logprobs !== null && message.logprobs !== undefined;
      const trained = sampled && i >= (message.untrained ?? 0);
      tokens.push({
        id, turn, sampled, trained,
        role: message.purpose || message.role,
        text: message.texts?.[i] ?? `⟨${id}⟩`,
        logprob: sampled ? message.logprobs[i] : null,
        entropy: trained ? (episode.learned?.entropies?.[trainedIndex] ?? null) : null,
        advantage: trained ? (episode.learned?.advantages?.[trainedIndex] ?? null) : null,
        learner: trained ? (episode.learned?.logprobs?.[trainedIndex] ?? null) : null,
        cut: i === 0 ? cut : "",
      });
      trainedIndex += trained;
    });
    if (message.token_ids.length) segment = message.segment ?? 0;
    turn += message.role === "assistant" && !message.purpose;
  }
  return tokens;
}

function segmentText(message) {
  const name = `Segment ${message.segment + 1}`;
  if (!message.prefix) return `${name} continues`;
  const [parent, length] = message.prefix;
  return `${name}: a new context` + (length ? `, after the first ${length} tokens of segment ${parent + 1}` : "");
}

function colorOf(token, mode, most) {
  const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(100 * Math.min(1, share))}%, transparent)`;
  if (mode === "logprob") return token.logprob === null ? "" : mix("surprise", (0.85 * -token.logprob) / MAX_SURPRISE);
  if (mode === "entropy") return token.entropy === null ? "" : mix("entropy", (0.8 * token.entropy) / most);
  if (token.advantage === null) return "";
  return mix(token.advantage >= 0 ? "plus" : "minus", (0.75 * Math.abs(token.advantage)) / most);
}

export function tokenView(episode, mode, onMode) {
  const tokens = tokensOf(episode);
  const text = h("div", { class: "tokens", role: "group", "aria-label": "tokens" });
  const legend = h("div", { class: "legend" });
  const detail = h("div", { class: "token-detail", role: "status" }, "Hover over a token.");
  if (!tokens.length) return h("p", { class: "empty" }, "No tokens were recorded: no local model played this episode.");
  const choice = segmented(Object.entries(MODES).map(([name, { title }]) => [name, title]), mode, (next) => {
    onMode(next);
    draw(next);
  }, "Colour by");
  const spans = tokens.map((token) => {
    const span = h("span", { class: token.sampled ? "token" : "token masked" }, visible(token.text));
    span.dataset.role = token.role;
    return [token, span];
  });
  for (const [token, span] of spans) {
    span.addEventListener("pointerenter", () => fill(detail, describe(token)));
    if (token.cut) text.append(h("div", { class: "cut", role: "separator" }, token.cut));
    text.append(span);
    if (token.text.includes("\n")) text.append(h("br"));
  }

  function draw(current) {
    const values = tokens.map((token) => Math.abs(token[current] ?? 0));
    const most = values.reduce((a, b) => Math.max(a, b), 0) || 1;
    for (const [token, span] of spans) span.style.backgroundColor = token.sampled ? colorOf(token, current, most) : "";
    const { title, low, high, needs } = MODES[current];
    const missing = needs === "learner" && !episode.learned;
    fill(
      legend,
      missing
        ? h("span", { class: "not-recorded" }, `${title}: not recorded for this episode.`)
        : [h("span", {}, low ?? number(-most)), h("i", { class: `scale ${current}` }), h("span", {}, high ?? number(most) + (current === "entropy" ? " nats" : ""))],
      h("span", { class: "key" }, h("i", { class: "masked-swatch" }), "not sampled: masked in the loss"),
    );
  }

  draw(mode);
  return h("section", { class: "token-view" }, h("div", { class: "token-controls" }, choice, legend), detail, text);
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

function describe(token) {
  const probability = token.logprob === null ? null : Math.exp(token.logprob);
  const facts = [
    ["token", JSON.stringify(token.text)], ["id", token.id], ["role", token.role],
    token.sampled ? ["turn", token.turn + 1] : null,
    token.sampled && !token.trained ? ["", "no loss: a thought"] : null,
    token.sampled ? ["log-probability", number(token.logprob)] : ["", "not sampled: masked in the loss"],
    token.sampled ? ["probability", number(probability)] : null,
    token.entropy === null ? null : ["entropy", number(token.entropy)],
    token.advantage === null ? null : ["advantage", signed(token.advantage)],
    token.learner === null ? null : ["learner − sampler", signed(token.learner - token.logprob)],
  ];
  return facts.filter(Boolean).map(([name, value]) => h("span", {}, name ? h("small", {}, name) : null, ` ${value}`));
}
