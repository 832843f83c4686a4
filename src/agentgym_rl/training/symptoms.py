"""The rules of the collapse doctor: pure functions from the metric rows so far to a symptom that holds now, or None.

A row is what metrics.jsonl holds of one step. Most rules look at the mean over the last WINDOW steps, because one
step's batch is noise, and compare it with the first WINDOW steps. A metric that is absent keeps its rule silent. Where
every task is solved a policy may well be certain, uniform and without contrast, so such rules are silent there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any, Literal

Severity = Literal["warning", "severe"]
"""severe: nothing is learned any more, or what is learned is wrong."""

WINDOW = 5
PATIENCE = 20
"""Window of what is normal early in a run and wrong only if it lasts."""
MEMORY = 100
"""Steps that are looked back on for the best of a signal, which bounds the cost of long runs."""
SOLVED = 0.9
"""Success above which certainty and equal episodes are what one wants."""
READ = frozenset(
    {
        "success/mean",
        "reward/mean",
        "groups/zero_variance",
        "entropy/mean",
        "surprise/mean",
        "replies/dependence",
        "actions/repeated_rate",
        "actions/alternating_rate",
        "actions/invalid_rate",
        "truncated/horizon_rate",
        "truncated/length_rate",
        "truncated/context_rate",
        "tokens/per_reply",
        "mismatch/abs",
        "mismatch/kl",
        "kl/reference",
        "grad/norm",
        "clip/fraction",
        "skipped",
        "episodes/usable",
        "episodes/error",
    }
)
READ_BY_TURN = ("entropy/turn_", "mismatch/turn_")
"""How the other metrics begin that a rule reads."""


class Rows:
    """The metric rows so far, as much of them as rules read: it does not grow with the length of a run."""

    def __init__(self) -> None:
        self.recent: list[dict[str, Any]] = []
        """The last steps, with the metrics that are read."""
        self.first: dict[str, list[float]] = {}
        """The first WINDOW values of each of these metrics."""

    def add(self, row: Mapping[str, Any]) -> None:
        read = [name for name in row if name in READ or name.startswith(READ_BY_TURN)]
        # A run makes names anew at every step; interned, all rows share one.
        self.recent.append({"step": row["step"]} | {sys.intern(name): row[name] for name in read})
        del self.recent[: -2 * MEMORY]
        for name in read:
            first = self.first.setdefault(sys.intern(name), [])
            if len(first) < WINDOW and is_number(row[name]):
                first.append(float(row[name]))


@dataclass(frozen=True, slots=True)
class Symptom:
    """What a rule found."""

    since: int
    """The step it began at."""
    what: str
    """The numbers: `entropy fell from 1.21 to 0.08`."""
    meaning: str
    remedy: str
    """Settings to try, by the keys of a recipe."""

    @property
    def message(self) -> str:
        return f"{self.what} since step {self.since}: {self.meaning}; {self.remedy}"


Rule = Callable[[Rows], Symptom | None]


def entropy_collapse(rows: Rows) -> Symptom | None:
    """Entropy below a tenth of where it began. Healthy runs settle at a quarter or more while there is still something
    to learn; below a tenth nearly all episodes of a group are the same. The sampler's estimate is looked at too: the
    learner's is of the groups it learns from, of which a policy that has settled leaves none."""
    for name in ("entropy/mean", "surprise/mean"):
        now, start = _now(rows, name), _start(rows, name, max)
        if now is None or start is None or _solved(rows) or now >= 0.1 * start:
            continue
        return Symptom(
            _since_below(rows, name, 0.1 * start),
            f"entropy fell from {start:.2f} to {abs(now):.2g}",
            "the policy stopped exploring",
            "raise rl.entropy_coef or rl.kl_coef, or lower rl.optimizer.lr",
        )
    return None


def entropy_explosion(rows: Rows) -> Symptom | None:
    """Entropy, of all tokens or of those of one turn, at twice its start and half a nat above it. RL concentrates a
    policy; one that grows more random is pushed there by its bonus or by noise, and replies turn into nonsense."""
    for name in ("entropy/mean", *_turns(rows, "entropy")):
        now, start = _now(rows, name), _start(rows, name, median)
        if now is None or start is None or now <= max(2.0 * start, start + 0.5):
            continue
        limit = max(2.0 * start, start + 0.5)
        return Symptom(
            _since_above(rows, name, limit),
            f"entropy{_of_turn(name)} rose from {start:.2f} to {now:.2f}",
            "the policy grows more random instead of more certain",
            "lower rl.entropy_coef or rl.optimizer.lr, or raise rl.kl_coef",
        )
    return None


