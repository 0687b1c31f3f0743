"""What ranks, workers and epochs have seen, set side by side: from hashes to the numbers that rules judge."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torchproof.types.rehearsal import DataName, Draws, DrawsSeen, SamplesSeen, WeightsSeen

Sample = Sequence[str]  # the hashes of its parts
NUM_WORKERS = 2


def compare_samples(
    target: str, data: DataName, indices: Sequence[int], by_rank: Sequence[Sequence[Sequence[Sample]]]
) -> SamplesSeen:
    """The same indices on every rank.

    Args:
        by_rank: what each rank has read, by rank, reading and place in ``indices``.
    """
    num_comparable, columns = _stable_columns(by_rank)
    varying = [column for column in columns if any(len(set(rank)) > 1 for rank in column)]
    differing = [column for column in varying or columns if len(set(column)) > 1]
    samples = [list(zip(*(column[rank] for column in differing), strict=True)) for rank in range(len(by_rank))]
    different = [place for place, ranks in enumerate(zip(*samples, strict=True)) if len(set(ranks)) > 1]
    elsewhere = [place for place in different if any(samples[0][place] in others for others in samples[1:])]
    return SamplesSeen(
        target=target,
        data=data,
        num_indices=len(indices),
        num_comparable=num_comparable,
        num_different=len(different),
        num_agreeing_parts=len([column for column in varying if column not in differing]),
        num_elsewhere=len(elsewhere),
        index=indices[different[0]] if different else -1,
    )


def _stable_columns(
    by_rank: Sequence[Sequence[Sequence[Sample]]],
) -> tuple[int, list[tuple[tuple[str, ...], ...]]]:
    """Parts of the samples that are the same in both readings of every rank; samples of no fixed form are one part.

    Returns:
        the number of samples that can be compared; and for each such part, its hashes by rank and place.
    """
    lengths = {len(sample) for readings in by_rank for reading in readings for sample in reading}
    if len(lengths) > 1:
        by_rank = [[[["/".join(sample)] for sample in reading] for reading in readings] for readings in by_rank]
        lengths = {1}
    columns = []
    for part in range(max(lengths)):
        readings = [[tuple(sample[part] for sample in reading) for reading in rank] for rank in by_rank]
        if all(first == second for first, second in readings):
            columns.append(tuple(first for first, _ in readings))
    return len(by_rank[0][0]) if columns else 0, columns


def spread(length: int, num: int) -> list[int]:
    """So many indices, or all there are, evenly spaced."""
    return sorted({number * (length - 1) // max(1, num - 1) for number in range(num)})


def draw_epochs(indices: Sequence[int], num_draws: int) -> tuple[list[list[int]], list[list[int]]]:
    """What two workers are asked for in two epochs, in turns.

    Returns:
        indices that differ from worker to worker and from epoch to epoch at each place, none where there is one index
        only; and always the same index.
    """
    places = range(NUM_WORKERS * num_draws)
    other = [[indices[(place + epoch) % len(indices)] for place in places] for epoch in range(2)]
    return other if len(indices) > 1 else [], [[indices[0]] * len(places)] * 2


def compare_draws(
    target: str, other_index: Sequence[Sequence[Sample]], same_index: Sequence[Sequence[Sample]]
) -> DrawsSeen:
    """What came out of them, by epoch and place."""
    return DrawsSeen(target=target, other_index=_draws(other_index), same_index=_draws(same_index))


def _draws(epochs: Sequence[Sequence[Sample]]) -> Draws:
    one, two = ([tuple(sample) for sample in epoch] for epoch in epochs or ([], []))
    counts = Counter(one + two)
    num = len(one) + len(two)
    return Draws(
        num_values=len(counts),
        num_pairs=len(one),
        num_equal_workers=sum(a == b for epoch in (one, two) for a, b in zip(epoch[::2], epoch[1::2], strict=True)),
        num_equal_epochs=sum(a == b for a, b in zip(one, two, strict=True)),
        chance=sum((times / num) ** 2 for times in counts.values()),
    )


def compare_weights(target: str, by_rank: Sequence[Mapping[str, Sequence[str]]], num_steps: int) -> WeightsSeen:
    """Shapes and hashes of tensors by name, as each rank has them."""
    names = list(dict.fromkeys(name for rank in by_rank for name in rank))
    shapes = [name for name in names if len({rank[name][0] if name in rank else None for rank in by_rank}) > 1]
    values = [name for name in names if len({rank[name][1] if name in rank else None for rank in by_rank}) > 1]
    in_order = all(list(rank) == names for rank in by_rank)
    return WeightsSeen(
        target=target,
        num_steps=num_steps,
        num_tensors=len(names),
        different=tuple(shapes or values or (() if in_order else names[:1])),
        shapes_differ=bool(shapes) or not in_order,
    )


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Names whose value differs, or that only one of the two has."""
    return tuple(name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name))
