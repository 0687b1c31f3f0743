"""The warm-up promises only what it ran: caps that the model answered, and costs that were measured or are no gain."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchproof.errors import UsageError
from torchproof.serve import warmup
from torchproof.serve.warmup import REPEATS, WarmUp, warm_up
from torchproof.target.rows import Batch, Row, eager
from torchproof.types import InputSpec, OutputSpec, Signature

TOKENS = Signature(
    inputs=(InputSpec("ids", "int64", ("length",)),),
    outputs=(OutputSpec("output", "float32", (4,)),),
    call="positional",
    output_kind="tensor",
)
IMAGES = Signature(
    inputs=(InputSpec("image", "float32", (1, "height", "width")),),
    outputs=(OutputSpec("output", "float32", (2,)),),
    call="positional",
    output_kind="tensor",
)
FIXED = Signature(
    inputs=(InputSpec("x", "float32", (3,)),),
    outputs=(OutputSpec("output", "float32", (2,)),),
    call="positional",
    output_kind="tensor",
)
GIB = 2**30


class Text(nn.Module):
    """Mean of embeddings with a table of positions, which ends."""

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.positions = nn.Embedding(num_positions, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.words(ids) + self.positions(torch.arange(ids.shape[1]))).mean(1)


class Conv(nn.Module):
    """Takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).mean((2, 3))


class Fragile(nn.Module):
    """NaN for more than 10 tokens; -inf in one output always, as for a class that is masked out."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mean = ids.float().mean(1)
        return (mean * float("nan") if ids.shape[1] > 10 else mean), torch.full_like(mean, float("-inf"))


class Timed:
    """Stands in for a model: a forward takes what it is told to on a clock of its own, and is remembered."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.shapes: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def __call__(self, batch: Batch) -> Batch:
        assert not torch.is_inference_mode_enabled()
        ids = batch["ids"]
        assert not ids.is_inference()
        num_rows, length = ids.shape
        self.shapes.append((num_rows, length))
        self.now += self.seconds(num_rows, length)
        return {"output": torch.zeros(num_rows, 4)}


def texts(*lengths: int) -> list[Row]:
    return [{"ids": torch.ones(length, dtype=torch.int64)} for length in lengths]


def images(*sizes: tuple[int, int]) -> list[Row]:
    return [{"image": torch.rand(1, height, width)} for height, width in sizes]


def warmed(
    module: nn.Module,
    signature: Signature,
    rows: list[Row],
    *,
    max_batch_size: int = 2,
    max_sizes: Mapping[str, int] | None = None,
    **more: Any,
) -> WarmUp:
    return warm_up(
        eager(module, signature),
        signature,
        rows,
        max_batch_size=max_batch_size,
        padding=True,
        max_sizes=max_sizes or {},
        **more,
    )


def timed(run: Timed, rows: list[Row], *, max_batch_size: int, padding: bool = False, budget_s: float) -> WarmUp:
    return warm_up(
        run,
        TOKENS,
        rows,
        max_batch_size=max_batch_size,
        padding=padding,
        max_sizes={},
        budget_s=budget_s,
        clock=run.clock,
    )


# Caps


def test_twice_the_largest_sample_where_the_model_takes_it() -> None:
    """Each dim on its own, whichever row it is largest in."""
    found = warmed(Conv(), IMAGES, images((4, 6), (5, 5)))
    assert found.max_sizes == {"height": 10, "width": 12}
    assert found.costs.volumes[-1] == 120


@pytest.mark.parametrize(("num_positions", "cap"), [(20, 20), (19, 10)])
def test_the_largest_sample_where_positions_end_before_twice_as_much(num_positions: int, cap: int) -> None:
    assert warmed(Text(num_positions), TOKENS, texts(3, 10)).max_sizes == {"length": cap}


def test_one_dim_that_can_not_grow_leaves_the_other() -> None:
    class Rows(Conv):
        def forward(self, image: Tensor) -> Tensor:
            assert image.shape[2] == 4, "four rows"
            return super().forward(image)

    assert warmed(Rows(), IMAGES, images((4, 6), (4, 3))).max_sizes == {"height": 4, "width": 12}


