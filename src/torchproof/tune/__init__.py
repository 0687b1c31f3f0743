"""Measures the candidates, chooses, and writes a proven bundle."""

from torchproof.tune.request import TuneRequest
from torchproof.tune.writing import tune

__all__ = ["TuneRequest", "tune"]
