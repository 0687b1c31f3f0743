"""The report of a search: one line for each decision, and no line over the width."""

import pytest

from torchproof.machine.environment import read_environment
from torchproof.render import proof as render
from torchproof.types import (
    SCHEMA,
    Candidate,
    Choice,
    Comparison,
    Decision,
    GoldenError,
    GoldenSummary,
    InputSpec,
    Limits,
    Measurement,
    OutputSpec,
    Plan,
    Precision,
    Proof,
    Rejected,
    Signature,
    Target,
    Throughput,
    Tolerance,
    Traffic,
    Trial,
    Verdict,
)

PATH = "/home/somebody/projects/embeddings/bundles/" + "a-long-name-" * 6 + "minilm.tp"
ERROR = "torch._dynamo.exc.Unsupported: " + "could not export the call to a function of the model's own, " * 9


def compared(
    candidate: str, ratio: float, verdict: Verdict = "better", baseline: str = "eager, 1 thread"
) -> Comparison:
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        ratio=ratio,
        low=ratio * 0.95,
        high=ratio * 1.06,
        num_pairs=16,
        verdict=verdict,
    )


def measured(
    runtime: str,
    ratio: float | None,
    cos: float | None = 1.0,
    *,
    precision: Precision = "float32",
    threads: int = 1,
    batched: bool = True,
) -> Trial:
    candidate = Candidate(runtime=runtime, precision=precision, num_threads=threads)
    rate = Measurement(quantity="q", unit="rps", samples=(), estimate=1234.5, low=1201.0, high=1250.0)
    return Trial(
        candidate=candidate,
        outcome="measured",
        golden=GoldenError(output="embedding", cos=cos, max_abs=0.1, max_rel=0.1) if threads else None,
        latency=Measurement(quantity="q", unit="s", samples=(), estimate=0.0000213),
        comparison=compared(candidate.label, ratio) if ratio is not None else None,
        throughput=(Throughput(batch_size=32, rps=rate),) if batched else (),
        cold_start_s=85.0,
        peak_memory_bytes=512 << 20,
    )


TRIALS = (
    measured("eager", 0.92, threads=0, batched=False),
    measured("eager", None),
    measured("torchscript", 1.21, 0.99987),
    measured("onnxruntime", 1.9, 0.98123, precision="int8", threads=16),
    measured("inductor", 1.8, None),
    Trial(candidate=Candidate(runtime="aotinductor"), outcome="not built", reason=ERROR),
    Trial(
        candidate=Candidate(runtime="eager", precision="bfloat16"),
        outcome="skipped",
        reason="this CPU has no bf16 arithmetic",
    ),
)


def make(*, sizes: bool = True, padding: bool = True, batching: bool = True, speedup: bool = True) -> Proof:
    reasons = ("1.90x [1.81, 2.01], but cos 0.9812 < 0.999 on embedding", ERROR)
    runtime = Decision(
        knob="runtime",
        value="torchscript, 1 thread",
        reason="1.21x [1.15, 1.28]",
        rejected=tuple(
            Rejected(value=value, reason=reason)
            for value, reason in zip(("onnxruntime int8, 16 threads", "aotinductor, 1 thread"), reasons, strict=True)
        ),
    )
    rates = "; ".join(f"{size}: {100 * size:.3g} requests/s" for size in (1, 8, 32)) + "; " + PATH
    return Proof(
        schema=SCHEMA,
        torchproof="0.1.0",
        created="2030-01-01T00:00:00+00:00",
        target=Target(reference="examples/minilm.py:MiniLM", kind="python", path="/examples/minilm.py", name="MiniLM"),
        signature=Signature(
            inputs=(InputSpec(name="ids", dtype="int64", shape=("length",)),),
            outputs=(OutputSpec(name="embedding", dtype="float32", shape=(384,)),),
            call="keyword",
            output_kind="tensor",
        ),
        traffic=Traffic(
            source="requests.jsonl",
            num_requests=400,
            sizes={"length": (3, 9, 21, 210), "other_length": (1, 2, 3)} if sizes else {},
        ),
        environment=read_environment(),
        limits=Limits(),
        tolerance=Tolerance(),
        golden=GoldenSummary(num_rows=32, precision="float64"),
        batching=batching,
        padding=padding,
        baseline="eager, default threads",
        reference="eager, 1 thread",
        speedup=compared("torchscript, 1 thread", 1.31, baseline="eager, default threads") if speedup else None,
        plan=Plan(
            chosen=Choice(
                candidate=Candidate(runtime="torchscript"), max_batch_size=8, padding=True, artifact="artifacts/t"
            ),
            runners_up=(),
            decisions=(runtime, Decision(knob="max_batch_size", value="8", reason=rates)),
            holds_while={},
        ),
        trials=TRIALS,
        findings=(),
        search_s=119.0,
    )


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_asked_but_for_paths(width: int) -> None:
    said = render.text(make(), PATH, width)
    too_wide = [line for line in said.splitlines() if len(line) > width]
    assert all(PATH in line for line in too_wide), too_wide
    assert said.count(PATH) == 3, "a path is never broken: it is there to be copied"