@pytest.mark.parametrize(("length", "cap"), [(5, 10), (6, 6)])
def test_outputs_that_stop_being_finite_are_no_answer(length: int, cap: int) -> None:
    """An output that is never finite, as the other one here, says nothing."""
    signature = Signature(
        inputs=TOKENS.inputs,
        outputs=(OutputSpec("output0", "float32", ()), OutputSpec("output1", "float32", ())),
        call="positional",
        output_kind="tuple",
    )
    assert warmed(Fragile(), signature, texts(2, length)).max_sizes == {"length": cap}


def test_a_fixed_shape_has_no_caps() -> None:
    found = warmed(nn.Linear(3, 2), FIXED, [{"x": torch.rand(3)} for _ in range(3)], max_batch_size=4)
    assert found.max_sizes == {}
    assert found.costs.volumes == (1,)
    assert found.costs.batch_sizes == (1, 2, 4)


@pytest.mark.parametrize("asked", [20, 12, 10, 5])
def test_a_cap_that_the_user_named_and_the_model_takes(asked: int) -> None:
    """Samples above it are not run."""
    found = warmed(Text(20), TOKENS, texts(3, 10), max_sizes={"length": asked})
    assert found.max_sizes == {"length": asked}
    assert max(found.costs.volumes) == asked


def test_a_named_cap_comes_before_one_that_nobody_asked_for() -> None:
    """Where both dims can't grow, the one that the user named does."""

    class Small(Conv):
        def forward(self, image: Tensor) -> Tensor:
            assert image.shape[2] * image.shape[3] <= 40
            return super().forward(image)

    found = warmed(Small(), IMAGES, images((4, 5)), max_sizes={"width": 10})
    assert found.max_sizes == {"height": 4, "width": 10}


def test_a_cap_that_the_model_does_not_take_is_refused() -> None:
    """The error says what the model said, and a size that it takes."""
    with pytest.raises(UsageError, match=r"the model takes no length=25: IndexError: index out of range") as refused:
        warmed(Text(20), TOKENS, texts(3, 13), max_sizes={"length": 25})
    assert refused.value.help == "the largest sampled size is 13: pass --max-size length=13"


def test_a_cap_far_beyond_is_refused_at_the_first_size_that_does_not_work() -> None:
    """A forward of a million tokens is never tried where one of 40 already failed."""
    with pytest.raises(UsageError, match=r"the model takes no length=1000000: at length=40 IndexError") as refused:
        warmed(Text(20), TOKENS, texts(3, 10), max_sizes={"length": 1_000_000})
    assert refused.value.help == "the largest sampled size is 10, and 20 worked: pass --max-size length=20"


@pytest.mark.parametrize(
    ("asked", "says", "cure"),
    [
        ({"length": 2}, "lets no sample through: the smallest has length=3", "the largest has 10"),
        ({"width": 9}, "no variable dim 'width'", "it has length"),
    ],
)
def test_a_cap_that_makes_no_sense_is_refused_before_anything_runs(asked: dict[str, int], says: str, cure: str) -> None:
    run = Timed(lambda num_rows, length: 0.0)
    with pytest.raises(UsageError, match=says) as refused:
        warm_up(run, TOKENS, texts(3, 10), max_batch_size=2, padding=True, max_sizes=asked)
    assert cure in refused.value.help
    assert not run.shapes


def test_caps_that_no_sample_is_within_together() -> None:
    with pytest.raises(UsageError, match="no sample is within all of --max-size height=5 --max-size width=5"):
        warmed(Conv(), IMAGES, images((4, 6), (6, 4)), max_sizes={"height": 5, "width": 5})


def test_what_the_model_raises_on_a_sample_is_raised() -> None:
    with pytest.raises(IndexError):
        warmed(Text(5), TOKENS, texts(3, 10))


def test_a_request_at_the_cap_is_made_of_the_largest_sample() -> None:
    """Not of padding, which a model that looks at its mask skips."""
    seen = []

    class Looks(Conv):
        def forward(self, image: Tensor) -> Tensor:
            seen.append(image)
            return super().forward(image)

    (row,) = images((2, 3))
    warmed(Looks(), IMAGES, [row], max_batch_size=1)
    assert torch.equal(seen[-1][0], row["image"].repeat(1, 2, 2))


