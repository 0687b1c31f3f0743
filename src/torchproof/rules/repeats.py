"""When samples that should differ are equal too often for chance."""

from torchproof.types.rehearsal import Draws

# Of a false alarm, where values are drawn at random and only happen to be equal. A coin is told from 20 pairs on.
MAX_CHANCE = 1e-6


def repeats(num_equal: int, draws: Draws) -> bool:
    """Whether all pairs are equal, and that is no chance."""
    return suspicious(num_equal, draws) and draws.chance**draws.num_pairs < MAX_CHANCE


def suspicious(num_equal: int, draws: Draws) -> bool:
    """Whether all pairs are equal although the samples vary."""
    return draws.num_values > 1 and 0 < draws.num_pairs == num_equal and 0 <= draws.chance <= 1


def ignores_index(other_index: Draws) -> bool:
    """Whether what comes out follows the number of the call: equal for other indices, from epoch to epoch."""
    return repeats(other_index.num_equal_epochs, other_index)
