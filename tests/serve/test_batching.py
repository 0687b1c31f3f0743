"""Rows are cut into forwards by what forwards cost: the cheapest cut, every row once, within every bound."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.serve.batching import WINDOW, CostModel, groups, padding_share
from torchproof.types.serving import Costs

# all-MiniLM-L6-v2 over texts of 5 to 155 tokens, one thread: a row's seconds hardly fall with the batch size.
MINILM = Costs(
    volumes=(5, 30, 75, 155, 310),
    batch_sizes=(1, 8, 32),
    seconds=(
        (0.0060, 0.0120, 0.0330),
        (0.0095, 0.0480, 0.1900),
        (0.0170, 0.1160, 0.4650),
        (0.0330, 0.2450, 0.9800),
        (0.0720, 0.5600, 2.2600),
    ),
)
# A forward's fixed part is nothing and larger batches fall out of the cache.
NEVER_PAYS = Costs(volumes=(10, 100), batch_sizes=(1, 2, 4), seconds=((0.01, 0.021, 0.044), (0.1, 0.21, 0.44)))
# The same with a fixed part that a shared forward saves: the near miss.
JUST_PAYS = Costs(volumes=(10, 100), batch_sizes=(1, 2, 4), seconds=((0.01, 0.019, 0.036), (0.1, 0.19, 0.36)))
FIXED = Costs(volumes=(1,), batch_sizes=(1, 2, 4, 8), seconds=((0.001, 0.0011, 0.0015, 0.0040),))


@st.composite
def cost_tables(draw: st.DrawFn) -> Costs:
    """Any table, noisy ones with contradictions included."""
    volumes = tuple(sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=4))))
    batch_sizes = (1, *sorted(draw(st.sets(st.integers(2, 12), max_size=3))))
    seconds = st.floats(0.001, 1.0)
    return Costs(
        volumes=volumes,
        batch_sizes=batch_sizes,
        seconds=tuple(tuple(draw(seconds) for _ in batch_sizes) for _ in volumes),
    )


def rows_of(num_dims: int, max_rows: int = 20) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(*[st.integers(1, 9)] * num_dims), max_size=max_rows)


def forward_s(model: CostModel, sizes: Sequence[tuple[int, ...]], group: Sequence[int]) -> float:
    return model.cost_s(len(group), math.prod(map(max, zip(*(sizes[i] for i in group), strict=True))))


def total_s(model: CostModel, sizes: Sequence[tuple[int, ...]], cut: Sequence[Sequence[int]]) -> float:
    return sum(forward_s(model, sizes, group) for group in cut)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to cut a list into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [i for i in rest if i not in others]
            for cut in partitions(left):
                yield [[first, *others], *cut]


@given(cost_tables(), st.integers(1, 20), st.integers(1, 100))
def test_a_larger_batch_or_volume_never_costs_less(costs: Costs, batch_size: int, volume: int) -> None:
    """Also where the table contradicts itself, and beyond its last volume and its last batch size."""
    model = CostModel(costs)
    least = model.cost_s(batch_size, volume) * (1 - 1e-9)
    assert model.cost_s(batch_size + 1, volume) >= least
    assert model.cost_s(batch_size, volume + 1) >= least


def test_what_was_measured_is_what_is_predicted() -> None:
    """At the measured points themselves; half-way between them in between; on in a line beyond them."""
    model = CostModel(MINILM)
    for i, volume in enumerate(MINILM.volumes):
        for j, batch_size in enumerate(MINILM.batch_sizes):
            assert model.cost_s(batch_size, volume) == pytest.approx(MINILM.seconds[i][j])
    assert model.cost_s(20, 30) == pytest.approx((0.048 + 0.190) / 2)
    assert model.cost_s(8, 115) == pytest.approx((0.116 + 0.245) / 2)
    assert model.cost_s(1, 465) == pytest.approx(0.072 + (0.072 - 0.033))
    assert model.cost_s(64, 310) == pytest.approx(2 * 2.26)
    assert model.cost_s(1, 1) == pytest.approx(0.006)


def test_a_spike_in_one_measurement_does_not_spread() -> None:
    """A cell that a busy neighbor slowed down is brought down to a larger one; the clean cells stay as they are."""
    spiked = Costs(volumes=(10, 20), batch_sizes=(1, 2), seconds=((0.5, 0.02), (0.02, 0.04)))
    model = CostModel(spiked)
    assert model.cost_s(1, 10) == pytest.approx(0.02)
    assert [model.cost_s(2, 10), model.cost_s(1, 20), model.cost_s(2, 20)] == pytest.approx([0.02, 0.02, 0.04])


@given(
    cost_tables(),
    st.integers(0, 2).flatmap(rows_of),
    st.integers(1, 8),
    st.booleans(),
    st.floats(0.001, 2.0) | st.just(math.inf),
)
def test_every_row_once_and_within_every_bound(
    costs: Costs, sizes: list[tuple[int, ...]], max_batch_size: int, padding: bool, budget_s: float
) -> None:
    """No row is lost or run twice, no forward is too large or too dear, and nothing is padded unasked."""
    model = CostModel(costs)
    cut = groups(sizes, model, max_batch_size=max_batch_size, padding=padding, budget_s=budget_s)
    assert sorted(i for group in cut for i in group) == list(range(len(sizes)))
    for group in cut:
        assert len(group) <= max_batch_size
        assert len(group) == 1 or forward_s(model, sizes, group) <= budget_s
        assert padding or len({sizes[i] for i in group}) == 1
    # The oldest row of each forward decides when it runs.
    assert [group[0] for group in cut] == sorted(min(group) for group in cut)


@given(cost_tables(), st.integers(0, 2).flatmap(rows_of), st.integers(1, 8))
def test_never_worse_than_the_simple_policies(costs: Costs, sizes: list[tuple[int, ...]], max_batch_size: int) -> None:
    """One by one, and sorted rows in batches as large as they may be."""
    model = CostModel(costs)
    cut = groups(sizes, model, max_batch_size=max_batch_size, padding=True)
    order = sorted(range(len(sizes)), key=lambda i: (math.prod(sizes[i]), sizes[i]))
    full = [order[i : i + max_batch_size] for i in range(0, len(order), max_batch_size)]
    for simple in (full, [[i] for i in order]):
        assert total_s(model, sizes, cut) <= total_s(model, sizes, simple) * (1 + 1e-9)


@given(cost_tables(), rows_of(1, 6), st.integers(1, 4), st.floats(0.01, 2.0) | st.just(math.inf), st.booleans())
def test_the_best_of_all_cuts_with_one_variable_dim(
    costs: Costs, sizes: list[tuple[int, ...]], max_batch_size: int, budget_s: float, padding: bool
) -> None:
    """Tried against every way to cut up to six rows."""
    model = CostModel(costs)
    found = total_s(
        model, sizes, groups(sizes, model, max_batch_size=max_batch_size, padding=padding, budget_s=budget_s)
    )
    allowed = [
        cut
        for cut in partitions(list(range(len(sizes))))
        if all(len(g) <= max_batch_size and (len(g) == 1 or forward_s(model, sizes, g) <= budget_s) for g in cut)
        and (padding or all(len({sizes[i] for i in g}) == 1 for g in cut))
    ]
    assert found == pytest.approx(min(total_s(model, sizes, cut) for cut in allowed))


@given(cost_tables(), st.integers(1, 40), st.integers(1, 12), st.floats(0.01, 2.0) | st.just(math.inf))
def test_rows_of_one_size_are_cut_as_well_as_by_the_search(
    costs: Costs, num_rows: int, max_batch_size: int, budget_s: float
) -> None:
    """The short way for equal sizes costs what the search over all cuts would."""
    model = CostModel(costs)
    best = [0.0]
    for n in range(1, num_rows + 1):
        fits = [k for k in range(1, min(n, max_batch_size) + 1) if k == 1 or model.cost_s(k, 7) <= budget_s]
        best.append(min(best[n - k] + model.cost_s(k, 7) for k in fits))
    sizes = [(7,)] * num_rows
    cut = groups(sizes, model, max_batch_size=max_batch_size, padding=True, budget_s=budget_s)
    assert total_s(model, sizes, cut) == pytest.approx(best[num_rows])


def test_mixed_texts_are_not_padded_into_one_batch() -> None:
    """32 texts of mixed length in one padded batch take longer than one by one; like with like takes less than both."""
    sizes = [(5 + (i * 37) % 151,) for i in range(32)]
    model = CostModel(MINILM)
    one_batch, alone = total_s(model, sizes, [range(32)]), total_s(model, sizes, [[i] for i in range(32)])
    assert one_batch > 1.3 * alone
    cut = groups(sizes, model, max_batch_size=32, padding=True)
    assert 1 < len(cut) < 32
    assert total_s(model, sizes, cut) < 0.95 * alone
    assert all(padding_share([sizes[i] for i in group]) < 0.3 for group in cut)


@pytest.mark.parametrize("sizes", [[(10,)] * 6, [(10,), (100,), (20,), (90,), (30,)]])
def test_where_batching_never_pays_every_row_runs_alone(sizes: list[tuple[int, ...]]) -> None:
    assert groups(sizes, CostModel(NEVER_PAYS), max_batch_size=4, padding=True) == [[i] for i in range(len(sizes))]


def test_where_it_pays_a_little_equal_rows_share() -> None:
    assert groups([(10,)] * 6, CostModel(JUST_PAYS), max_batch_size=4, padding=True) == [[0, 1, 2, 3], [4, 5]]


def test_a_fixed_shape_takes_the_batch_size_that_is_cheapest_for_a_row() -> None:
    """8 to a forward are allowed and cost 0.5 ms a row; 4 cost 0.375 ms."""
    cut = groups([()] * 12, CostModel(FIXED), max_batch_size=8, padding=False)
    assert cut == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_equal_costs_answer_sooner() -> None:
    """Where a shared forward saves nothing, nobody waits for another's rows."""
    linear = Costs(volumes=(1,), batch_sizes=(1, 2, 4), seconds=((0.25, 0.5, 1.0),))
    assert groups([()] * 4, CostModel(linear), max_batch_size=4, padding=False) == [[0], [1], [2], [3]]


