"""From hashes of parts to what rules judge: samples by rank, draws by worker and epoch, weights by name."""

import pytest

from torchproof.rules.registry import judge
from torchproof.train.compare import compare_draws, compare_samples, compare_weights, draw_epochs, spread

A, B, C = ("a", "0"), ("b", "1"), ("c", "1")  # samples of two parts


@pytest.mark.parametrize(
    ("one", "other", "seen"),  # what two ranks read at three indices: comparable, different, agreeing parts, elsewhere
    [
        ([A, B, C], [A, B, C], (3, 0, 2, 0)),
        ([A, B, C], [B, A, C], (3, 2, 0, 2)),
        ([A, B, B], [C, C, C], (3, 3, 0, 0)),
        ([("a", "0"), ("b", "1"), ("c", "1")], [("x", "0"), ("y", "1"), ("z", "1")], (3, 3, 1, 0)),
        # a part that is the same at all indices doesn't count where others vary: the rank, say
        ([("a", "0"), ("b", "0"), ("c", "0")], [("a", "1"), ("b", "1"), ("c", "1")], (3, 0, 1, 0)),
        ([("a",), ("a",), ("a",)], [("b",), ("b",), ("b",)], (3, 3, 0, 0)),
        # samples of other lengths are one part
        ([("a", "0"), ("b",), ("c",)], [("a", "0"), ("b",), ("b",)], (3, 1, 0, 0)),
    ],
)
def test_samples_of_two_ranks(
    one: list[tuple[str, ...]], other: list[tuple[str, ...]], seen: tuple[int, int, int, int]
) -> None:
    found = compare_samples("it", "train_data", [3, 5, 9], [[one, one], [other, other]])
    assert (found.num_comparable, found.num_different, found.num_agreeing_parts, found.num_elsewhere) == seen
    assert found.index in (-1, 3, 9)


def test_a_part_that_changes_at_the_second_reading_is_left_out() -> None:
    by_rank = [[[(f"{rank}{reading}{i}", str(i)) for i in range(3)] for reading in range(2)] for rank in range(2)]
    found = compare_samples("it", "train_data", [0, 1, 2], by_rank)
    assert (found.num_comparable, found.num_different) == (3, 0)
    only = [[[sample[:1] for sample in reading] for reading in rank] for rank in by_rank]
    assert compare_samples("it", "train_data", [0, 1, 2], only).num_comparable == 0


def test_indices_are_spread_and_each_place_has_another_one_in_the_next_epoch() -> None:
    assert spread(5, 16) == [0, 1, 2, 3, 4]
    assert spread(1, 16) == [0]
    assert spread(1000, 3) == [0, 499, 999]
    other, same = draw_epochs(spread(64, 64), 16)
    assert [len(epoch) for epoch in (*other, *same)] == [32] * 4
    assert not any(one == two for one, two in zip(*other, strict=True))
    assert set(same[0] + same[1]) == {0}
    assert draw_epochs([0], 16)[0] == []


CALLS = [[(str(n),) for n in range(32)] for _ in range(2)]  # as an iterator behind getitem gives them
WORKERS = [[(str(n // 2),) for n in range(32)] for _ in range(2)]  # a generator that each worker has a copy of
FRESH = [[(f"{epoch} {n}",) for n in range(32)] for epoch in range(2)]
CONSTANT = [[("0",)] * 32] * 2
COIN = [[(f"{(n * 7 + epoch * n) % 3 % 2}",) for n in range(32)] for epoch in range(2)]


@pytest.mark.parametrize(
    ("other_index", "same_index", "codes"),
    [
        (FRESH, CONSTANT, []),
        (FRESH, FRESH, []),
        (COIN, COIN, []),
        (CONSTANT, CONSTANT, []),
        ([], CONSTANT, []),
        (FRESH, WORKERS, ["TP504"]),
        ([], WORKERS, ["TP504"]),
        (CALLS, CALLS, ["TP402"]),  # what ignores the index repeats its samples, too: one cause, one finding
        (WORKERS, WORKERS, ["TP402"]),
    ],
)
def test_draws_of_two_workers(
    other_index: list[list[tuple[str]]], same_index: list[list[tuple[str]]], codes: list[str]
) -> None:
    assert [finding.code for finding in judge(compare_draws("it", other_index, same_index))] == codes


@pytest.mark.parametrize(
    ("other", "different", "shapes_differ"),
    [
        ({"w": ("(2,)", "x"), "b": ("(1,)", "y")}, (), False),
        ({"w": ("(2,)", "x"), "b": ("(1,)", "z")}, ("b",), False),
        ({"w": ("(3,)", "x"), "b": ("(1,)", "z")}, ("w",), True),
        ({"w": ("(2,)", "x")}, ("b",), True),
        ({"b": ("(1,)", "y"), "w": ("(2,)", "x")}, ("w",), True),  # DDP goes by their order
    ],
)
def test_weights_of_two_ranks(
    other: dict[str, tuple[str, str]], different: tuple[str, ...], shapes_differ: bool
) -> None:
    found = compare_weights("it", [{"w": ("(2,)", "x"), "b": ("(1,)", "y")}, other], num_steps=0)
    assert (found.different, found.shapes_differ) == (different, shapes_differ)
