"""Counts the inputs that a compiled model runs eagerly, as they would need another graph."""

import torch
from torch import Tensor

from torchproof.target.rows import FlatModule

_counted = [0]


class CountedModule(FlatModule):
    """What ``torch.compile`` gets: Python runs this ``forward`` only where no compiled graph takes its place."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """As ``FlatModule``; counts unless it is being compiled."""
        if not torch.compiler.is_compiling():
            _counted[0] += 1
        return super().forward(*tensors)


def num_fallbacks() -> int:
    """Of this process so far."""
    return _counted[0]
