"""Saved models as targets: torch.export archives, TorchScript and ONNX."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchproof.errors import TargetError
from torchproof.target.modules import ModuleService
from torchproof.target.usercode import first_line


def open_exported(path: Path) -> ModuleService:
    """A ``.pt2`` archive, with the example inputs that it was exported with.

    Its first dim counts as the batch dim where it was exported as dynamic; else the example is one request.
    """
    try:
        program = torch.export.load(path)
    except Exception as exc:  # noqa: BLE001  a broken archive raises whatever its parser does
        raise TargetError(f"{path}: not readable by torch.export: {first_line(exc)}", help="export it again") from None
    args, kwargs = program.example_inputs or ((), {})
    example = {**dict(zip(_input_names(program, len(args)), args, strict=False)), **kwargs}
    inputs = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in _user_inputs(program)]
    if not all(isinstance(value, Tensor) for value in inputs):
        raise TargetError(f"{path} has inputs that are no tensors", help="export a module that takes tensors only")
    batched = all(value.dim() and not isinstance(value.shape[0], int) for value in inputs)
    module = SavedModule(program.module(), tuple(kwargs))
    return ModuleService(module, [example] if example else [], batched=batched)


def _user_inputs(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    return tuple(str(name) for name in program.graph_signature.user_inputs)


def _input_names(program: torch.export.ExportedProgram, num_args: int) -> tuple[str, ...]:
    return _user_inputs(program)[:num_args]


class SavedModule(nn.Module):
    """A loaded graph whose mode was fixed when it was saved: ``eval()`` and ``train()`` have nothing to change."""

    def __init__(self, graph: nn.Module, keywords: tuple[str, ...]) -> None:
        """Args: keywords, the last inputs, which the graph takes by name only."""
        super().__init__()
        self.graph = graph
        self.keywords = keywords
        self.training = False

    def train(self, mode: bool = True) -> "SavedModule":
        return self

    def forward(self, *tensors: Tensor) -> Any:
        """The graph on its inputs in order."""
        num_args = len(tensors) - len(self.keywords)
        return self.graph(*tensors[:num_args], **dict(zip(self.keywords, tensors[num_args:], strict=True)))


def open_torchscript(path: Path) -> ModuleService:
    """A TorchScript archive; it holds no example inputs, so its requests come from a traffic file."""
    try:
        module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as exc:
        raise TargetError(f"{path}: not readable by torch.jit: {first_line(exc)}", help="save it again") from None
    service = ModuleService(module, ())
    service.names = [a.name for a in module.forward.schema.arguments[1:] if not a.has_default_value()]
    return service


class OnnxModule(nn.Module):
    """An ONNX file as a module: ONNX Runtime with its default settings, as people run it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if importlib.util.find_spec("onnxruntime") is None:
            raise TargetError(f"{path.name} needs ONNX Runtime", help="pip install 'torchproof[onnx]'")
        runtime = importlib.import_module("onnxruntime")
        try:
            self.session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as exc:  # noqa: BLE001  onnxruntime's own exceptions share no public base
            raise TargetError(
                f"{path}: not readable by ONNX Runtime: {first_line(exc)}", help="export it again"
            ) from None
        self.training = False
        self.input_names = [i.name for i in self.session.get_inputs()]
        self.output_names = [o.name for o in self.session.get_outputs()]
        self.batched = all(i.shape and not isinstance(i.shape[0], int) for i in self.session.get_inputs())

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Tensors in the order of the file's inputs -> its outputs by name."""
        feeds = {name: tensor.numpy() for name, tensor in zip(self.input_names, tensors, strict=True)}
        return {
            name: torch.from_numpy(array)
            for name, array in zip(self.output_names, self.session.run(None, feeds), strict=True)
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnnxModule":
        return self  # a session has no copy; it has no state to protect either


def onnx_files(path: Path) -> list[Path]:
    """The file, and the files beside it that hold its larger tensors: exporters move those out of the file.

    Raises:
        TargetError: one of them is missing, or lies outside the folder.
    """
    if importlib.util.find_spec("onnx") is None:
        raise TargetError(f"{path.name} needs the onnx package", help="pip install 'torchproof[onnx]'")
    model = importlib.import_module("onnx").load(path, load_external_data=False)
    names = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    for name in sorted(names):
        if not (path.parent / name).is_file() or ".." in Path(name).parts or Path(name).is_absolute():
            raise TargetError(f"{path.name} keeps tensors in {name}, which is not beside it", help="export it again")
    return [path, *(path.parent / name for name in sorted(names))]


def open_onnx(path: Path) -> ModuleService:
    """An ONNX file; it holds no example inputs, so its requests come from a traffic file."""
    module = OnnxModule(path)
    service = ModuleService(module, (), batched=module.batched)
    service.names = module.input_names
    service.dtypes = {i.name: ONNX_DTYPES[i.type] for i in module.session.get_inputs() if i.type in ONNX_DTYPES}
    unknown = [f"{i.name}: {i.type}" for i in module.session.get_inputs() if i.type not in ONNX_DTYPES]
    if unknown:
        raise TargetError(
            f"{path.name} has inputs that are no tensors of numbers: {', '.join(unknown)}",
            help="cut the pre-processing out of the file and do it in a Service",
        )
    return service


ONNX_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}
