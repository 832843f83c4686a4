// An episode as turns: observation, thought, action and reward.

/** Return {instruction, turns: [{observation, reply, thought, action, reward, info, message}], ending}. */
export function turnsOf(episode) {
  const turns = [];
  let instruction = "";
  let observations = [];
  for (const message of episode.messages) {
    if (message.role === "system") {
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
      });
      observations = [];
    }
  }
  return { instruction, turns, ending: observations.join("\n") };
}

/** Return the thought and the action of a reply. A reply without such parts is all action. */
export function splitReply(reply) {
  const tagged = /^\s*<think>([\s\S]*?)<\/think>\s*([\s\S]*)$/.exec(reply);
  if (tagged) return { thought: tagged[1].trim(), action: tagged[2].trim() };
  const written = /^([\s\S]*)(?:^|\s)\**Action ?:\**\s*([\s\S]*)$/.exec(reply);
  if (written) {
    return { thought: written[1].replace(/^\s*\**Thought ?:\**\s*/, "").trim(), action: written[2].trim() };
  }
  return { thought: "", action: reply.trim() };
}