def zero_advantage(rows: Rows) -> Symptom | None:
    """More than nine groups in ten have equal rewards, and not because the tasks are solved. Healthy runs stay below
    0.8 over a window; above 0.9 the few groups left carry mostly luck."""
    now, success = _now(rows, "groups/zero_variance"), _now(rows, "success/mean")
    if now is None or now <= 0.9 or _solved(rows):
        return None
    hopeless = success is not None and success < 0.05 and not _rose(rows, "reward/mean")
    return Symptom(
        _since_above(rows, "groups/zero_variance", 0.9),
        f"{now:.0%} of groups have no advantage",
        "no episode of theirs succeeds, so there is nothing to prefer"
        if hopeless
        else "their episodes all end alike, so there is nothing to prefer",
        "choose easier items, raise horizon.turns, or add a warm_start"
        if hopeless
        else "raise rl.group_size, agent.temperature or rl.resample_rounds",
    )


def repeated_actions(rows: Rows) -> Symptom | None:
    """Half of the replies repeat the one before, or a third close a loop of two, while seven episodes in ten fail.
    Where repeating is right, as in walking, success is higher."""
    if (_now(rows, "success/mean") or 0.0) >= 0.3:
        return None
    for name, limit, what in (
        ("actions/repeated_rate", 0.5, "repeat the one before"),
        ("actions/alternating_rate", 0.33, "alternate between two"),
    ):
        now = _now(rows, name)
        if now is not None and now > limit:
            return Symptom(
                _since_above(rows, name, limit),
                f"{now:.0%} of replies {what}",
                "the agent is stuck in loops",
                "lower rl.optimizer.lr, raise rl.kl_coef or agent.temperature, and look at the episodes with "
                "`agentgym-rl show`",
            )
    return None


def invalid_actions(rows: Rows) -> Symptom | None:
    """Three turns in five are spent on actions that the environment refuses, and most episodes fail. Healthy runs of
    small models pass through 0.5 when their horizon grows."""
    now = _now(rows, "actions/invalid_rate")
    if now is None or now <= 0.6 or (_now(rows, "success/mean") or 0.0) >= 0.5:
        return None
    return Symptom(
        _since_above(rows, "actions/invalid_rate", 0.6),
        f"{now:.0%} of actions are invalid",
        "the agent does not know, or has lost, the format or the possible actions",
        "add a warm_start on the oracle's play, raise rl.kl_coef, or check agent.style and agent.instruction",
    )


def horizon_truncation(rows: Rows) -> Symptom | None:
    """Nineteen episodes in twenty were cut by the horizon over PATIENCE steps, next to none succeeded and reward has
    not risen: what pays lies beyond the horizon. A short first stage of a schedule is not that, it pays already."""
    now = _now(rows, "truncated/horizon_rate", PATIENCE)
    success = _now(rows, "success/mean", PATIENCE)
    if now is None or now <= 0.95 or (success or 0.0) >= 0.1 or _rose(rows, "reward/mean", PATIENCE):
        return None
    return Symptom(
        _since_above(rows, "truncated/horizon_rate", 0.95, PATIENCE),
        f"{now:.0%} of episodes end at the horizon and hardly any succeeds",
        "what pays lies beyond the last turn allowed",
        "raise horizon.turns, or choose shorter tasks",
    )


def length_truncation(rows: Rows) -> Symptom | None:
    """Three episodes in ten end because a reply ran out of max_new_tokens, without its action being taken."""
    now = _now(rows, "truncated/length_rate")
    if now is None or now <= 0.3:
        return None
    return Symptom(
        _since_above(rows, "truncated/length_rate", 0.3),
        f"{now:.0%} of episodes end by a reply cut off at its longest",
        "their last action is never taken, and it is not the action that is blamed",
        'raise agent.max_new_tokens, or set rl.overlong = "penalty"',
    )