def test_the_oldest_row_runs_first_however_dear_it_is() -> None:
    cut = groups([(155,), (5,), (5,), (155,)], CostModel(MINILM), max_batch_size=8, padding=True)
    assert cut == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("sizes", "longest"), [([(10,)] * 4, 3), ([(9,), (10,), (8,), (10,)], 3), ([(1, 10), (2, 5), (1, 10), (2, 4)], 2)]
)
def test_a_forward_stays_within_the_budget(sizes: list[tuple[int, ...]], longest: int) -> None:
    """Four rows in one forward are cheapest and take too long: equal sizes, one dim, and two dims of other shapes."""
    costs = Costs(volumes=(10, 20), batch_sizes=(1, 4), seconds=((0.10, 0.16), (0.18, 0.28)))
    model = CostModel(costs)
    assert len(groups(sizes, model, max_batch_size=4, padding=True, budget_s=0.28)) == 1
    cut = groups(sizes, model, max_batch_size=4, padding=True, budget_s=0.145)
    assert max(map(len, cut)) == longest
    alone = groups(sizes, model, max_batch_size=4, padding=True, budget_s=0.01)
    assert alone == [[i] for i in range(len(sizes))]


def test_two_dims_are_padded_to_the_largest_of_each() -> None:
    """A wide and a tall row have one volume, and together four times as much: they don't share; two wide ones do."""
    costs = Costs(volumes=(10, 100), batch_sizes=(1, 2), seconds=((0.01, 0.011), (0.1, 0.11)))
    assert groups([(1, 10), (10, 1)], CostModel(costs), max_batch_size=2, padding=True) == [[0], [1]]
    assert groups([(1, 10), (1, 9)], CostModel(costs), max_batch_size=2, padding=True) == [[0, 1]]


def test_a_long_queue_is_planned_in_windows_the_oldest_first() -> None:
    """A row that is behind the window doesn't run before the window."""
    sizes = [(1 + i % 50,) for i in range(2 * WINDOW + 3)]
    cut = groups(sizes, CostModel(MINILM), max_batch_size=8, padding=True)
    ages = [i // WINDOW for group in cut for i in group]
    assert ages == sorted(ages)
    assert len(ages) == len(sizes)


def test_padding_share() -> None:
    assert padding_share([(3,), (1,)]) == pytest.approx(1 / 3)
    assert padding_share([(2, 4), (4, 2)]) == pytest.approx(0.5)
    assert padding_share([(7,), (7,)]) == 0.0
    assert padding_share([(), ()]) == 0.0
    assert padding_share([(0,), (0,)]) == 0.0
