"""From rows to a plan: pure functions, recomputable from a stored proof."""

import math
from collections.abc import Callable, Mapping, Sequence

from torchproof.stats import MARGIN
from torchproof.target.golden import value_of, within
from torchproof.types import Candidate, Decision, Limits, Rejected, Tolerance, Trial

# A larger batch has to bring this much more throughput: below it, only latency grows.
BATCH_GAIN = 1.05

Separated = Callable[[Trial, Trial], bool]  # is the first proven faster than the second, when measured head to head?


def failed_tolerance(trial: Trial, tolerance: Tolerance) -> str:
    """Why the golden set excludes a measured trial; empty when it doesn't."""
    if trial.golden is None or within(trial.golden, tolerance):
        return ""
    value = value_of(trial.golden, tolerance)
    if math.isnan(value):
        return f"output {trial.golden.output} is not finite where it should be"
    sign = "<" if tolerance.metric == "cos" else ">"
    return f"{tolerance.metric} {_apart(value, sign, tolerance.bound, 4)} on {trial.golden.output}"


def broken_limits(trial: Trial, limits: Limits) -> list[str]:
    """The limits that exclude a measured trial, each with both numbers."""
    broken = []
    if limits.p99_s is not None and trial.p99 is not None and trial.p99.estimate > limits.p99_s:
        broken.append(f"p99 {_apart(trial.p99.estimate * 1e3, '>', limits.p99_s * 1e3, 3, ' ms')}")
    peak = trial.peak_memory_bytes
    if limits.max_memory_bytes is not None and peak is not None and peak > limits.max_memory_bytes:
        broken.append(f"memory {peak / 2**20:.0f} MiB > {limits.max_memory_bytes / 2**20:.0f} MiB")
    cold = trial.cold_start_s
    if limits.max_cold_start_s is not None and cold is not None and cold > limits.max_cold_start_s:
        broken.append(f"cold start {_apart(cold, '>', limits.max_cold_start_s, 3, ' s')}")
    return broken


def _apart(value: float, sign: str, bound: float, digits: int, unit: str = "") -> str:
    """``0.9989 < 0.999``: with as many digits as it takes to see that it is so."""
    while digits < 17 and f"{value:.{digits}g}" == f"{bound:.{digits}g}":
        digits += 1
    return f"{value:.{digits}g}{unit} {sign} {bound:.{digits}g}{unit}"


def eligible(trials: Sequence[Trial], tolerance: Tolerance, limits: Limits) -> list[Trial]:
    """The trials that may be served, fastest first."""
    fit = [
        t
        for t in trials
        if t.outcome == "measured"
        and t.golden is not None
        and not failed_tolerance(t, tolerance)
        and not broken_limits(t, limits)
    ]
    return sorted(fit, key=lambda t: -_interval(t)[0])


def exclusions(trials: Sequence[Trial], tolerance: Tolerance, limits: Limits) -> list[str]:
    """For each trial, what excluded it: where none may be served."""
    reasons = []
    for trial in trials:
        why = "; ".join(filter(None, [failed_tolerance(trial, tolerance), *broken_limits(trial, limits)]))
        reasons.append(f"{trial.candidate.label}: {why or f'{trial.outcome}: {trial.reason}'}")
    return reasons


def choose(ranked: Sequence[Trial], simplicity: Callable[[Candidate], tuple[int, ...]], separated: Separated) -> Trial:
    """The fastest; where a simpler one can't be told apart from it, the simpler one, unless any other is proven faster.

    Args:
        ranked: eligible trials, fastest first; not empty.
        simplicity: sort key, the simplest smallest.
        separated: measures two head to head; asked only where their intervals against the reference are not apart by
            ``MARGIN``.
    """
    leader = ranked[0]
    for trial in sorted(ranked[1:], key=lambda t: simplicity(t.candidate)):
        simpler = simplicity(trial.candidate) < simplicity(leader.candidate)
        # By any, not the leader alone: a leader of a wide interval would give way to what others are proven to beat.
        beaten = any(_apart_by_margin(other, trial) for other in ranked)
        if simpler and not beaten and not separated(leader, trial):
            leader = trial
            break  # candidates are tried from the simplest: whatever comes next is no simpler
    return leader


