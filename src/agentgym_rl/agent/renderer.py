"""Turns a chat template into token deltas, so that a conversation only grows and sampled ids never change.

A chat template renders whole conversations. For an episode that has two faults: the reply would be decoded and encoded
again, and the template might rewrite earlier turns. So the template renders only the text between two replies. This is
exact for every *prefix-stable* template, which the constructor checks.

A template that drops the thoughts of earlier replies is not prefix-stable. Then every prompt is rendered whole, and
one that does not extend the tokens before it starts a new segment (see segments.py).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from agentgym_rl.agent.observation_frame import ObservationFrames
from agentgym_rl.agent.probes import TEXT_PROBE, TOOL, TOOL_PROBE, RewrittenHistory, probe_conversations, require_prefix
from agentgym_rl.agent.segments import match_segment, num_repeated
from agentgym_rl.agent.templates import TOOL_USE, control_tokens, resolve_template, template_advice
from agentgym_rl.agent.tool_parsers import PARSERS, Parsed
from agentgym_rl.agent.word_encoder import TokenTexts, WordEncoder, backend_of
from agentgym_rl.common.chat_messages import to_openai, with_answers_of_the_user
from agentgym_rl.common.thoughts import CLOSE, OPEN, without_thought
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role, Sample, ToolCall

Tools = Sequence[dict[str, Any]]
"""JSON schemas of an agent's tools; empty if it has none."""

# Placeholder for a reply. The template's text after it is what follows every reply.
_REPLY_MARKER = "marked0reply"
_START = [Message("user", "x")]

_END_OF_MESSAGE = "<|eom_id|>"
"""Token with which Llama 3 may end a tool call instead of its end of turn."""

_CACHE_SIZE = 2048
"""Cached openings and observations: episodes of a group share their opening and revisit states."""
_MAX_CACHED_CHARS = 1 << 16
"""Maximum characters of a cached text."""

Thoughts = Literal["template", "keep", "drop"]
"""Thoughts of earlier replies in a prompt: as the chat template renders them, always kept, or always dropped."""