# Costs


def test_every_cell_is_the_least_of_its_runs() -> None:
    """A neighbor that slows down every second forward doesn't show."""
    run = Timed(lambda num_rows, length: (0.001 * length + 0.0001 * num_rows) * (1 + 9 * (len(run.shapes) % 2)))
    found = timed(run, texts(2, 4, 6, 8, 10), max_batch_size=6, budget_s=60)
    assert found.costs.volumes == (2, 6, 8, 10, 20)
    assert found.costs.batch_sizes == (1, 2, 4, 6)
    for v, row in zip(found.costs.volumes, found.costs.seconds, strict=True):
        assert row == pytest.approx([0.001 * v + 0.0001 * n for n in found.costs.batch_sizes])
    assert found.num_rows_run == sum(num_rows for num_rows, _ in run.shapes)
    assert all(run.shapes.count((n, v)) >= REPEATS for v in found.costs.volumes for n in found.costs.batch_sizes)


def test_the_budget_holds_and_dear_forwards_are_not_run() -> None:
    """Cheap cells are measured first; the others are put down at the last known cost of a row, so batching them is
    no gain."""
    run = Timed(lambda num_rows, length: 0.01 * length * num_rows**0.5)
    found = timed(run, texts(1, 10), max_batch_size=64, budget_s=2.0)
    assert run.now <= 0.01 + 2 * 0.1 + 0.2 + 2.0  # the smallest sample, the largest twice and the cap come before
    assert (64, 20) not in run.shapes
    assert (4, 1) in run.shapes
    for v, row in zip(found.costs.volumes, found.costs.seconds, strict=True):
        for n, seconds in zip(found.costs.batch_sizes, row, strict=True):
            known = max(num_rows for num_rows, length in run.shapes if length == v and num_rows <= n)
            assert seconds == pytest.approx(0.01 * v * known**0.5 * n / known)


def test_a_model_slower_than_the_budget_runs_only_what_has_to_be_proven() -> None:
    """The smallest and the largest sample; no cap is sought that would take longer than the budget."""
    run = Timed(lambda num_rows, length: 1.0 * length)
    found = timed(run, texts(3, 5, 6, 7), max_batch_size=8, budget_s=4.0)
    assert run.shapes == [(1, 3), (1, 7), (1, 7), (1, 3)]
    assert found.max_sizes == {"length": 7}
    assert found.costs.volumes == (3, 7)
    assert found.costs.seconds[1] == pytest.approx([7.0 * n for n in found.costs.batch_sizes])


def test_a_slow_first_forward_is_no_reason_for_a_smaller_cap() -> None:
    """Near miss: what is compiled at the first forward of a size is not what the forward takes."""
    run = Timed(lambda num_rows, length: 3.0 if (num_rows, length) not in run.shapes[:-1] else 0.01)
    assert timed(run, texts(3, 7), max_batch_size=1, budget_s=4.0).max_sizes == {"length": 14}


def test_a_slow_first_forward_of_one_dim_is_no_reason_for_a_smaller_cap_of_the_next() -> None:
    seen = set()
    now = 0.0

    def run(batch: Batch) -> Batch:
        nonlocal now
        shape = batch["image"].shape
        now += 0.01 if shape in seen else 3.0
        seen.add(shape)
        return {"output": torch.zeros(shape[0], 2)}

    found = warm_up(
        run, IMAGES, images((4, 6)), max_batch_size=1, padding=False, max_sizes={}, budget_s=4.0, clock=lambda: now
    )
    assert found.max_sizes == {"height": 8, "width": 12}


def test_a_cap_that_takes_long_leaves_the_budget_for_the_costs() -> None:
    """Without the costs of batches, none would ever be made."""
    run = Timed(lambda num_rows, length: 0.001 * length)
    found = warm_up(
        run,
        TOKENS,
        texts(5, 10),
        max_batch_size=4,
        padding=False,
        max_sizes={"length": 100_000},
        budget_s=4.0,
        clock=run.clock,
    )
    assert run.now > 100
    assert found.costs.volumes == (5, 10, 100_000)
    assert found.costs.seconds[1] == pytest.approx([0.01] * 3)