def best_batch_size(trial: Trial) -> int:
    """The smallest batch size after which more brings less than ``BATCH_GAIN``."""
    best, rate = 1, 0.0
    for point in trial.throughput:
        if point.rps.estimate > rate * BATCH_GAIN:
            best, rate = point.batch_size, point.rps.estimate
    return best


def runners_up(ranked: Sequence[Trial], chosen: Trial, num: int) -> list[Trial]:
    """What to fall back to: the fastest of each other runtime and precision, and at the end plain eager."""
    taken = {_variant(chosen)}
    others: list[Trial] = []
    for trial in ranked:
        if _variant(trial) not in taken:
            taken.add(_variant(trial))
            others.append(trial)
    plain = [t for t in others if _variant(t) == ("eager", "float32")]
    rest = [t for t in others if t not in plain]
    return [*rest[:num], *plain]


def runtime_decision(
    chosen: Trial, trials: Sequence[Trial], tolerance: Tolerance, limits: Limits, ties: Mapping[str, str]
) -> Decision:
    """The runtime, and for each other candidate why it lost.

    Args:
        ties: why a faster one was passed over for a simpler one, by label.
    """
    rejected = []
    for trial in trials:
        label = trial.candidate.label
        if label == chosen.candidate.label or (trial.golden is None and trial.outcome == "measured"):
            continue
        rejected.append(Rejected(value=label, reason=ties.get(label) or why_not(trial, tolerance, limits)))
    reason = "; ".join(filter(None, [speed(chosen), unproven_p99(chosen, limits)]))
    return Decision(knob="runtime", value=chosen.candidate.label, reason=reason, rejected=tuple(rejected))


def unproven_p99(trial: Trial, limits: Limits) -> str:
    """What the p99's interval leaves open; empty when it lies below the limit, or there is none."""
    p99, limit = trial.p99, limits.p99_s
    if limit is None or p99 is None or (p99.high is not None and p99.high <= limit):
        return ""
    high = f"up to {p99.high * 1e3:.3g} ms" if p99.high is not None else "without an upper bound"
    return f"{p99.quantity} {p99.estimate * 1e3:.3g} ms, {high}: undecided against {limit * 1e3:.3g} ms"


def why_not(trial: Trial, tolerance: Tolerance, limits: Limits) -> str:
    """Why a trial was not chosen, in a few words."""
    if trial.outcome != "measured":
        return f"{trial.outcome}: {trial.reason}"
    wrong = failed_tolerance(trial, tolerance)
    if wrong:
        return f"{speed(trial)}, but {wrong}"
    over = broken_limits(trial, limits)
    if over:
        return f"{speed(trial)}, but {'; '.join(over)}"
    return speed(trial)


def speed(trial: Trial) -> str:
    """``1.90x [1.84, 1.97]``, against the reference."""
    c = trial.comparison
    return f"{c.ratio:.2f}x [{c.low:.2f}, {c.high:.2f}]" if c is not None else "1x, the reference"


def _variant(trial: Trial) -> tuple[str, str]:
    return trial.candidate.runtime, trial.candidate.precision


def _interval(trial: Trial) -> tuple[float, float, float]:
    """Ratio, low, high against the reference, which is 1 to itself."""
    c = trial.comparison
    return (c.ratio, c.low, c.high) if c is not None else (1.0, 1.0, 1.0)


def _apart_by_margin(faster: Trial, slower: Trial) -> bool:
    """Whether every value of the one's interval is more than the margin above every value of the other's."""
    return _interval(faster)[1] > _interval(slower)[2] * (1 + MARGIN)
