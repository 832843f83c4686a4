"""The rules of the collapse doctor: pure functions from the metric rows so far to a current symptom, or None.

A row holds the metrics of one step, as in metrics.jsonl. Most rules compare the mean over the last WINDOW steps with
the first WINDOW steps, because one step is noisy. A rule is silent if its metric is absent. Rules about certainty and
missing contrast are silent when the tasks are solved, because both are normal then. Success against past selves does
not show that, so in self-play it is that of held-out evaluations.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any, Literal

Severity = Literal["warning", "severe"]
"""severe: the run no longer learns, or learns something wrong."""

WINDOW = 5
"""Steps that a rule averages over."""
LONG_WINDOW = 20
"""Window for symptoms that are normal early in a run and wrong only if they last."""
MEMORY = 100
"""Steps searched for the best value of a signal, which bounds the cost of long runs."""
SOLVED = 0.9
"""Success above which certainty and equal episodes are normal."""
METRICS = frozenset(
    {
        "success/mean",
        "reward/mean",
        "reward/spread",
        "heldout/success",
        "judged/mean",
        "groups/zero_variance",
        "entropy/mean",
        "surprise/mean",
        "replies/dependence",
        "replies/diversity",
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
        "staleness/mean",
        "episodes/usable",
        "episodes/error",
    }
)
"""Metrics that the rules read."""
METRICS_BY_TURN = ("entropy/turn_", "mismatch/turn_")
"""Prefixes of further metrics that the rules read."""


class Rows:
    """The part of the metric rows that rules need. Its size does not grow with the length of a run."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """The last steps, ascending."""
        self.names: list[str] = []
        """Metrics of the last step."""
        self.first: dict[str, list[float]] = {}
        """The first WINDOW values of each metric."""
        self._recent: dict[str, list[tuple[int, float]]] = {}
        """Last (step, value) pairs of each metric, numbers only. Rules read them many times."""

    def add(self, row: Mapping[str, Any]) -> None:
        # A run builds new strings at every step; interned, all rows share one.
        self.names = [sys.intern(name) for name in row if name in METRICS or name.startswith(METRICS_BY_TURN)]
        del self.steps[: 1 - 2 * MEMORY]
        self.steps.append(int(row["step"]))
        for name in self.names:
            if not is_number(row[name]):
                continue
            first, recent = self.first.setdefault(name, []), self._recent.setdefault(name, [])
            if len(first) < WINDOW:
                first.append(float(row[name]))
            del recent[: 1 - 2 * MEMORY]
            recent.append((self.steps[-1], float(row[name])))

    def last(self, name: str, count: int) -> list[tuple[int, float]]:
        """Return (step, value) of up to `count` recent rows with the metric, among the last 2 * `count` rows."""
        if name not in METRICS and not name.startswith(METRICS_BY_TURN):
            raise KeyError(f"METRICS lacks {name}")
        recent = self._recent.get(name, [])
        oldest = self.steps[max(0, len(self.steps) - 2 * count)]
        return recent[max(bisect_left(recent, (oldest,)), len(recent) - count) :]


@dataclass(frozen=True, slots=True)
class Symptom:
    """Result of a rule."""

    since: int
    """Step at which it began."""
    what: str
    """Observation with numbers: `entropy fell from 1.21 to 0.08`."""
    meaning: str
    remedy: str
    """Settings to try, as recipe keys."""

    @property
    def message(self) -> str:
        return f"{self.what} since step {self.since}: {self.meaning}; {self.remedy}"


Rule = Callable[[Rows], Symptom | None]


def entropy_collapse(rows: Rows) -> Symptom | None:
    """Detect entropy below a tenth of its start. Healthy runs settle at a quarter or more while there is still
    something to learn. Below a tenth nearly all episodes of a group are equal. The sampler's estimate counts too,
    because the learner's needs groups with an advantage. In self-play an opponent may bound success below 90%, so the
    rule is also silent while held-out success is near its best after a rise."""
    for name in ("entropy/mean", "surprise/mean"):
        now, start = _now(rows, name), _start(rows, name, max)
        if now is None or start is None or _solved(rows) or now >= 0.1 * start or _is_best(rows, "heldout/success"):
            continue
        return Symptom(
            _since_below(rows, name, 0.1 * start),
            f"entropy fell from {start:.2f} to {abs(now):.2g}",
            "the policy stopped exploring",
            "raise rl.entropy_coef or rl.kl_coef, or lower rl.optimizer.lr",
        )
    return None


def entropy_explosion(rows: Rows) -> Symptom | None:
    """Detect entropy, of all tokens or of one turn, at twice its start and half a nat above it. RL normally
    concentrates a policy. The entropy bonus or noise can make it more random until replies are nonsense."""
    for name in ("entropy/mean", *_turns(rows, "entropy")):
        now, start = _now(rows, name), _start(rows, name, median)
        if now is None or start is None or now <= max(2.0 * start, start + 0.5):
            continue
        limit = max(2.0 * start, start + 0.5)
        return Symptom(
            _since_above(rows, name, limit),
            f"entropy{_of_turn(name)} rose from {start:.2f} to {now:.2f}",
            "the policy becomes more random instead of more certain",
            "lower rl.entropy_coef or rl.optimizer.lr, or raise rl.kl_coef",
        )
    return None


def zero_advantage(rows: Rows) -> Symptom | None:
    """Detect that more than 90% of groups have equal rewards although the tasks are not solved. Healthy runs remain
    below 80% over a window. Above 90% the remaining groups differ mostly by luck."""
    now, success = _now(rows, "groups/zero_variance"), _now(rows, "success/mean")
    if now is None or now <= 0.9 or _solved(rows):
        return None
    never_succeeds = success is not None and success < 0.05 and not _rose(rows, "reward/mean")
    return Symptom(
        _since_above(rows, "groups/zero_variance", 0.9),
        f"{now:.0%} of groups have no advantage",
        "none of their episodes succeeds, so there is nothing to prefer"
        if never_succeeds
        else "all their episodes end alike, so there is nothing to prefer",
        "choose easier items, raise horizon.turns, or add a warm_start"
        if never_succeeds
        else "raise rl.group_size, agent.temperature or rl.resample_rounds",
    )


def repeated_actions(rows: Rows) -> Symptom | None:
    """Detect that 50% of replies repeat the one before, or 33% close a loop of two, while 70% of episodes fail. If
    repeating is right, as in walking, success is higher."""
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
                "lower rl.optimizer.lr, raise rl.kl_coef or agent.temperature, and read episodes with "
                "`agentgym-rl show`",
            )
    return None


def invalid_actions(rows: Rows) -> Symptom | None:
    """Detect that the environment refuses 60% of actions and most episodes fail. Healthy runs of small models reach 50%
    for a while when their horizon grows."""
    now = _now(rows, "actions/invalid_rate")
    if now is None or now <= 0.6 or (_now(rows, "success/mean") or 0.0) >= 0.5:
        return None
    return Symptom(
        _since_above(rows, "actions/invalid_rate", 0.6),
        f"{now:.0%} of actions are invalid",
        "the agent does not know, or has forgotten, the format or the possible actions",
        "add a warm_start on oracle episodes, raise rl.kl_coef, or check agent.style and agent.instruction",
    )


def horizon_truncation(rows: Rows) -> Symptom | None:
    """Detect that over LONG_WINDOW steps the horizon cut 95% of episodes, few succeeded and reward did not rise. The
    reward then lies beyond the horizon. In a short first stage of a schedule, by contrast, reward rises."""
    now = _now(rows, "truncated/horizon_rate", LONG_WINDOW)
    success = _now(rows, "success/mean", LONG_WINDOW)
    if now is None or now <= 0.95 or (success or 0.0) >= 0.1 or _rose(rows, "reward/mean", LONG_WINDOW):
        return None
    return Symptom(
        _since_above(rows, "truncated/horizon_rate", 0.95, LONG_WINDOW),
        f"{now:.0%} of episodes end at the horizon and hardly any succeeds",
        "the reward lies beyond the last turn allowed",
        "raise horizon.turns, or choose shorter tasks",
    )


def length_truncation(rows: Rows) -> Symptom | None:
    """Detect that 30% of episodes end because a reply was cut at max_new_tokens, so that its action is not taken."""
    now = _now(rows, "truncated/length_rate")
    if now is None or now <= 0.3:
        return None
    return Symptom(
        _since_above(rows, "truncated/length_rate", 0.3),
        f"{now:.0%} of episodes end with a reply cut at agent.max_new_tokens",
        "their last action is never taken, so the reward does not reflect it",
        'raise agent.max_new_tokens, or set rl.overlong = "penalty"',
    )


def context_truncation(rows: Rows) -> Symptom | None:
    """Detect that 30% of episodes run out of max_context."""
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
    """Detect replies twice as long as at the start (and at least 4 tokens longer) while success has not risen.
    Reasoning that grows along with success is fine."""
    now, start = _now(rows, "tokens/per_reply"), _start(rows, "tokens/per_reply", median)
    if now is None or start is None or now <= max(2.0 * start, start + 4.0) or _rose(rows, "success/mean"):
        return None
    limit = max(2.0 * start, start + 4.0)
    return Symptom(
        _since_above(rows, "tokens/per_reply", limit),
        f"replies grew from {start:.0f} to {now:.0f} tokens while success did not rise",
        "the policy learns length, not the task",
        'set rl.aggregate = "constant" or rl.overlong = "penalty", lower agent.max_new_tokens, or check the reward',
    )


def length_collapse(rows: Rows) -> Symptom | None:
    """Detect replies below 0.4 of their length at the start while success has not risen. The start must be at least 8
    tokens, which is enough for some reasoning before the action."""
    now, start = _now(rows, "tokens/per_reply"), _start(rows, "tokens/per_reply", max)
    if now is None or start is None or start < 8.0 or now >= 0.4 * start or _rose(rows, "success/mean"):
        return None
    return Symptom(
        _since_below(rows, "tokens/per_reply", 0.4 * start),
        f"replies shrank from {start:.0f} to {now:.1f} tokens while success did not rise",
        "the policy drops the reasoning before the action",
        'raise rl.kl_coef, lower rl.optimizer.lr, or set rl.aggregate = "token"',
    )


def sampler_mismatch(rows: Rows) -> Symptom | None:
    """Detect that sampler and learner differ by 0.1 nats per token, or by a KL of 0.02. The native engine in float32
    agrees to 1e-6, engines in bfloat16 to about 0.02. A larger difference biases every gradient, so the rule fires
    after three steps of which two are above the limit: short replies have so few tokens that one step may differ by
    chance. Tokens that are n updates old may differ 1 + n times as much, and the KL by its square: asynchronous runs
    stay below that (results/asynchronous)."""
    age = _now(rows, "staleness/mean", 3) or 0.0
    for name, limit in (("mismatch/abs", 0.1 * (1 + age)), ("mismatch/kl", 0.02 * (1 + age) ** 2)):
        now = _now(rows, name, 3)
        if now is not None and now > limit and median(value for _, value in rows.last(name, 3)) > limit:
            return Symptom(
                _since_above(rows, name, limit, 3),
                f"sampler and learner disagree by {now:.2g} ({name})",
                "the trained policy is not the one that plays",
                _why_mismatch(age),
            )
    return None


def _why_mismatch(age: float) -> str:
    if age > 0:
        return (
            f"sampled tokens are {age:.1f} updates old on average: lower rl.max_staleness or the learning rate, set "
            'rl.overlap = 0, and keep rl.importance = "token"'
        )
    return (
        "check that the engine uses the same agent.temperature, model.dtype and weights, and keep "
        'rl.importance = "token"'
    )


def mismatch_over_turns(rows: Rows) -> Symptom | None:
    """Detect that the last turn's mismatch is five times the first's and above 0.02. The inputs of sampler and learner
    then diverge over an episode: history is re-tokenised, or a cache is stale."""
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
    """Detect a KL of more than one nat per token to the reference. Small models from scratch settle near 0.5, large
    ones below 0.1. The rule uses a median, because k3 has a heavy tail."""
    recent = [value for _, value in rows.last("kl/reference", WINDOW)]
    if len(recent) < WINDOW or median(recent) <= 1.0:
        return None
    return Symptom(
        _since_above(rows, "kl/reference", 1.0),
        f"KL to the reference is {median(recent):.2g} per token",
        "the policy is far from its starting point",
        "raise rl.kl_coef or set rl.kl_target, or lower rl.optimizer.lr",
    )


def gradient_spikes(rows: Rows) -> Symptom | None:
    """Detect that three of the last five gradient norms are ten times the median of those before. A single spike is
    normal, and clipped."""
    series = [pair for pair in rows.last("grad/norm", MEMORY) if pair[1] > 0.0]
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
    """Detect a gradient that was not finite in the last WINDOW steps, which never happens in a healthy run."""
    skipped = [(step, value) for step, value in rows.last("skipped", WINDOW) if value > 0.0]
    if not skipped:
        return None
    return Symptom(
        skipped[0][0],
        f"{fmean(value for _, value in skipped):.0%} of a step's updates were skipped",
        "the gradient was not finite",
        'lower rl.optimizer.lr, or use model.dtype = "float32"',
    )


def success_collapse(rows: Rows) -> Symptom | None:
    """Detect success below half of its best window, if that was at least 20%, by more than eight standard errors. In
    runs of 250 steps of pure noise, the best and the worst window were up to six standard errors apart. Small batches
    of diverse tasks need the longer window."""
    for window in (WINDOW, LONG_WINDOW):
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
            "the policy loses what it has learned",
            "go back to an earlier checkpoint with a lower rl.optimizer.lr or a higher rl.kl_coef",
        )
    return None


def reward_hacking(rows: Rows) -> Symptom | None:
    """Detect judged reward that rose since the window with the best success while success fell by a quarter, both by
    more than six standard errors. The environment's success is what the judge was meant to help with."""
    for window in (WINDOW, LONG_WINDOW):
        success = _window_means(rows, "success/mean", window)
        judged = dict(_window_means(rows, "judged/mean", window))
        if not success or not judged:
            return None
        (best_step, best), (now_step, now) = max(success, key=lambda pair: pair[1]), success[-1]
        if best_step not in judged or now_step not in judged:
            continue
        fall, rise = best - now, judged[now_step] - judged[best_step]
        errors = {name: 6.0 * _noise(rows, name) / math.sqrt(window) for name in ("success/mean", "judged/mean")}
        if best < 0.05 or fall <= max(0.25 * best, errors["success/mean"]) or rise <= max(1e-6, errors["judged/mean"]):
            continue
        return Symptom(
            _since_below(rows, "success/mean", 0.75 * best, window),
            f"judged reward rose from {judged[best_step]:.2f} to {judged[now_step]:.2f} while success fell from "
            f"{best:.0%} to {now:.0%}",
            "the agent learns to please the judge, not to solve the task",
            "read episodes and verdicts in the viewer, lower the weight in [[rewards]], raise that of kind = "
            '"environment" or rl.kl_coef, or change the rubric and try it with `agentgym-rl rescore`',
        )
    return None


