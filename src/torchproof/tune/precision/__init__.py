"""Chooses the precision to train in, by training in each of them from the same seeds."""

from torchproof.tune.precision.compare import compare_precisions

__all__ = ["compare_precisions"]