def test_at_120_columns_there_is_every_number() -> None:
    lines = render.table(make(), 120).splitlines()
    assert [cell.strip() for cell in lines[0].split("  ") if cell] == [
        "candidate", "against eager, 1 thread", "p50", "req/s at batch", "error", "start", "memory",
    ]  # fmt: skip
    row = next(line for line in lines if line.startswith("torchscript"))
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        "torchscript, 1 thread", "1.21x [1.15, 1.28]", "0.0213 ms", "1,230 at 32", "cos 0.99987", "85.0 s",
        "512 MiB",
    ]  # fmt: skip


def test_at_80_columns_what_the_choice_rests_on_stays() -> None:
    """The ratio and the error; the columns stay in line."""
    lines = render.table(make(), 80).splitlines()
    assert "against eager, 1 thread" in lines[0]
    column = lines[0].index("error")
    assert [line[column:] for line in lines[2:6]] == ["cos 1", "cos 0.99987", "cos 0.981", "not finite"]


def test_the_baseline_is_marked_and_the_reference_is_1() -> None:
    lines = render.table(make(), 120).splitlines()
    assert lines[1].startswith("eager, default threads (baseline)  0.92x")
    assert lines[2].split()[:4] == ["eager,", "1", "thread", "1"]


@pytest.mark.parametrize("width", [80, 120])
def test_what_was_not_measured_is_a_line_with_its_reason(width: int) -> None:
    """A long error is cut; the stored proof has all of it."""
    said = " ".join(render.table(make(), width).split())
    assert "eager bfloat16, 1 thread: skipped: this CPU has no bf16 arithmetic" in said
    assert "aotinductor, 1 thread: not built: torch._dynamo.exc.Unsupported: could not export" in said
    assert said.count("could not export") == 3


def test_what_was_chosen_and_why_a_faster_one_lost() -> None:
    said = " ".join(render.text(make(), "minilm.tp", 120).split())
    assert (
        "torchscript, 1 thread: 1.31x [1.24, 1.39] the speed of eager, default threads, as it is served today (better)"
        in said
    )
    assert "runtime: torchscript, 1 thread 1.21x [1.15, 1.28]" in said
    assert "not onnxruntime int8, 16 threads: 1.90x [1.81, 2.01], but cos 0.9812 < 0.999 on embedding" in said
    assert "wrote minilm.tp (32 golden rows, float64 reference; search took 119 s)" in said
    assert said.endswith("next: torchproof serve minilm.tp")


def test_without_a_speedup_none_is_claimed() -> None:
    assert "as it is served today" not in render.text(make(speedup=False), "minilm.tp", 120)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "(length 3 to 210, median 21; other_length 1 to 3, median 2); rows may share a batch, padding is safe"),
        ({"padding": False}, "median 2); rows may share a batch, no padding"),
        ({"padding": False, "sizes": False}, "requests.jsonl; rows may share a batch"),
        ({"padding": False, "batching": False, "sizes": False}, "requests.jsonl; one request at a time"),
    ],
)
def test_the_first_line_says_what_was_measured(options: dict[str, bool], end: str) -> None:
    first = " ".join(render.text(make(**options), "minilm.tp", 200).split("\n\n")[0].split())
    assert first.startswith("examples/minilm.py:MiniLM: 400 requests from requests.jsonl")
    assert first.replace(", other_length", "; other_length").endswith(end)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (1 - 1e-9, "1"),
        (0.99987, "0.99987"),
        (0.9999951, "0.9999951"),
        (0.99996, "0.999960"),
        (0.99, "0.9900"),
        (0.9989999, "0.9989"),  # a candidate that missed 0.999 must not read as one that met it
        (0.98123, "0.981"),
        (0.5, "0.50"),
        (0.0, "0.00"),
        (-0.5, "-0.50"),
    ],
)
def test_a_cosine_is_given_to_two_digits_after_its_nines_and_never_rounded_up(value: float, text: str) -> None:
    assert render._cos(value) == text