def template_collapse(rows: Rows) -> Symptom | None:
    """Detect that replies depend on their inputs a quarter as much as in the best window. The best must be at least
    0.3, above the noise of small batches. If one reply is right for every task, the tasks are solved and the rule is
    silent."""
    means = _window_means(rows, "replies/dependence")
    if not means or _solved(rows):
        return None
    best, now = max(value for _, value in means), means[-1][1]
    if best < 0.3 or now >= 0.25 * best:
        return None
    return Symptom(
        _since_below(rows, "replies/dependence", 0.25 * best),
        f"the dependence of replies on their inputs fell from {best:.2f} to {max(0.0, now):.2f}",
        "the agent gives the same reply to every observation",
        "raise rl.kl_coef or rl.entropy_coef, lower rl.optimizer.lr, or check whether one fixed reply is rewarded",
    )


def echo_trap(rows: Rows) -> Symptom | None:
    """Detect that the spread of rewards within groups and the diversity of replies are both below a third of their best
    windows. Episodes then echo each other and groups teach nothing. A policy that converges on a solution does so too,
    so the rule is silent while success or reward, in self-play held-out success, is near its best after a rise. RAGEN:
    arXiv 2504.20073."""
    spreads, diversities = _window_means(rows, "reward/spread"), _window_means(rows, "replies/diversity")
    if not spreads or not diversities or _solved(rows):
        return None
    progress = ("heldout/success",) if "heldout/success" in rows.names else ("success/mean", "reward/mean")
    if any(_is_best(rows, name) for name in progress):
        return None
    spread, diversity = (max(value for _, value in means) for means in (spreads, diversities))
    spread_now, diversity_now = spreads[-1][1], diversities[-1][1]
    if spread < 0.02 or diversity < 0.05 or spread_now >= spread / 3 or diversity_now >= diversity / 3:
        return None
    return Symptom(
        max(_since_below(rows, "reward/spread", spread / 3), _since_below(rows, "replies/diversity", diversity / 3)),
        f"the spread of rewards within groups fell from {spread:.2f} to {spread_now:.2g} and the diversity of replies "
        f"from {diversity:.2f} to {max(0.0, diversity_now):.2g}",
        "the echo trap: the episodes of a group repeat each other, so there is nothing to prefer",
        "go back to an earlier checkpoint, set rl.keep_groups = 0.25, raise rl.kl_coef or rl.clip_high, or lower "
        "rl.optimizer.lr",
    )