def test_with_padding_two_sizes_share_a_forward_once() -> None:
    """The copy that padding makes is what a compiled model may never have seen."""
    for padding in (True, False):
        run = Timed(lambda num_rows, length: 0.001)
        timed(run, texts(3, 7), max_batch_size=2, padding=padding, budget_s=4.0)
        assert (run.shapes[-1] == (2, 7)) == padding


def test_a_model_of_one_row_at_a_time() -> None:
    signature = Signature(
        inputs=FIXED.inputs, outputs=FIXED.outputs, call="positional", output_kind="tensor", batched=False
    )
    found = warmed(nn.Linear(3, 2), signature, [{"x": torch.rand(3)}], max_batch_size=8)
    assert found.costs.batch_sizes == (1,)


# Memory


class Memory:
    """Stands in for the kernel: 100 MiB, and what each forward adds to it."""

    def __init__(self, added: Callable[[int], int], available: int) -> None:
        self.added = added
        self.available = available
        self.peak = 0
        self.shapes: set[tuple[int, int]] = set()

    def run(self, batch: Batch) -> Batch:
        num_rows, length = batch["ids"].shape
        self.peak = 100 * 2**20 + self.added(length) * num_rows
        self.shapes.add((num_rows, length))
        return {"output": torch.zeros(num_rows, 4)}

    def warm_up(self, monkeypatch: pytest.MonkeyPatch, max_sizes: dict[str, int], max_batch_size: int = 4) -> WarmUp:
        def reset(memory: Any) -> None:
            self.peak = 100 * 2**20
            memory._works = True

        monkeypatch.setattr(warmup, "_peak_bytes", lambda: self.peak)
        monkeypatch.setattr(warmup._Memory, "reset", reset)
        monkeypatch.setattr(warmup, "available_memory", lambda: self.available)
        return warm_up(
            self.run, TOKENS, texts(5, 10), max_batch_size=max_batch_size, padding=False, max_sizes=max_sizes
        )


def test_what_the_largest_forward_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at the cap, and as many as there may be."""
    found = Memory(lambda length: length * 2**20, GIB).warm_up(monkeypatch, {})
    assert found.max_sizes == {"length": 20}
    assert found.peak_bytes == 4 * 20 * 2**20


@pytest.mark.parametrize(("available_mib", "cap"), [(80, 20), (79, 10)])
def test_a_cap_whose_batch_does_not_fit_is_lowered(
    monkeypatch: pytest.MonkeyPatch, available_mib: int, cap: int
) -> None:
    found = Memory(lambda length: length * 2**20, available_mib * 2**20).warm_up(monkeypatch, {})
    assert found.max_sizes == {"length": cap}
    assert found.peak_bytes == 4 * cap * 2**20


def test_a_named_cap_that_does_not_fit_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows with the square, as attention's: the forward that would end the process is not run."""
    memory = Memory(lambda length: length**2 * 2**20, GIB)
    with pytest.raises(UsageError, match=r"no length=1000: at length=40 a forward needs about 1\.6 GiB, 1\.0 GiB are"):
        memory.warm_up(monkeypatch, {"length": 1000}, max_batch_size=1)
    assert max(length for _, length in memory.shapes) == 20


def test_a_named_cap_needs_memory_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of such rows is not run at warm-up; one of small rows, which fits, is."""
    memory = Memory(lambda length: length * 2**20, 100 * 2**20)
    assert memory.warm_up(monkeypatch, {"length": 40}).max_sizes == {"length": 40}
    assert {(4, 5), (4, 10), (2, 40)} <= memory.shapes
    assert (4, 40) not in memory.shapes


def test_the_kernel_is_asked() -> None:
    """A forward that touches 64 MiB is seen, and one that touches nothing is not."""
    memory = warmup._Memory()
    if memory.growth() is None:
        pytest.skip("the kernel doesn't reset the peak of the resident size")
    assert memory.growth() < 16 * 2**20
    torch.ones(16 * 2**20)
    assert memory.growth() > 48 * 2**20


def test_unknown_memory_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_peak_bytes", lambda: None)
    found = warmed(Text(20), TOKENS, texts(3, 10))
    assert found.max_sizes == {"length": 20}
    assert found.peak_bytes is None
