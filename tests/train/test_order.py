"""Which samples a rank sees: all of them once, the same micro-batches in number, whatever the sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.train.order import derive_seed, epoch_order, num_steps, shares


@given(
    num_samples=st.integers(1, 200),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 40),
    micro_batch_size=st.integers(1, 40),
)
def test_every_sample_counts_once_and_the_ranks_stay_in_step(
    num_samples: int, world_size: int, batch_size: int, micro_batch_size: int
) -> None:
    order = epoch_order(num_samples, 0, 0)
    seen = []
    for step in range(num_steps(num_samples, batch_size)):
        indices = order[step * batch_size : (step + 1) * batch_size]
        ranks = [
            shares(indices, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size, seed=("s",))
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in ranks}) == 1
        for share in (share for rank in ranks for share in rank):
            assert 1 <= len(share.indices) <= micro_batch_size
            if share.weight:
                seen += share.indices
                assert share.weight == pytest.approx(len(share.indices) * world_size / len(indices))
        assert sum(share.weight for rank in ranks for share in rank) == pytest.approx(world_size)
    assert sorted(seen) == list(range(num_samples))


def test_one_rank_with_room_takes_the_whole_step_at_its_full_weight() -> None:
    (share,) = shares([5, 3, 1], rank=0, world_size=1, micro_batch_size=3, seed=("s",))
    assert (share.indices, share.weight) == ((5, 3, 1), 1.0)


def test_epochs_differ_and_a_seed_repeats() -> None:
    orders = [epoch_order(50, 0, 0), epoch_order(50, 0, 1), epoch_order(50, 1, 0)]
    assert len({tuple(order) for order in orders}) == 3
    assert epoch_order(50, 0, 1) == orders[1]
    assert derive_seed("a", 1) != derive_seed("a1")
