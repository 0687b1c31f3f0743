"""Statistics on plain floats: a verdict can be recomputed from a stored file, without torch or numpy."""

from torchproof.stats.intervals import median_interval, quantile, quantile_interval
from torchproof.stats.paired import LOOKS, MARGIN, compare_paired
from torchproof.stats.slope import theil_sen

__all__ = ["LOOKS", "MARGIN", "compare_paired", "median_interval", "quantile", "quantile_interval", "theil_sen"]
