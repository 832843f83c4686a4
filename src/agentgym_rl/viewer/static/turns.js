// An episode as turns: observation, thought, action and reward.

/** Return {instruction, turns: [{observation, parts, reply, thought, action, calls, reward, info, message, summary, cut}],
 * ending, endingParts}. `parts` are the observation's texts with a label each: one observation, or the results of tool
 * calls. `cut` says that the model saw another context from this turn on; `summary` is the text that replaced it. */
export function turnsOf(episode) {
  const turns = [];
  let instruction = "";
  let parts = [];
  let calls = [];
  let summary = "";
  let cut = "";
  let isRewritten = false;
  for (const message of episode.messages) {
    if (message.prefix && message.dropped_turns) cut = cutText(message.dropped_turns);
    else if (message.prefix && !message.purpose && !isRewritten) {
      cut = "New context from here on: earlier text was dropped or changed, such as thoughts.";
      isRewritten = true;
    }
    if (message.purpose === "call") {
      parts.push({ label: message.role === "assistant" ? "Reply to this call" : "Earlier call", text: message.content });
    } else if (message.purpose) {
      if (message.role === "assistant") summary = splitReply(message.content).action;
    } else if (message.role === "system") {
      instruction = message.content;
    } else if (message.role === "tool") {
      const call = calls.find((candidate) => candidate.id === message.call_id);
      parts.push({ label: call?.name ? `Result of ${call.name}` : "Result", text: message.content });
    } else if (message.role !== "assistant") {
      parts.push({ label: "Observation", text: message.content });
    } else {
      const k = turns.length;
      calls = message.calls ?? [];
      const texts = calls.map(callText);
      turns.push({
        observation: joined(parts),
        parts,
        reply: [message.content, ...texts].filter(Boolean).join("\n"),
        ...(calls.length ? { thought: thoughtBefore(message.content), action: texts.join("\n") } : splitReply(message.content)),
        calls: calls.length ? calls : null,
        reward: episode.rewards[k] ?? 0,
        info: episode.infos[k] ?? {},
        message,
        summary,
        cut,
      });
      parts = [];
      summary = cut = "";
    }
  }
  if (summary) parts.unshift({ label: "Summary by the model", text: summary });
  return { instruction, turns, ending: joined(parts), endingParts: parts };
}

const joined = (parts) => parts.map((part) => part.text).join("\n");

/** Return a tool call on one line. */
function callText(call) {
  if (call.raw) return call.raw;
  return `${call.name}(${call.arguments.map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ")})`;
}

/** Return the text before tool calls, without the tags of a thought. */
function thoughtBefore(text) {
  const { thought, action } = splitReply(text);
  return [thought, action].filter(Boolean).join("\n");
}

function cutText(dropped) {
  return `The context is cut here: the first ${dropped === 1 ? "turn is" : `${dropped} turns are`} left out from now on.`;
}

/** Return the thought and the action of a reply. A reply without such parts is all action. */
function splitReply(reply) {
  const tagged = /^\s*(?:<think>)?([\s\S]*)<\/think>\s*([\s\S]*)$/.exec(reply);
  if (tagged) return { thought: tagged[1].trim(), action: tagged[2].trim() };
  const written = /^([\s\S]*)(?:^|\s)\**Action ?:\**\s*([\s\S]*)$/.exec(reply);
  if (written) {
    return { thought: written[1].replace(/^\s*\**Thought ?:\**\s*/, "").trim(), action: written[2].trim() };
  }
  return { thought: "", action: reply.trim() };
}