def clipping(rows: Rows) -> Symptom | None:
    """Detect that 20% of tokens are clipped and lose their gradient. Healthy runs remain below 10%."""
    now = _now(rows, "clip/fraction")
    if now is None or now <= 0.2:
        return None
    return Symptom(
        _since_above(rows, "clip/fraction", 0.2),
        f"{now:.0%} of tokens are clipped",
        "the policy moves too far from its samples within one step",
        "lower rl.optimizer.lr, rl.epochs or rl.minibatches, or raise rl.clip_high",
    )


def episode_errors(rows: Rows) -> Symptom | None:
    """Detect that 20% of attempts fail. Failures are not trained on, so the tasks that fail are under-represented."""
    recent = rows.last("episodes/error", WINDOW)
    usable = rows.last("episodes/usable", WINDOW)
    errors, attempts = sum(v for _, v in recent), sum(v for _, v in recent) + sum(v for _, v in usable)
    if len(recent) < WINDOW or errors <= 0.2 * attempts:
        return None
    return Symptom(
        next(step for step, value in recent if value > 0.0),
        f"{errors / attempts:.0%} of episodes fail",
        "they are not trained on, so the situations that make them fail are never learned",
        "read `error` in the trajectories; raise agent.step_timeout_s, or lower agent.concurrency",
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
    "reward_hacking": ("severe", reward_hacking),
    "template_collapse": ("severe", template_collapse),
    "echo_trap": ("severe", echo_trap),
    "clipping": ("warning", clipping),
    "episode_errors": ("warning", episode_errors),
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _now(rows: Rows, name: str, window: int = WINDOW) -> float | None:
    """Return the mean over the last window, or None if there are too few values."""
    recent = rows.last(name, window)
    return fmean(value for _, value in recent) if len(recent) == window else None


def _start(rows: Rows, name: str, statistic: Callable[[list[float]], float]) -> float | None:
    """Return a statistic of the first WINDOW values, or None if there are too few."""
    first = rows.first.get(name, [])
    return statistic(first) if len(first) == WINDOW else None


def _window_means(rows: Rows, name: str, window: int = WINDOW) -> list[tuple[int, float]]:
    """Return (first step, mean) of every window in memory, oldest first."""
    series = rows.last(name, MEMORY)
    # Prefix sums, because windows overlap and this dominates the cost of a step's check.
    sums = [0.0, *accumulate(value for _, value in series)]
    return [(series[i][0], (sums[i + window] - sums[i]) / window) for i in range(len(series) - window + 1)]


def _noise(rows: Rows, name: str) -> float:
    """Return the standard deviation of a step, from differences between neighbours, which hide a trend or one fall."""
    values = [value for _, value in rows.last(name, MEMORY)]
    jumps = [(after - before) ** 2 for before, after in pairwise(values)]
    return math.sqrt(fmean(jumps) / 2) if jumps else 0.0


def _since_above(rows: Rows, name: str, limit: float, window: int = WINDOW) -> int:
    """Return the first step of the unbroken series of windows above `limit` that lasts until now."""
    return _since(rows, [(step, mean > limit) for step, mean in _window_means(rows, name, window)])


def _since_below(rows: Rows, name: str, limit: float, window: int = WINDOW) -> int:
    return _since(rows, [(step, mean < limit) for step, mean in _window_means(rows, name, window)])


def _since(rows: Rows, windows: list[tuple[int, bool]]) -> int:
    since = rows.steps[-1]
    for step, beyond_limit in reversed(windows):
        if not beyond_limit:
            break
        since = step
    return since


def _rose(rows: Rows, name: str, window: int = WINDOW) -> bool:
    """Return whether a metric rose by more than 0.05 and by more than a tenth of its start."""
    now, start = _now(rows, name, window), _start(rows, name, fmean)
    return now is not None and start is not None and now - start > max(0.05, 0.1 * abs(start))


def _is_best(rows: Rows, name: str) -> bool:
    """Return whether a metric is above nine tenths of its best window, after a rise."""
    means = [value for _, value in _window_means(rows, name)]
    return _rose(rows, name) and means[-1] >= 0.9 * max(means)


def _solved(rows: Rows) -> bool:
    success = "heldout/success" if "heldout/success" in rows.names else "success/mean"
    return (_now(rows, success) or 0.0) >= SOLVED


def _turns(rows: Rows, signal: str) -> list[str]:
    """Return names such as entropy/turn_3 in the last row, in order of turns."""
    names = [name for name in rows.names if name.startswith(f"{signal}/turn_")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2].rstrip("+")))


def _of_turn(name: str) -> str:
    turn = name.partition("turn_")[2]
    return f" in turn {turn.rstrip('+')}{' and later' if turn.endswith('+') else ''}" if turn else ""
