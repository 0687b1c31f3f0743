"""The sequence of seeds, with trainings that are drawn instead of run and a clock that they move."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from torchproof.errors import RefusedError, TargetError, TrialError
from torchproof.stats.equivalence import SEED_LOOKS
from torchproof.tune.precision.choose import choose
from torchproof.tune.precision.compare import _findings
from torchproof.tune.precision.seeds import Arm, Seeds
from torchproof.tune.precision.verdicts import compare, ratio, spread
from torchproof.types import Target
from torchproof.types.precision import MetricComparison, PrecisionCandidate, ScalerSeen, SeedRun

TARGET = Target(reference="recipe.py", kind="python", path="/recipe.py")
MARGIN = 0.005
Metrics = dict[str, float | None]


def run(seed: int, metrics: Metrics, **changes: Any) -> SeedRun:
    return SeedRun(
        **{
            "seed": seed,
            "metrics": metrics,
            "first_metrics": {"acc": 0.1},
            "num_steps": 100,
            "step_s": 0.01,
            "peak_bytes": 1000,
            "scaler": None,
            **changes,
        }
    )


def scaler(num_skipped: int, num_skipped_last: int) -> ScalerSeen:
    return ScalerSeen(
        target=TARGET.reference,
        run="16-mixed, seed 7",
        num_steps=100,
        num_skipped=num_skipped,
        num_skipped_last=num_skipped_last,
        first_scale=65536.0,
        last_scale=65536.0 / 2**num_skipped,
    )


class Drawn:
    """Trainings of 10 s whose accuracy is drawn: equal seeds share most of it."""

    def __init__(self, shift: dict[str, float] | None = None, sd: float = 0.002) -> None:
        self.shift, self.sd = shift or {}, sd
        self.now = 0.0
        self.order: list[tuple[int, str]] = []
        self.fail: dict[tuple[str, int], Exception] = {}
        self.metrics: dict[tuple[str, int], Metrics] = {}
        self.changes: dict[str, Any] = {}

    def __call__(self, arm: Arm, seed: int) -> SeedRun:
        self.order.append((seed, arm.precision))
        self.now += 10.0
        if error := self.fail.get((arm.precision, seed)):
            raise error
        own = random.Random(f"{arm.precision} {seed}").gauss(self.shift.get(arm.precision, 0.0), self.sd)
        acc = 0.9 + random.Random(seed).gauss(0, 0.01) + (own if arm.precision != "32-true" else 0.0)
        changes = self.changes if arm.precision == "16-mixed" else {}
        speed = {"32-true": 0.02, "bf16-mixed": 0.012, "16-mixed": 0.01}[arm.precision]
        found = self.metrics.get((arm.precision, seed), {"acc": acc})
        return run(seed, found, **{"step_s": speed, **changes})


def sequence(drawn: Drawn, *, budget_s: float = 1e6, margins: dict[str, float] | None = None) -> Seeds:
    return Seeds(
        train=drawn,
        baseline=Arm("32-true"),
        candidates=[Arm("bf16-mixed"), Arm("16-mixed")],
        margins={"acc": MARGIN} if margins is None else margins,
        first_seed=7,
        budget_s=budget_s,
        say=lambda text, share: None,
        clock=lambda: drawn.now,
    )


def candidates(seeds: Seeds) -> list[PrecisionCandidate]:
    better = spread("acc", seeds.baseline.runs).better
    margin = seeds.margins.get("acc")
    return [
        PrecisionCandidate(
            precision=arm.precision,
            fp32_modules=(),
            comparisons=(compare("acc", seeds.baseline.runs, arm.runs, margin, better).comparison,),
            step_time=ratio(seeds.baseline.runs, arm.runs, lambda run: run.step_s),
            memory=None,
            runs=tuple(arm.runs),
            ended=arm.ended,
            verdict="",
        )
        for arm in seeds.candidates
    ]


def verdicts(seeds: Seeds) -> dict[str, str]:
    return {c.precision: c.comparisons[0].verdict for c in candidates(seeds)}


def test_equal_precisions_are_settled_at_the_first_look_and_the_faster_is_chosen() -> None:
    drawn = Drawn(sd=0.001)
    seeds = sequence(drawn)
    assert seeds.run() == "it was settled"
    assert [run.seed for run in seeds.baseline.runs] == list(range(7, 13))
    assert verdicts(seeds) == {"bf16-mixed": "equivalent", "16-mixed": "equivalent"}
    chosen, judged = choose(candidates(seeds))
    assert chosen is not None
    assert chosen.precision == "16-mixed"
    assert [c.verdict for c in judged] == ["16-mixed is faster", "chosen"]


def test_each_precision_is_first_in_turn() -> None:
    drawn = Drawn(sd=0.001)
    sequence(drawn).run()
    firsts = [next(precision for seed, precision in drawn.order if seed == number) for number in range(7, 13)]
    assert firsts == ["32-true", "bf16-mixed", "16-mixed"] * 2


def test_a_shift_beyond_the_margin_ends_the_candidate_and_the_other_goes_on() -> None:
    drawn = Drawn({"16-mixed": -0.04}, sd=0.008)
    seeds = sequence(drawn)
    seeds.run()
    bf16, fp16 = seeds.candidates
    assert len(fp16.runs) < len(bf16.runs) == len(seeds.baseline.runs)
    assert verdicts(seeds) == {"bf16-mixed": "equivalent", "16-mixed": "different"}
    chosen, judged = choose(candidates(seeds))
    assert chosen is not None
    assert chosen.precision == "bf16-mixed"
    assert "acc is different: worse" in judged[1].verdict
    findings = _findings(TARGET, None, [spread("acc", seeds.baseline.runs)], candidates(seeds))
    assert [(finding.code, finding.where) for finding in findings] == [("TP604", "recipe.py (16-mixed)")]


def test_a_shift_for_the_better_may_be_chosen_and_is_no_finding() -> None:
    seeds = sequence(Drawn({"16-mixed": 0.02}, sd=0.001))
    seeds.run()
    fp16 = candidates(seeds)[1]
    assert (fp16.comparisons[0].verdict, fp16.comparisons[0].is_worse) == ("different", False)
    chosen, _ = choose(candidates(seeds))
    assert chosen is not None
    assert chosen.precision == "16-mixed"
    assert _findings(TARGET, None, [spread("acc", seeds.baseline.runs)], candidates(seeds)) == ()


def test_a_wide_spread_goes_to_the_last_look_and_keeps_the_baseline() -> None:
    seeds = sequence(Drawn(sd=0.05))
    assert seeds.run() == "48 seeds are the most that are trained"
    assert verdicts(seeds) == {"bf16-mixed": "undecided", "16-mixed": "undecided"}
    chosen, judged = choose(candidates(seeds))
    assert chosen is None
    more = judged[0].comparisons[0].num_more_seeds
    assert more is not None
    assert more > 48
    assert f"{more} more seeds would decide it" in judged[0].verdict


def test_the_budget_ends_it_and_says_how_many_more_seeds_would_decide() -> None:
    seeds = sequence(Drawn(sd=0.008), budget_s=6 * 30.0 + 100)
    assert seeds.run() == ("the next look, at 12 seeds, would have taken 3 min 0 s more, and the budget had 100 s left")
    assert len(seeds.baseline.runs) == 6  # seeds that nobody looks at are not trained
    comparison = candidates(seeds)[0].comparisons[0]
    assert comparison.verdict == "undecided"
    assert comparison.num_more_seeds is not None
    assert comparison.num_more_seeds + 6 in SEED_LOOKS or comparison.num_more_seeds + 6 > SEED_LOOKS[-1]


def test_before_the_first_look_nothing_is_judged() -> None:
    """Four equal seeds look equivalent, and are not called so."""
    seeds = sequence(Drawn(sd=1e-6), budget_s=45.0)
    seeds.run()
    assert len(seeds.baseline.runs) == 2
    assert verdicts(seeds) == {"bf16-mixed": "undecided", "16-mixed": "undecided"}


def test_a_budget_that_is_over_in_the_middle_of_a_seed_drops_that_seed() -> None:
    drawn = Drawn(sd=0.001)
    drawn.fail["32-true", 9] = TrialError("timed out", "no answer in 5 s")
    seeds = sequence(drawn)
    assert seeds.run() == "the budget was spent"
    assert [len(arm.runs) for arm in (seeds.baseline, *seeds.candidates)] == [2, 2, 2]


def test_without_a_margin_the_first_look_ends_it_undecided() -> None:
    seeds = sequence(Drawn(sd=0.001), margins={})
    assert seeds.run() == "no margin was given, so there is nothing to decide"
    assert len(seeds.baseline.runs) == SEED_LOOKS[0]
    assert verdicts(seeds) == {"bf16-mixed": "undecided", "16-mixed": "undecided"}
    chosen, judged = choose(candidates(seeds))
    assert chosen is None
    assert judged[0].verdict == "no margin was given"


def test_a_metric_that_is_not_finite_in_the_candidate_only_is_worse_with_its_first_seed() -> None:
    drawn = Drawn(sd=0.001)
    drawn.metrics["16-mixed", 9] = {"acc": None}
    seeds = sequence(drawn)
    seeds.run()
    bf16, fp16 = candidates(seeds)
    assert len(fp16.runs) == 3
    assert fp16.ended == "acc is not finite with seed 9"
    assert (fp16.comparisons[0].verdict, fp16.comparisons[0].is_worse) == ("different", True)
    assert fp16.comparisons[0].non_finite_seeds == (9,)
    assert bf16.comparisons[0].verdict == "equivalent"
    (finding,) = _findings(TARGET, None, [spread("acc", seeds.baseline.runs)], [bf16, fp16])
    assert (finding.code, finding.severity) == ("TP604", "error")


def test_a_metric_that_is_finite_nowhere_says_nothing_against_the_candidate() -> None:
    drawn = Drawn(sd=0.001)
    for precision in ("32-true", "16-mixed", "bf16-mixed"):
        drawn.metrics[precision, 9] = {"acc": None}
    seeds = sequence(drawn)
    seeds.run()
    (comparison,) = candidates(seeds)[1].comparisons
    assert comparison.verdict == "equivalent"
    assert comparison.differences[2] is None
    assert comparison.non_finite_seeds == ()


def test_a_metric_that_is_not_finite_in_float32_from_the_first_seed_on_is_refused() -> None:
    drawn = Drawn()
    drawn.metrics["32-true", 7] = {"acc": None}
    with pytest.raises(RefusedError, match="acc is not finite after training in 32-true with seed 7"):
        sequence(drawn).run()
    assert len(drawn.order) == 1


def test_a_scaler_that_skips_every_step_ends_the_candidate() -> None:
    drawn = Drawn(sd=0.001)
    drawn.changes = {"scaler": scaler(num_skipped=100, num_skipped_last=100)}
    seeds = sequence(drawn)
    seeds.run()
    bf16, fp16 = candidates(seeds)
    assert fp16.ended == "the scaler skipped all 100 steps of seed 7"
    assert len(fp16.runs) == 1
    assert [f.code for f in _findings(TARGET, None, [spread("acc", seeds.baseline.runs)], [bf16, fp16])] == ["TP603"]


def test_a_scaler_that_skips_the_first_steps_does_not() -> None:
    drawn = Drawn(sd=0.001)
    drawn.changes = {"scaler": scaler(num_skipped=15, num_skipped_last=0)}
    seeds = sequence(drawn)
    seeds.run()
    assert verdicts(seeds)["16-mixed"] == "equivalent"
    assert _findings(TARGET, None, [spread("acc", seeds.baseline.runs)], candidates(seeds)) == ()


def test_a_candidate_that_can_not_be_trained_is_out_and_the_baseline_is_an_error() -> None:
    drawn = Drawn(sd=0.001)
    drawn.fail["16-mixed", 7] = TrialError("crashed", "killed by SIGSEGV")
    seeds = sequence(drawn)
    assert seeds.run() == "it was settled"
    assert candidates(seeds)[1].ended == "seed 7 can't be trained: killed by SIGSEGV"
    chosen, judged = choose(candidates(seeds))
    assert chosen is not None
    assert chosen.precision == "bf16-mixed"
    assert judged[1].verdict == "seed 7 can't be trained: killed by SIGSEGV"

    drawn.fail = {("32-true", 8): TrialError("crashed", "killed by SIGSEGV")}
    with pytest.raises(RefusedError, match="can't be trained in 32-true with seed 8: killed by SIGSEGV"):
        sequence(drawn).run()
    drawn.fail = {("32-true", 7): TargetError("no", help="yes")}
    with pytest.raises(TargetError, match="no"):
        sequence(drawn).run()


def test_no_candidate_at_all_trains_nothing() -> None:
    drawn = Drawn()
    seeds = sequence(drawn)
    for arm in seeds.candidates:
        arm.ended = "its gradients are not finite at any scale"
    assert seeds.run() == "no candidate is left to train"
    assert drawn.order == []


# What is better, and what is chosen


@pytest.mark.parametrize(
    ("moves", "better"),
    [
        ([(0.1, 0.9), (0.2, 0.8)], "higher"),
        ([(2.3, 0.1)], "lower"),
        ([(0.5, 0.6), (0.5, 0.4)], "unknown"),
        ([], "unknown"),
    ],
)
def test_what_training_moves_a_metric_to_is_better(moves: list[tuple[float, float]], better: str) -> None:
    runs = [run(i, {"acc": last}, first_metrics={"acc": first}) for i, (first, last) in enumerate(moves)]
    assert spread("acc", runs).better == better


def comparison(**changes: Any) -> MetricComparison:
    return MetricComparison(
        **{
            "metric": "acc",
            "margin": MARGIN,
            "verdict": "equivalent",
            "is_worse": None,
            "differences": (0.0,) * 6,
            "num_seeds": 6,
            "estimate": 0.0,
            "low": -0.001,
            "high": 0.001,
            "non_finite_seeds": (),
            "num_more_seeds": None,
            "reason": "within 0.005",
            **changes,
        }
    )


def candidate(step_s: float = 0.5, *comparisons: MetricComparison, **changes: Any) -> PrecisionCandidate:
    baseline = [run(i, {}, step_s=1.0) for i in range(6)]
    runs = [run(i, {}, step_s=step_s) for i in range(6)]
    return PrecisionCandidate(
        **{
            "precision": "bf16-mixed",
            "fp32_modules": (),
            "comparisons": comparisons or (comparison(),),
            "step_time": ratio(baseline, runs, lambda run: run.step_s),
            "memory": None,
            "runs": tuple(runs),
            "ended": "",
            "verdict": "",
            **changes,
        }
    )


LOST = comparison(metric="nll", margin=None, verdict="different", is_worse=True, non_finite_seeds=(1,))
Case = Callable[[], PrecisionCandidate]
KEPT: dict[str, Case] = {
    "slower": lambda: candidate(1.1),
    "as fast": lambda: candidate(1.0),
    "one metric is undecided": lambda: candidate(0.5, comparison(), comparison(metric="nll", verdict="undecided")),
    "one metric is worse": lambda: candidate(0.5, comparison(verdict="different", is_worse=True)),
    "better is unknown": lambda: candidate(0.5, comparison(verdict="different")),
    "a metric without a margin is not finite": lambda: candidate(0.5, comparison(), LOST),
    "not trained": lambda: candidate(0.5, runs=(), ended="its gradients are not finite at any scale"),
}


@pytest.mark.parametrize("case", KEPT)
def test_the_baseline_is_kept(case: str) -> None:
    chosen, judged = choose([KEPT[case]()])
    assert chosen is None
    assert judged[0].verdict


def test_metrics_without_a_margin_do_not_count() -> None:
    chosen, _ = choose([candidate(0.5, comparison(), comparison(metric="nll", margin=None, verdict="undecided"))])
    assert chosen is not None
