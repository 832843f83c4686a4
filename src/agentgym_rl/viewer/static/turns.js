// An episode as turns: observation, thought, action and reward.

/** Return {instruction, turns: [{observation, reply, thought, action, reward, info, message, summary, cut}], ending}.
 * `cut` says that the model saw another context from this turn on; `summary` is the text that replaced it. */
export function turnsOf(episode) {
  const turns = [];
  let instruction = "";
  let observations = [];
  let summary = "";
  let cut = "";
  let isRewritten = false;
  for (const message of episode.messages) {
    if (message.prefix && message.dropped_turns) cut = cutText(message.dropped_turns);
    else if (message.prefix && !message.purpose && !isRewritten) {
      cut = "From here on, thoughts of earlier replies are dropped from the context.";
      isRewritten = true;
    }
    if (message.purpose) {
      if (message.role === "assistant") summary = splitReply(message.content).action;
    } else if (message.role === "system") {
      instruction = message.content;
    } else if (message.role === "user") {
      observations.push(message.content);
    } else {
      const k = turns.length;
      turns.push({
        observation: observations.join("\n"),
        reply: message.content,
        ...splitReply(message.content),
        reward: episode.rewards[k] ?? 0,
        info: episode.infos[k] ?? {},
        message,
        summary,
        cut,
      });
      observations = [];
      summary = cut = "";
    }
  }
  return { instruction, turns, ending: observations.join("\n") };
}

function cutText(dropped) {
  return `The context is cut here: the first ${dropped === 1 ? "turn is" : `${dropped} turns are`} left out from now on.`;
}

/** Return the thought and the action of a reply. A reply without such parts is all action. */
export function splitReply(reply) {
  const tagged = /^\s*(?:<think>)?([\s\S]*)<\/think>\s*([\s\S]*)$/.exec(reply);
  if (tagged) return { thought: tagged[1].trim(), action: tagged[2].trim() };
  const written = /^([\s\S]*)(?:^|\s)\**Action ?:\**\s*([\s\S]*)$/.exec(reply);
  if (written) {
    return { thought: written[1].replace(/^\s*\**Thought ?:\**\s*/, "").trim(), action: written[2].trim() };
  }
  return { thought: "", action: reply.trim() };
}
