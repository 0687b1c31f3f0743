"""Chooses a DataLoader's settings: costs measured apart predict each setting, real training confirms the best."""

from torchproof.tune.loading.search import choose_loading

__all__ = ["choose_loading"]