def context_truncation(rows: Rows) -> Symptom | None:
    """Three episodes in ten run out of max_context."""
    now = _now(rows, "truncated/context_rate")
    if now is None or now <= 0.3:
        return None
    return Symptom(
        _since_above(rows, "truncated/context_rate", 0.3),
        f"{now:.0%} of episodes run out of context",
        "they end before the horizon and count as failures",
        "raise agent.max_context, or lower horizon.turns or agent.max_new_tokens",
    )


def length_runaway(rows: Rows) -> Symptom | None:
    """Replies twice as long as at the start (and by 4 tokens at least) while success has not risen. Reasoning that
    grows along with success is left alone."""
    now, start = _now(rows, "tokens/per_reply"), _start(rows, "tokens/per_reply", median)
    if now is None or start is None or now <= max(2.0 * start, start + 4.0) or _rose(rows, "success/mean"):
        return None
    limit = max(2.0 * start, start + 4.0)
    return Symptom(
        _since_above(rows, "tokens/per_reply", limit),
        f"replies grew from {start:.0f} to {now:.0f} tokens while success did not rise",
        "length is being learned, not the task",
        'set rl.aggregate = "constant" or rl.overlong = "penalty", lower agent.max_new_tokens, or check what is paid',
    )


def length_collapse(rows: Rows) -> Symptom | None:
    """Replies less than 0.4 times as long as at the start, which was long enough to hold a thought (8 tokens), while
    success has not risen."""
    now, start = _now(rows, "tokens/per_reply"), _start(rows, "tokens/per_reply", max)
    if now is None or start is None or start < 8.0 or now >= 0.4 * start or _rose(rows, "success/mean"):
        return None
    return Symptom(
        _since_below(rows, "tokens/per_reply", 0.4 * start),
        f"replies shrank from {start:.0f} to {now:.1f} tokens while success did not rise",
        "the reasoning before the action is being dropped",
        'raise rl.kl_coef, lower rl.optimizer.lr, or set rl.aggregate = "token"',
    )


def sampler_mismatch(rows: Rows) -> Symptom | None:
    """Sampler and learner differ by 0.1 nats a token, or by a KL of 0.02. The native engine in float32 agrees to 1e-6
    and engines in bfloat16 to about 0.02; more biases every gradient, so three steps are enough to say so."""
    for name, limit in (("mismatch/abs", 0.1), ("mismatch/kl", 0.02)):
        now = _now(rows, name, 3)
        if now is not None and now > limit:
            return Symptom(
                _since_above(rows, name, limit, 3),
                f"sampler and learner disagree by {now:.2g} ({name})",
                "the policy that is trained is not the one that plays",
                "check that agent.temperature, model.dtype and the weights are the engine's too, set rl.overlap = 0, "
                'and keep rl.importance = "token"',
            )
    return None


def mismatch_over_turns(rows: Rows) -> Symptom | None:
    """The last turn's mismatch is five times the first's and above 0.02: what sampler and learner read drifts apart
    as an episode goes on, as it does when history is re-tokenised or a cache is stale."""
    turns = _turns(rows, "mismatch")
    if len(turns) < 2:
        return None
    first, last = _now(rows, turns[0], 3), _now(rows, turns[-1], 3)
    if first is None or last is None or last <= max(5.0 * first, 0.02):
        return None
    limit = max(5.0 * first, 0.02)
    return Symptom(
        _since_above(rows, turns[-1], limit, 3),
        f"the mismatch of sampler and learner grows from {first:.2g} in turn 1 to {last:.2g}{_of_turn(turns[-1])}",
        "they read different histories",
        "check model.chat_template and agent.max_context against the engine's",
    )


def kl_runaway(rows: Rows) -> Symptom | None:
    """More than one nat of KL per token from the starting point. Small models from nothing settle near 0.5, large ones
    below 0.1. The median of a window, because k3 has a heavy tail."""
    recent = [value for _, value in _last(rows, "kl/reference", WINDOW)]
    if len(recent) < WINDOW or median(recent) <= 1.0:
        return None
    return Symptom(
        _since_above(rows, "kl/reference", 1.0),
        f"KL to the reference is {median(recent):.2g} per token",
        "the policy has left what it started from",
        "raise rl.kl_coef or set rl.kl_target, or lower rl.optimizer.lr",
    )


