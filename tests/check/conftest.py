"""Audits a module as if it were the user's, without a file."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchproof.check import Audit, audit
from torchproof.target.service import Service
from torchproof.types import Target

TARGET = Target(reference="planted:service", kind="python", module="planted", name="service")
AuditOf = Callable[..., Audit]


class Planted(Service):
    """Serves a module; its samples are the model's inputs, as rows."""

    def __init__(self, module: nn.Module, samples: Sequence[Any]) -> None:
        self.module = module
        self.inputs = samples

    def load(self) -> nn.Module:
        return self.module

    def encode(self, request: Any) -> Any:
        return request

    def decode(self, outputs: Any, request: Any) -> Any:
        return outputs.tolist()

    def samples(self) -> Sequence[Any]:
        return self.inputs


@pytest.fixture
def audit_of(monkeypatch: pytest.MonkeyPatch) -> AuditOf:
    """``audit_of(module, samples, variable_dims)``; by default six rows of four numbers."""

    def run(
        module: nn.Module,
        samples: Sequence[Any] | None = None,
        variable_dims: Mapping[str, Mapping[int, str]] | None = None,
    ) -> Audit:
        service = Planted(module, numbers() if samples is None else samples)
        service.variable_dims = variable_dims or {}  # type: ignore[misc]
        planted = ModuleType("planted")
        planted.service = service  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "planted", planted)
        return audit(TARGET)

    return run


def numbers(num: int = 6, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(num)]
