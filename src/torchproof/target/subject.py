"""A Target becomes a Subject: the user's Service with its sampled requests, encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from torchproof.errors import TargetError, TrafficError
from torchproof.target import huggingface, saved
from torchproof.target.lookup import call, check_complete, find, is_missing
from torchproof.target.modules import ModuleService, common_dtypes, from_factory
from torchproof.target.recipe import is_recipe
from torchproof.target.request import RequestError, convert, request_type
from torchproof.target.rows import Row, named_tensors, sizes_of
from torchproof.target.service import Service
from torchproof.target.signature import parameter_names
from torchproof.target.traffic import read_traffic
from torchproof.target.usercode import first_line, import_target, user_code
from torchproof.types import Signature, Target, Traffic


def open_service(target: Target) -> Service:
    """The user's Service, or one made around a bare module or a saved model. Nothing is loaded yet.

    Raises:
        TargetError: the name isn't there, or it is no Service.
        UserCodeError: the user's code raised.
    """
    path = Path(target.path or "")
    if target.kind == "exported":
        return saved.open_exported(path)
    if target.kind == "torchscript":
        return saved.open_torchscript(path)
    if target.kind == "onnx":
        return saved.open_onnx(path)
    if target.kind == "huggingface":
        return huggingface.HuggingFaceText(path)
    if is_recipe(target):
        raise TargetError(
            f"{target.reference} is a tp.Recipe, and this command is for models that are served",
            help="torchproof train trains it, torchproof tune finds how best; then name a tp.Service with its weights",
        )
    name, value = find(import_target(target), target, Service)
    service = _make(value, name, target)
    methods = "a Service has load, encode, decode and samples"
    check_complete(service, name, Service, ("load", "encode", "decode"), methods)
    return service


def _make(value: Any, name: str, target: Target) -> Service:
    if isinstance(value, Service):
        return value
    if isinstance(value, nn.Module):
        return from_factory(value, target.reference)
    if not callable(value):
        raise TargetError(
            f"{target.reference} is a {type(value).__name__}, no Service",
            help="a target is a tp.Service, or a function that returns (nn.Module, example inputs)",
        )
    return from_factory(call(value, name, target), target.reference)


def load_module(service: Service, weights: Path | None = None) -> nn.Module:
    """What ``load()`` returns, as it returns it.

    Args:
        weights: a safetensors file to put over the module's own weights: a load() with random weights then gives the
            same model in every process.
    """
    with user_code("load()"):
        module = service.load()
    if not isinstance(module, nn.Module):
        raise TargetError(f"load() returned a {type(module).__name__}", help="return the torch.nn.Module")
    if weights is not None:
        load_model(module, weights)
    return module


def save_weights(module: nn.Module, path: Path) -> bool:
    """Writes the weights as safetensors; False where the module has none or its state is more than tensors."""
    state = module.state_dict()
    if not state or not all(isinstance(v, torch.Tensor) for v in state.values()):
        return False
    save_model(module, str(path))
    return True


@dataclass(frozen=True)
class Subject:
    """A Service with its sampled requests, and their tensors."""

    target: Target
    service: Service
    source: str
    requests: list[Any]
    rows: list[Row]

    @property
    def batched(self) -> bool:
        """False for a saved model whose first dim is fixed."""
        return self.service.batched if isinstance(self.service, ModuleService) else True

    def traffic(self, signature: Signature) -> Traffic:
        """The sizes of the sampled requests."""
        sizes = [sizes_of(row, signature.inputs) for row in self.rows]
        return Traffic(
            source=self.source,
            num_requests=len(self.rows),
            sizes={dim: tuple(sorted(s[dim] for s in sizes)) for dim in (sizes[0] if sizes else {})},
        )


def sample_requests(service: Service, traffic: Path | None) -> tuple[str, list[tuple[str, Any]]]:
    """The requests, each with a name for errors, and where they come from.

    Raises:
        TargetError: ``samples()`` gives none, or one that doesn't fit the annotation of ``encode``.
        TrafficError: see ``read_traffic``; or a line that doesn't fit the annotation.
    """
    type_ = request_type(service)
    if traffic is not None:
        requests = []
        for number, value in read_traffic(traffic):
            try:
                requests.append((f"{traffic.name}, line {number}", convert(value, type_)))
            except RequestError as exc:
                raise TrafficError(f"{traffic}, line {number}: {exc}", help=exc.help) from None
        return traffic.name, requests
    if is_missing(service, "samples", Service):
        raise TargetError(f"{type(service).__name__} has no samples()", help="write it, or pass --traffic")
    with user_code("samples()"):
        samples = list(service.samples())
    if not samples:
        raise TargetError("samples() is empty", help="return a few representative requests, or pass --traffic")
    requests = []
    for number, sample in enumerate(samples):
        try:
            requests.append((f"sample {number}", convert(sample, type_)))
        except RequestError as exc:
            raise TargetError(f"sample {number} of samples(): {exc}", help=exc.help) from None
    return "samples()", requests


def encode_requests(service: Service, requests: Sequence[tuple[str, Any]], names: Sequence[str]) -> list[Row]:
    """Every request's tensors.

    Raises:
        UserCodeError: ``encode`` raised.
        TargetError: it returned something else than tensors.
    """
    rows = []
    for what, request in requests:
        with user_code(f"encode() of {what}"):
            value = service.encode(request)
        rows.append(named_tensors(value, names, what=f"encode() of {what}"))
    return rows


def encode_without_load(service: Service, request: Any) -> str:
    """Calls ``encode`` before ``load()``; the first line of what it raised, empty when it works."""
    try:
        service.encode(request)
    except Exception as exc:  # noqa: BLE001  the user's code may raise anything
        return first_line(exc)
    return ""


def make_subject(
    target: Target, service: Service, module: nn.Module, source: str, requests: Sequence[tuple[str, Any]]
) -> Subject:
    """The subject of a loaded service, from what ``sample_requests`` gave."""
    names = service.names if isinstance(service, ModuleService) else parameter_names(module)
    rows = encode_requests(service, requests, names)
    if isinstance(service, ModuleService):
        service.typed_by(common_dtypes(rows))
        rows = encode_requests(service, requests, names)
        service.measured_on(rows)
    return Subject(target=target, service=service, source=source, requests=[r for _, r in requests], rows=rows)