def gradient_spikes(rows: Rows) -> Symptom | None:
    """Three of the last five gradients are ten times the usual (the median of those before). One spike now and then
    is normal and clipped."""
    series = [pair for pair in _last(rows, "grad/norm", MEMORY) if pair[1] > 0.0]
    before, recent = series[:-WINDOW], series[-WINDOW:]
    if len(before) < 3:
        return None
    usual = median(value for _, value in before)
    spikes = [pair for pair in recent if pair[1] > 10.0 * usual]
    if len(spikes) < 3:
        return None
    return Symptom(
        spikes[0][0],
        f"gradient norms rose from {usual:.2g} to {max(value for _, value in spikes):.2g}",
        "updates are dominated by a few samples or the loss is diverging",
        "lower rl.optimizer.lr or rl.optimizer.max_grad_norm, or raise rl.groups_per_step",
    )


def skipped_updates(rows: Rows) -> Symptom | None:
    """A gradient was not finite in the last WINDOW steps. That never happens in a healthy run."""
    skipped = [(step, value) for step, value in _last(rows, "skipped", WINDOW) if value > 0.0]
    if not skipped:
        return None
    return Symptom(
        skipped[0][0],
        f"{fmean(value for _, value in skipped):.0%} of a step's updates were skipped",
        "the gradient was not finite",
        'lower rl.optimizer.lr, or use model.dtype = "float32"',
    )


def success_collapse(rows: Rows) -> Symptom | None:
    """Success below half of the best it was over a window, if that was 20% at least, and by more than luck: of
    windows that are only noise the best and the worst lay up to six standard errors apart in runs of 250 steps. Small
    batches of tasks that differ need the longer window to tell."""
    for window in (WINDOW, PATIENCE):
        means = _window_means(rows, "success/mean", window)
        if not means:
            return None
        best_step, best = max(means, key=lambda pair: pair[1])
        now = means[-1][1]
        if best < 0.2 or now >= 0.5 * best or best - now <= 8.0 * _noise(rows, "success/mean") / math.sqrt(window):
            continue
        return Symptom(
            _since_below(rows, "success/mean", 0.5 * best, window),
            f"success fell from {best:.0%} (about step {best_step}) to {now:.0%}",
            "what was learned is being lost",
            "go back to an earlier checkpoint with a lower rl.optimizer.lr or a higher rl.kl_coef",
        )
    return None


def template_collapse(rows: Rows) -> Symptom | None:
    """Replies depend on their inputs a quarter as much as they once did (0.3 at least, which is beyond the noise of
    small batches). Where the same reply is right for every task the tasks are solved and the rule is silent."""
    means = _window_means(rows, "replies/dependence")
    if not means or _solved(rows):
        return None
    best, now = max(value for _, value in means), means[-1][1]
    if best < 0.3 or now >= 0.25 * best:
        return None
    return Symptom(
        _since_below(rows, "replies/dependence", 0.25 * best),
        f"the dependence of replies on their inputs fell from {best:.2f} to {max(0.0, now):.2f}",
        "the agent says the same whatever it is shown",
        "raise rl.kl_coef or rl.entropy_coef, lower rl.optimizer.lr, or check whether one fixed reply is paid",
    )


def clipping(rows: Rows) -> Symptom | None:
    """The clip takes away the gradient of one token in five: a step's updates go too far from its samples. Healthy
    runs stay below one in ten."""
    now = _now(rows, "clip/fraction")
    if now is None or now <= 0.2:
        return None
    return Symptom(
        _since_above(rows, "clip/fraction", 0.2),
        f"{now:.0%} of tokens are clipped",
        "the policy leaves its samples behind within one step",
        "lower rl.optimizer.lr, rl.epochs or rl.minibatches, or raise rl.clip_high",
    )


def episode_errors(rows: Rows) -> Symptom | None:
    """One attempt in five fails. Failures are not trained on, but they are rarely spread evenly: what fails is missing
    from what is learned."""
    recent = _last(rows, "episodes/error", WINDOW)
    usable = _last(rows, "episodes/usable", WINDOW)
    errors, attempts = sum(v for _, v in recent), sum(v for _, v in recent) + sum(v for _, v in usable)
    if len(recent) < WINDOW or errors <= 0.2 * attempts:
        return None
    return Symptom(
        next(step for step, value in recent if value > 0.0),
        f"{errors / attempts:.0%} of episodes fail",
        "they are left out, and with them whatever makes them fail",
        "look at `error` in the trajectories; raise agent.step_timeout_s, or lower agent.concurrency",
    )


