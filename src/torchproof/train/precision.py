"""Mixed precision: autocast around forward, the scaler around backward, and modules that stay in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchproof.errors import UsageError
from torchproof.types.training import TrainPrecision

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def autocast(precision: TrainPrecision, device: torch.device) -> torch.autocast:
    """Around every forward, also of an evaluation."""
    dtype = DTYPES[precision]
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else torch.bfloat16, enabled=enabled)


def keep_fp32(model: nn.Module, names: Sequence[str]) -> None:
    """Makes the modules of these names run in float32 inside autocast; what floats into them is cast.

    Raises:
        UsageError: the model has no such module.
    """
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise UsageError(
                f"--fp32-module {name}: the model has no module of that name",
                help=f"it has {', '.join(list(known)[1:8]) or 'none'}, ...",
            )
        known[name].forward = _in_fp32(known[name].forward)


def _in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        kinds = {value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        with torch.autocast((kinds or {"cpu"}).pop(), enabled=False):
            return forward(*map(_float, args), **{key: _float(value) for key, value in kwargs.items()})

    return in_fp32


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
