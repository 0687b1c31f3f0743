"""Rows become batches and come back: padding is cut off again, nothing is mixed that must not be."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchproof.target.rows import Row, batches, pad_row, sizes_of, stack, unstack
from torchproof.types import InputSpec, OutputSpec, Signature

SIGNATURE = Signature(
    inputs=(
        InputSpec(name="ids", dtype="int64", shape=("length",), pad_value=7),
        InputSpec(name="frames", dtype="float32", shape=(2, "time", "length")),
        InputSpec(name="scale", dtype="float32", shape=()),
    ),
    outputs=(
        OutputSpec(name="tokens", dtype="int64", shape=("length",)),
        OutputSpec(name="image", dtype="float32", shape=(2, "time", "length")),
        OutputSpec(name="score", dtype="float32", shape=()),
    ),
    call="keyword",
    output_kind="dict",
)
FIXED = Signature(
    inputs=(InputSpec(name="x", dtype="float32", shape=(3,)),),
    outputs=(OutputSpec(name="x", dtype="float32", shape=(3,)),),
    call="keyword",
    output_kind="dict",
)
OUTPUT_OF = {"tokens": "ids", "image": "frames", "score": "scale"}
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=9)


def make_rows(sizes: list[tuple[int, int]]) -> list[Row]:
    """Every value in them is different, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "ids": torch.randint(10, 1000, (length,), generator=generator),
            "frames": torch.rand(2, time, length, generator=generator),
            "scale": torch.rand((), generator=generator),
        }
        for length, time in sizes
    ]


@given(sizes=SIZES)
def test_what_is_stacked_comes_back(sizes: list[tuple[int, int]]) -> None:
    """A model that returns its inputs gives every request its own, whatever they were padded to."""
    rows = make_rows(sizes)
    batch = stack(rows, SIGNATURE)
    assert list(batch) == ["ids", "frames", "scale"]
    assert batch["frames"].shape == (len(rows), 2, max(t for _, t in sizes), max(n for n, _ in sizes))
    outputs = {name: batch[source] for name, source in OUTPUT_OF.items()}
    for row, back in zip(rows, unstack(outputs, rows, SIGNATURE), strict=True):
        assert all(torch.equal(back[name], row[source]) for name, source in OUTPUT_OF.items())


@given(sizes=SIZES, extra=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_padding_goes_to_the_end_and_has_the_pad_value(sizes: list[tuple[int, int]], extra: tuple[int, int]) -> None:
    """What was there stays in front."""
    (row, *_), (length, time) = make_rows(sizes), sizes[0]
    padded = pad_row(row, SIGNATURE.inputs, {"length": length + extra[0], "time": time + extra[1]})
    assert torch.equal(padded["ids"][:length], row["ids"])
    assert bool((padded["ids"][length:] == 7).all())
    assert torch.equal(padded["frames"][:, :time, :length], row["frames"])
    assert torch.count_nonzero(padded["frames"]) == torch.count_nonzero(row["frames"])
    assert padded["scale"] is row["scale"]


@given(sizes=SIZES, max_batch_size=st.integers(1, 5), padding=st.booleans())
def test_batches_cover_each_row_once(sizes: list[tuple[int, int]], max_batch_size: int, padding: bool) -> None:
    """No batch is too large, and without padding none has two sizes in it."""
    rows = make_rows(sizes)
    groups = batches(rows, SIGNATURE, max_batch_size, padding=padding)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    assert all(1 <= len(group) <= max_batch_size for group in groups)
    if padding:
        assert len(groups) == -(-len(rows) // max_batch_size)
    else:
        assert all(len({sizes[i] for i in group}) == 1 for group in groups)


def test_without_padding_rows_of_one_size_still_share() -> None:
    """Rows of one volume and different sizes lie between them: (1, 6) and (6, 1)."""
    rows = make_rows([(1, 6), (6, 1), (1, 6), (6, 1)])
    assert batches(rows, SIGNATURE, 4, padding=False) == [[0, 2], [1, 3]]


def test_rows_without_a_variable_dim_share() -> None:
    rows = [{"x": torch.full((3,), float(i))} for i in range(5)]
    assert batches(rows, FIXED, 2, padding=False) == [[0, 1], [2, 3], [4]]
    assert sizes_of(rows[0], FIXED.inputs) == {}


def test_an_output_that_did_not_follow_is_left_alone() -> None:
    """It is shorter than the request, as a summary would be: nothing is cut, and nothing raises."""
    (row,) = make_rows([(5, 2)])
    outputs = {"tokens": torch.ones(1, 2), "image": torch.ones(1, 2, 2, 5), "score": torch.ones(1)}
    assert unstack(outputs, [row], SIGNATURE)[0]["tokens"].shape == (2,)


def test_a_fixed_batch_passes_in_the_signatures_order() -> None:
    """A stored row may list its inputs in another order; a positional call must not see that."""
    (row,) = make_rows([(2, 2)])
    alone = SIGNATURE.__class__(
        inputs=SIGNATURE.inputs, outputs=SIGNATURE.outputs, call="positional", output_kind="dict", batched=False
    )
    batch = stack([dict(reversed(row.items()))], alone)
    assert list(batch) == ["ids", "frames", "scale"]
    batch["ids"].zero_()
    assert int(row["ids"].min()) >= 10  # a copy: the model may write into it