RULES: dict[str, tuple[Severity, Rule]] = {
    "entropy_collapse": ("severe", entropy_collapse),
    "entropy_explosion": ("warning", entropy_explosion),
    "zero_advantage": ("severe", zero_advantage),
    "repeated_actions": ("warning", repeated_actions),
    "invalid_actions": ("warning", invalid_actions),
    "horizon_truncation": ("warning", horizon_truncation),
    "length_truncation": ("warning", length_truncation),
    "context_truncation": ("warning", context_truncation),
    "length_runaway": ("warning", length_runaway),
    "length_collapse": ("warning", length_collapse),
    "sampler_mismatch": ("severe", sampler_mismatch),
    "mismatch_over_turns": ("severe", mismatch_over_turns),
    "kl_runaway": ("warning", kl_runaway),
    "gradient_spikes": ("warning", gradient_spikes),
    "skipped_updates": ("severe", skipped_updates),
    "success_collapse": ("severe", success_collapse),
    "template_collapse": ("severe", template_collapse),
    "clipping": ("warning", clipping),
    "episode_errors": ("warning", episode_errors),
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _last(rows: Rows, name: str, count: int) -> list[tuple[int, float]]:
    """(step, value) of the last `count` rows that have the metric; rows far back are not searched for it."""
    found: list[tuple[int, float]] = []
    for row in reversed(rows.recent[-2 * count :]):
        if is_number(row.get(name)):
            found.append((row["step"], float(row[name])))
        if len(found) == count:
            break
    return found[::-1]


def _now(rows: Rows, name: str, window: int = WINDOW) -> float | None:
    """Mean over the last window, None as long as there is none."""
    recent = _last(rows, name, window)
    return fmean(value for _, value in recent) if len(recent) == window else None


def _start(rows: Rows, name: str, of: Callable[[list[float]], float]) -> float | None:
    """`of` the first WINDOW values."""
    first = rows.first.get(name, [])
    return of(first) if len(first) == WINDOW else None


def _window_means(rows: Rows, name: str, window: int = WINDOW) -> list[tuple[int, float]]:
    """(first step, mean) of every window in memory, oldest first."""
    series = _last(rows, name, MEMORY)
    # Sums up to each place: this is what a step's examination costs, and windows overlap.
    sums = [0.0, *accumulate(value for _, value in series)]
    return [(series[i][0], (sums[i + window] - sums[i]) / window) for i in range(len(series) - window + 1)]


def _noise(rows: Rows, name: str) -> float:
    """How far a step is from what is expected of it, by how far steps are from the ones before them: a trend or a fall
    that happens once hardly counts."""
    values = [value for _, value in _last(rows, name, MEMORY)]
    jumps = [(after - before) ** 2 for before, after in pairwise(values)]
    return math.sqrt(fmean(jumps) / 2) if jumps else 0.0


def _since_above(rows: Rows, name: str, limit: float, window: int = WINDOW) -> int:
    """The first step of the unbroken stretch of windows above `limit` that reaches until now."""
    return _since(rows, [(step, mean > limit) for step, mean in _window_means(rows, name, window)])


def _since_below(rows: Rows, name: str, limit: float, window: int = WINDOW) -> int:
    return _since(rows, [(step, mean < limit) for step, mean in _window_means(rows, name, window)])


def _since(rows: Rows, held: list[tuple[int, bool]]) -> int:
    since = int(rows.recent[-1]["step"])
    for step, holds in reversed(held):
        if not holds:
            break
        since = step
    return since


def _rose(rows: Rows, name: str, window: int = WINDOW) -> bool:
    """By 0.05, and by a tenth of where it began."""
    now, start = _now(rows, name, window), _start(rows, name, fmean)
    return now is not None and start is not None and now - start > max(0.05, 0.1 * abs(start))


def _solved(rows: Rows) -> bool:
    return (_now(rows, "success/mean") or 0.0) >= SOLVED


def _turns(rows: Rows, signal: str) -> list[str]:
    """Names such as entropy/turn_3 in the last row, in order of turns."""
    names = [name for name in rows.recent[-1] if name.startswith(f"{signal}/turn_")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2].rstrip("+")))


def _of_turn(name: str) -> str:
    turn = name.partition("turn_")[2]
    return f" in turn {turn.rstrip('+')}{' and later' if turn.endswith('+') else ''}" if turn else ""