class Renderer:
    """A chat template with a tokenizer. `chat_template`: a built-in's name, a path, Jinja text, or None for the
    tokenizer's own. `template_kwargs` are passed to the template."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        thoughts: Thoughts = "template",
        **template_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._backend = backend_of(tokenizer)
        self._words, self._token_texts = WordEncoder(tokenizer, self._backend), TokenTexts(tokenizer, self._backend)
        self._template_kwargs = template_kwargs
        # A byte-level token has one character per byte, so at least as many as its text. Plus one for the space between
        # words, which belongs to no token in a vocabulary of words.
        self.max_token_chars = 1 + max(map(len, tokenizer.get_vocab()))
        """Maximum characters of text that one token can represent, except unknown words."""
        self._conversation_ids = lru_cache(_CACHE_SIZE)(self._encode_conversation)
        self._follow_up_ids = lru_cache(_CACHE_SIZE)(self._encode_follow_up)
        self._tool_results_ids = lru_cache(_CACHE_SIZE)(self._encode_tool_results)
        self.tool_format = ""
        """Format of the template's tool calls, a name of PARSERS; known after `require_tools`."""
        self._template = self._find_template(chat_template)
        self._control = re.compile("(?!)")
        self._frames: ObservationFrames | None = None
        self._no_tools: list[Any] | None = None
        try:
            self._apply_template(_START, True, ())
        except ConfigError:
            self._no_tools = []  # a template for tools, such as `tool_use` of Hermes, needs a list
        self.folds_system = not self._accepts_system()
        self.end_of_turn, self._end_text = self._find_end_of_turn()
        turns = self._render([*_START, Message("assistant", _REPLY_MARKER)], generation_prompt=False)
        self._control = control_tokens(tokenizer, turns)
        before = self._render(_START, generation_prompt=True)
        self._before_reply = before, self.encode(before)
        ends = [i for i, token in tokenizer.added_tokens_decoder.items() if str(token) == _END_OF_MESSAGE]
        candidates = (self.end_of_turn, tokenizer.eos_token_id, *ends)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(t for t in candidates if t is not None))
        self._opener, self._rewrites = "", False
        self._drops_thoughts = thoughts == "drop"
        self.linear = thoughts != "drop"
        """Whether every prompt extends the tokens before it, so that an episode is one segment until it is cut."""
        try:
            self._require_stable_history()
        except ConfigError:
            if self._drops_only_thoughts():
                self._rewrites = True
                self.linear = thoughts == "keep"
            elif not self._is_stable_when_folded():
                raise
        values = [value for value in template_kwargs.values() if isinstance(value, str)]
        self._frames = ObservationFrames(self._template, values, self._render_follow_up)

    def prompt(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a conversation before a reply, with the generation prompt."""
        if any(m.tool_calls or m.role == "tool" for m in messages):
            return self.encode(self._render(messages, generation_prompt=True, tools=tools))
        short = sum(len(m.content) for m in messages) <= _MAX_CACHED_CHARS
        ids_of = self._conversation_ids if short else self._encode_conversation
        return list(ids_of(tuple((m.role, m.content) for m in messages), True, _key_of(tools)))

    def linear_prompt(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a conversation before a reply, with earlier replies as they were sampled."""
        replies = [i for i, message in enumerate(messages) if message.is_reply]
        ids = self.prompt(messages[: replies[0]] if replies else messages, tools)
        for i, following in pairwise([*replies, len(messages)]):
            ids += messages[i].token_ids
            if ids[-1] not in self.stop_token_ids:
                ids.append(self.end_of_turn)
            ids += self.observation_ids(messages[i + 1 : following])
        return ids

    def opening(self, messages: list[Message], tools: Tools = ()) -> list[Message]:
        """Return the first messages of an episode with the ids of `prompt` divided among them."""
        ids = self.prompt(messages, tools)
        if messages[0].role != "system" or self.folds_system:
            # The ids of a folded instruction cannot be separated from those of the observation.
            return [*messages[:-1], replace(messages[-1], token_ids=ids)]
        length = self._system_length(messages[0], ids, tools)
        return [replace(messages[0], token_ids=ids[:length]), replace(messages[1], token_ids=ids[length:])]

    def follow_up(self, observation: str, generation_prompt: bool = True) -> list[int]:
        """Return the ids between a reply's end-of-turn token and the next reply: observation and generation prompt."""
        ids_of = self._follow_up_ids if len(observation) <= _MAX_CACHED_CHARS else self._encode_follow_up
        return list(ids_of(observation, generation_prompt))

    def tool_results(self, messages: Sequence[Message], generation_prompt: bool = True) -> list[int]:
        """Return the ids between a reply's end-of-turn token and the next reply: results of its calls, and prompt."""
        short = sum(len(m.content) for m in messages) <= _MAX_CACHED_CHARS
        ids_of = self._tool_results_ids if short else self._encode_tool_results
        return list(ids_of(tuple((m.content, m.tool_call_id) for m in messages), generation_prompt))

    def observation_ids(self, messages: Sequence[Message], generation_prompt: bool = True) -> list[int]:
        """Return the ids of the messages between two replies: one observation, or the results of calls."""
        if messages[0].role == "tool":
            return self.tool_results(messages, generation_prompt)
        return self.follow_up("\n".join(message.content for message in messages), generation_prompt)

    def read_reply(self, token_ids: list[int], tools: Tools = ()) -> tuple[str, list[ToolCall] | None]:
        """Return a reply's text and its tool calls: None for an agent without tools."""
        if not tools:
            return self.decode(token_ids), None
        self.require_tools()
        kept = [token for token in token_ids if token not in self.stop_token_ids]
        # Special tokens are kept for the parser: some formats mark calls by one.
        text = str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        answer = "" if self._is_open_thought(text) else text.rpartition(CLOSE)[2]
        content, calls = PARSERS[self.tool_format](answer)  # a call that a thought mentions is not made
        content = text[: len(text) - len(answer.lstrip())] + content
        return self._control.sub("", content).strip(), calls

    def require_tools(self) -> None:
        """Raise ConfigError unless tool calls can be rendered and read back, and results keep the history."""
        self.tool_format = self.tool_format or self._find_tool_format()

    def continuation(self, path: list[int], messages: list[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a conversation before a reply. They begin with `path` if its text begins with path's."""
        text = self._render(self._shown(messages), generation_prompt=True, tools=tools)
        played = self.tokenizer.decode(path, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not path or not text.startswith(played):
            return self.encode(text)
        rest = text[len(played) :]
        # Encoded after the end-of-turn token, as in `_encode_follow_up`.
        ids = self.encode(self._end_text + rest)[1:] if path[-1] == self.end_of_turn else self.encode(rest)
        return [*path, *ids]

    def transcript(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a whole conversation with its last message, and without a generation prompt.

        They follow from the texts: a reply has the same ids whether it was sampled or written.
        """
        self._try_tools(tools)
        if not self.linear:
            return self.encode(self._render(self._shown(messages), generation_prompt=False, tools=tools))
        ids = self.demonstration(messages, tools=tools).token_ids
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        said_last = messages[replies[-1] + 1 :]
        return ids + self.observation_ids(said_last, generation_prompt=False) if said_last else ids

    def _shown(self, messages: list[Message]) -> list[Message]:
        """Return the messages without the thoughts of replies, if these are dropped."""
        if not self._drops_thoughts:
            return messages
        return [replace(m, content=without_thought(m.content)) if m.is_reply else m for m in messages]

    def _try_tools(self, tools: Tools) -> None:
        if tools:
            with suppress(ConfigError):  # calls that could not be read in play can still be shown
                self.require_tools()

    def thought_length(self, token_ids: list[int]) -> int:
        """Return how many tokens of a reply are its thought, with the end of the thought."""
        text = self.decode(token_ids)
        if CLOSE not in text:
            return len(token_ids) if self._is_open_thought(text) else 0
        last = text.count(CLOSE)
        low, high = 0, len(token_ids)
        while high - low > 1:  # the fewest tokens with the last end of a thought
            middle = (low + high) // 2
            low, high = (low, middle) if self.decode(token_ids[:middle]).count(CLOSE) == last else (middle, high)
        return high

    def _is_open_thought(self, text: str) -> bool:
        """Return whether a reply is a thought that has no end."""
        opened = OPEN in self._opener and CLOSE not in self._opener
        return CLOSE not in text and (opened or text.lstrip().startswith(OPEN))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` without added tokens."""
        if self._is_backend_plain():
            return self._words.encode(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Return a reply's text for the environment, without special and end-of-turn tokens."""
        kept = [token for token in token_ids if token not in self.stop_token_ids]
        return self._token_texts.decode(kept)

    def _is_backend_plain(self) -> bool:
        """Return whether the backend may be called directly: another caller may have left it cutting or padding."""
        backend = self._backend
        if backend is None or self.tokenizer.split_special_tokens:
            return False
        return backend.truncation is None and backend.padding is None and not backend.encode_special_tokens

    def reply_ids(self, content: str, calls: list[ToolCall] | None = None) -> list[int]:
        """Return the ids of a written reply (a demonstration), with the end-of-turn token."""
        before, prefix = self._before_reply
        after = self._render([*_START, Message("assistant", content, tool_calls=calls)], generation_prompt=False)
        if not after.startswith(before.removesuffix(self._opener)):  # the template writes the date, which has changed
            before = self._render(_START, generation_prompt=True)
            self._before_reply = (before, prefix) = (before, self.encode(before))
        text = after[: after.rindex(self._end_text)]
        if self._rewrites:
            written = text.removeprefix(before.removesuffix(self._opener))
            thought = content.removesuffix(without_thought(content))
            if not after.startswith(before) or (thought.strip() if calls else content) not in written:
                # The template drops thoughts even here, but a reply is sampled with its thought.
                parts = [thought.rstrip(), written.lstrip()] if calls else [content]
                return [*self.encode(self._opened("\n\n".join(filter(None, parts)))), self.end_of_turn]
        whole = self.encode(text + self._end_text)
        if whole[: len(prefix)] == prefix:
            return whole[len(prefix) :]
        # The tokenizer merged text across the generation prompt, which sampling cannot do: encode the reply alone.
        return [*self.encode(text[len(before) :]), self.end_of_turn]

    def demonstrations(
        self,
        messages: list[Message],
        trained: list[bool] | None = None,
        tools: Tools = (),
        skipped_chars: Sequence[int] = (),
        *,
        train_thoughts: bool = True,
    ) -> list[Sample]:
        """Return samples for imitation, one per segment; of a linear conversation it is `demonstration`."""
        self._try_tools(tools)
        if self.linear:
            return [self.demonstration(messages, trained, tools, skipped_chars, train_thoughts=train_thoughts)]
        samples: list[Sample] = []
        answered = 0
        for i, message in enumerate(messages):
            if not message.is_reply:
                continue
            observation, answered = messages[answered:i], i + 1
            tokens = samples[-1].token_ids if samples else []
            prompt_ids = self.continuation(tokens, messages[:i], tools)
            match = match_segment({0: tokens} if samples else {}, prompt_ids, 1)
            if match.segment or not samples:
                known = observation and (self.tool_format or observation[0].role != "tool")
                new_ids = self.observation_ids(observation) if known else []
                left_out = [(0, num_repeated(prompt_ids, new_ids))] if samples else []
                samples.append(Sample(tokens[: match.prefix[1]] if match.prefix else [], [], left_out=left_out))
            sample, ids = samples[-1], self.reply_ids(message.content, message.tool_calls)
            sample.token_ids += match.added_ids
            beginning = message.content[: skipped_chars[i]] if skipped_chars else ""
            count = self._num_skipped(ids, beginning, train_thoughts) if trained is None or trained[i] else len(ids)
            sample.left_out += [(len(sample.token_ids), count)] if count else []
            sample.loss_mask += [False] * (len(sample.token_ids) - len(sample.loss_mask))
            sample.loss_mask += [False] * count + [True] * (len(ids) - count)
            sample.token_ids += ids
        if not samples:
            raise ConfigError("a demonstration needs at least one assistant message, got none: drop this conversation")
        return [sample for sample in samples if any(sample.loss_mask)]

    def demonstration(
        self,
        messages: list[Message],
        trained: list[bool] | None = None,
        tools: Tools = (),
        skipped_chars: Sequence[int] = (),
        *,
        train_thoughts: bool = True,
    ) -> Sample:
        """Return a sample for imitation with the loss on replies and their end-of-turn tokens only.

        `trained` says for each message whether it is imitated; by default every reply is. `skipped_chars` are the
        characters at the start of each message that are not imitated; by default none. Without `train_thoughts` the
        thoughts of replies are not imitated. The ids are those of a rollout, so that training matches play. Text after
        the last reply is left out.
        """
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not replies:
            raise ConfigError("a demonstration needs at least one assistant message, got none: drop this conversation")
        token_ids = self.prompt(messages[: replies[0]], tools)
        loss_mask = [False] * len(token_ids)
        imitated = [message.role == "assistant" for message in messages] if trained is None else trained
        left_out: list[tuple[int, int]] = []
        for turn, i in enumerate(replies):
            message = messages[i]
            if turn:
                ids = self.observation_ids(messages[replies[turn - 1] + 1 : i])
                token_ids += ids
                loss_mask += [False] * len(ids)
            ids = self.reply_ids(message.content, message.tool_calls)
            beginning = message.content[: skipped_chars[i]] if skipped_chars else ""
            count = self._num_skipped(ids, beginning, train_thoughts) if imitated[i] else len(ids)
            if count:
                left_out.append((len(token_ids), count))
            token_ids += ids
            loss_mask += [False] * count + [True] * (len(ids) - count)
        return Sample(token_ids=token_ids, loss_mask=loss_mask, left_out=left_out)

    def _num_skipped(self, reply_ids: list[int], beginning: str, train_thoughts: bool) -> int:
        """Return how many tokens at the start of a reply are not imitated."""
        return max(self.num_tokens(reply_ids, beginning), 0 if train_thoughts else self.thought_length(reply_ids))

    def num_tokens(self, reply_ids: list[int], beginning: str) -> int:
        """Return how many tokens of a reply hold its beginning. Spaces do not count: some tokenizers add their own."""

        def num_letters(text: str) -> int:
            return sum(map(len, text.split()))

        wanted, places = num_letters(beginning), range(len(reply_ids))
        return bisect_left(places, wanted, key=lambda count: num_letters(self.decode(reply_ids[:count])))

    def _render(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()) -> str:
        if self.folds_system and messages[0].role == "system":
            first = Message("user", f"{messages[0].content}\n\n{messages[1].content}")
            messages = [first, *messages[2:]]
        try:
            return self._apply_template(messages, generation_prompt, tools)
        except TemplateError:
            answered = with_answers_of_the_user(messages)
            if answered != messages:
                with suppress(TemplateError):
                    return self._apply_template(answered, generation_prompt, tools)
            if not any(len(m.tool_calls or ()) > 1 for m in messages):
                raise
            return self._apply_template([self._with_calls_as_text(m) for m in messages], generation_prompt, tools)

    def _apply_template(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools) -> str:
        conversation = [self._split_control_tokens(to_openai(m, arguments_as_text=False)) for m in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversation,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                tools=list(tools) or self._no_tools,
                **self._template_kwargs,
            )
        except TypeError as error:  # a template that needs tools, or a content that is not text
            raise ConfigError(f"the chat template cannot be rendered ({error}): {template_advice()}") from error
        return str(rendered)

    def _with_calls_as_text(self, message: Message) -> Message:
        """Return a reply of several calls as its text. Llama 3's template refuses such a reply, its parser reads it."""
        calls = [call for call in message.tool_calls or () if not call.error]
        if len(calls) < 2:
            return message
        start = len(self._before_reply[0])
        replies = [[*_START, Message("assistant", "", tool_calls=[call])] for call in calls]
        texts = [self._apply_template(reply, False, ()) for reply in replies]
        written = "; ".join(text[start : text.rindex(self._end_text)] for text in texts)
        if _without_ids(PARSERS["llama3"](written)) != ("", [replace(call, id="") for call in calls]):
            raise ConfigError(f"the chat template refuses a reply of {len(calls)} tool calls: {template_advice()}")
        malformed = [call for call in message.tool_calls or () if call.error]
        return replace(message, content=written, tool_calls=malformed)

    def _split_control_tokens(self, value: Any) -> Any:
        """Split control tokens such as `<|im_end|>` in every text, so that an observation cannot end the turn."""
        if isinstance(value, dict):
            return {key: self._split_control_tokens(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._split_control_tokens(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)

    def _encode_conversation(
        self, turns: tuple[tuple[Role, str], ...], generation_prompt: bool, tools: str = "[]"
    ) -> list[int]:
        messages = [Message(role, content) for role, content in turns]
        return self.encode(self._render(messages, generation_prompt, json.loads(tools)))

    def _encode_follow_up(self, observation: str, generation_prompt: bool) -> list[int]:
        # Encoded after the end-of-turn token, as in the conversation: some tokenizers prefix texts with a space.
        return self.encode(self._follow_up_text(observation, generation_prompt))[1:]

    def _follow_up_text(self, observation: str, generation_prompt: bool = True) -> str:
        shown = self._split_control_tokens(observation)
        frame = self._frames.find(generation_prompt, shown) if self._frames is not None else None
        if frame is None:
            return self._render_follow_up(observation, generation_prompt)
        return f"{frame[0]}{shown}{frame[1]}"

    def _render_follow_up(self, observation: str, generation_prompt: bool) -> str:
        messages = [*_START, Message("assistant", _REPLY_MARKER), Message("user", observation)]
        text = self._render(messages, generation_prompt)
        return text[text.index(_REPLY_MARKER) + len(_REPLY_MARKER) :]

    def _opened(self, content: str) -> str:
        """Return a written reply as the model would sample it: the generation prompt may have opened the thought."""
        if OPEN not in self._opener or CLOSE in self._opener:
            return content
        return content.removeprefix(OPEN).lstrip("\n") if CLOSE in content else f"\n{CLOSE}\n\n{content}"

    def _encode_tool_results(self, results: tuple[tuple[str, str], ...], generation_prompt: bool) -> list[int]:
        # One call for any number of results: some templates refuse to render several, and none counts them.
        call = ToolCall(_REPLY_MARKER, {}, results[0][1])
        answers = [Message("tool", content, tool_call_id=call_id) for content, call_id in results]
        text = self._render([*_START, Message("assistant", "", tool_calls=[call]), *answers], generation_prompt)
        reply_end = text.index(self._end_text, text.index(_REPLY_MARKER))
        return self.encode(text[reply_end:])[1:]

    def _system_length(self, system: Message, ids: list[int], tools: Tools) -> int:
        try:
            system_ids = self._conversation_ids(((system.role, system.content),), False, _key_of(tools))
        except TemplateError:
            return 0
        pairs = zip(system_ids, ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _find_template(self, chat_template: str | None) -> str:
        template = resolve_template(chat_template)
        named = self.tokenizer.chat_template
        if template == TOOL_USE and not (isinstance(named, dict) and TOOL_USE in named):
            raise ConfigError(f"the tokenizer has no chat template {TOOL_USE!r}: {template_advice()}")
        try:
            return str(self.tokenizer.get_chat_template(template))
        except ValueError:
            raise ConfigError(f"a chat template is needed and the tokenizer has none: {template_advice()}") from None

    def _accepts_system(self) -> bool:
        self.folds_system = False
        try:
            text = self._render([Message("system", _REPLY_MARKER), Message("user", "x")], generation_prompt=True)
        except TemplateError:
            return False
        if _REPLY_MARKER not in text:
            raise ConfigError(f"the chat template drops the system message with the instruction: {template_advice()}")
        return True

    def _find_end_of_turn(self) -> tuple[int, str]:
        text = self._render([*_START, Message("assistant", _REPLY_MARKER)], generation_prompt=False)
        if _REPLY_MARKER not in text:
            raise ConfigError(f"the chat template drops assistant messages: {template_advice()}")
        rest = text[text.index(_REPLY_MARKER) + len(_REPLY_MARKER) :]
        ids = self.encode(rest)
        token = str(self.tokenizer.added_tokens_decoder.get(ids[0], "")) if ids else ""
        if not token or not rest.startswith(token):
            raise ConfigError(
                f"a reply must end with a special token, but after a reply the chat template writes {rest!r}: "
                f"add its beginning to the tokenizer as a special token, or {template_advice()}"
            )
        return ids[0], token

    def _drops_only_thoughts(self) -> bool:
        """Return whether the template rewrites nothing but thoughts, and read the text that opens a thought."""
        start, prompt = (self._render(_START, generation_prompt) for generation_prompt in (False, True))
        later = self._render([*_START, Message("assistant", _REPLY_MARKER), *_START], False)
        header = later[: later.index(_REPLY_MARKER)].removeprefix(start)
        if not prompt.startswith(start + header):
            return False
        self._opener = prompt[len(start + header) :]
        if self._opener and not self._opener.lstrip().startswith(OPEN):
            return False
        for messages in probe_conversations():
            plain = [replace(m, content=without_thought(m.content)) for m in messages]
            for i, message in enumerate(plain[:-1]):
                if message.role != "assistant":
                    continue
                expected = self._render(plain[:i], False) + header + message.content
                expected += self._follow_up_text(plain[i + 1].content)
                if self._render(plain[: i + 2], True) != expected:
                    return False
        return True

    def _find_tool_format(self) -> str:
        """Return the format in which the template writes calls, after probing a conversation with tools."""
        opening = self._render(TOOL_PROBE[:1], generation_prompt=True, tools=[TOOL])
        if TOOL["function"]["name"] not in opening:  # type: ignore[index]
            named = self.tokenizer.chat_template
            other = isinstance(named, dict) and named.get(TOOL_USE, self._template) != self._template
            advice = f"set model.chat_template = {TOOL_USE!r}, which the tokenizer has" if other else template_advice()
            raise ConfigError(f"style 'tool' needs a chat template that shows tools, this one ignores them: {advice}")
        try:
            after = self._render(TOOL_PROBE[:2], generation_prompt=False, tools=[TOOL])
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot write a tool call ({error}): {template_advice()}") from error
        if not after.startswith(opening):  # the prompt opens a thought, which this reply does not have
            opening = opening.removesuffix(self._opener)
        reply = after[len(opening) : after.rindex(self._end_text)] if self._end_text in after else ""
        reply = without_thought(reply)
        expected = [replace(call, id="") for call in TOOL_PROBE[1].tool_calls or ()]
        formats = [name for name, parse in PARSERS.items() if _without_ids(parse(reply)) == ("", expected)]
        if not formats:
            raise ConfigError(
                f"the chat template writes a tool call as {reply!r}, which no known format reads "
                f"({', '.join(PARSERS)}): {template_advice()}"
            )
        probe = list(TOOL_PROBE)
        if probe[3].content not in self._render(probe[:4], generation_prompt=False, tools=[TOOL]):
            probe[3] = replace(probe[3], content="")
        if not self._rewrites:  # otherwise every prompt is rendered whole, or thoughts are kept on purpose
            try:
                self._require_prefix_stable(probe, [TOOL])
            except RewrittenHistory:
                self._require_prefix_stable(probe, [TOOL], ignore_space=True)
                self.linear = False  # Hermes adds a line break after earlier results: every turn starts a segment
            try:
                self._require_prefix_stable([*probe[:5], *TEXT_PROBE], [TOOL])
            except ConfigError:
                self.linear = False  # a reply without a call moves the tools: the next prompt starts a segment
            except TemplateError:
                pass  # such a conversation is only rendered turn by turn
        return formats[0]

    def _require_stable_history(self) -> None:
        for messages in probe_conversations():
            self._require_prefix_stable(messages)

    def _is_stable_when_folded(self) -> bool:
        """Fold the instruction into the first observation. Return whether earlier turns then stay as they are.

        Mistral Nemo's template writes the system message into the last observation.
        """
        self.folds_system = True
        with suppress(ConfigError):
            self._require_stable_history()
            return True
        return False

    def _require_prefix_stable(self, messages: list[Message], tools: Tools = (), *, ignore_space: bool = False) -> None:
        """Raise ConfigError unless the conversation so far is always a prefix of the later conversation."""
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._render(messages[:i], generation_prompt=True, tools=tools)
            after = self._render(messages[: i + 1], generation_prompt=False, tools=tools)
            require_prefix(before, after, "with a reply added", ignore_space)
            if message.content not in after[len(before) :]:
                raise ConfigError(
                    f"the chat template changes a reply: {message.content!r} became {after[len(before) :]!r}. "
                    f"Sampled text must be kept: {template_advice()}"
                )
            if i + 1 == len(messages):
                continue
            later = self._render(messages[: i + 2], generation_prompt=True, tools=tools)
            played = after[: after.rindex(self._end_text) + len(self._end_text)]
            require_prefix(played, later, "with the next observation added", ignore_space)
            if ignore_space:
                continue  # every prompt is rendered whole
            extended = [*self.encode(played), *self.observation_ids(messages[i + 1 : i + 2])]
            if extended != self.encode(later):
                raise ConfigError(
                    "the chat template writes an observation differently late in a conversation, or the tokenizer "
                    f"merges text across the end-of-turn token {self._end_text!r}: {template_advice()}"
                )


def _key_of(tools: Tools) -> str:
    """Return tools as a key of the caches of ids."""
    return json.dumps(list(tools)) if tools else "[]"


def _without_ids(parsed: Parsed) -> Parsed:
    content, calls = parsed
    return content, [replace(call, id="") for call in calls]
