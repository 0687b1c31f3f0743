"""Which samples each rank sees, in which step, and how much each counts.

All of it follows from the seed, the epoch and the step, so that a run goes on where it ended, on as many ranks as there
are then, without a position to store beside the step.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Share:
    """What one rank forwards at once: a micro-batch.

    Attributes:
        indices: of the dataset; never empty.
        weight: of its mean loss, where the gradients of all ranks are averaged. 0 where the rank has no sample left: it
            goes through the first one of the step without effect, as the others wait for its part.
        seed: of everything random about these samples.
    """

    indices: tuple[int, ...]
    weight: float
    seed: int


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits; parts that differ give another one."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the dataset's indices, another one in each epoch, the same on all ranks."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    order: list[int] = torch.randperm(num_samples, generator=generator).tolist()
    return order


def num_steps(num_samples: int, batch_size: int) -> int:
    """Optimizer steps of an epoch; the last one may have fewer samples."""
    return math.ceil(num_samples / batch_size)


def shares(
    indices: Sequence[int], *, rank: int, world_size: int, micro_batch_size: int, seed: tuple[object, ...]
) -> list[Share]:
    """A step's samples as one rank goes through them: as many micro-batches as every other rank has.

    Args:
        indices: of all ranks together.
        micro_batch_size: at most so many samples in one micro-batch.
        seed: what the seeds of the micro-batches derive from.
    """
    num_micro_batches = math.ceil(math.ceil(len(indices) / world_size) / micro_batch_size)
    mine = indices[rank::world_size]
    found = []
    for number in range(num_micro_batches):
        part = mine[number * len(mine) // num_micro_batches : (number + 1) * len(mine) // num_micro_batches]
        taken = tuple(part) or (indices[0],)
        found.append(Share(taken, len(part) * world_size / len(indices), derive_seed(*seed, taken[0])))
    return found
