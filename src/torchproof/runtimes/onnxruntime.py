"""ONNX Runtime on the CPU: float32, and dynamic int8."""

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from torchproof.runtimes.base import Runtime, Source
from torchproof.target.rows import Batch, Run, stack
from torchproof.target.saved import onnx_files
from torchproof.types import CompileSeen, Environment, Precision, Target

FILE = "model.onnx"
# Quantizing Conv too made a ResNet-18 2.5 to 3 times slower than eager (measured; onnxruntime#20052 reports the same).
INT8_OPS = ["MatMul", "Gemm"]


class OnnxRuntime(Runtime):
    """``torch.onnx.export`` and an inference session; loads without the user's code."""

    name = "onnxruntime"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "int8")
    simplicity = 3
    extra = "onnx"
    modules = ("onnxruntime",)
    build_modules = ("onnx", "onnxscript")

    def unsupported(self, precision: Precision, environment: Environment, target: Target) -> str:
        return ""

    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        if precision == "int8":
            if "float32" not in built:
                raise RuntimeError("there is no float32 export to quantize")
            quantization = importlib.import_module("onnxruntime.quantization")
            quantization.quantize_dynamic(
                built["float32"] / FILE,
                folder / FILE,
                op_types_to_quantize=INT8_OPS,
                per_channel=True,  # one scale for a whole matrix broke MiniLM: cosine 0.91 against 0.98
                weight_type=quantization.QuantType.QInt8,
            )
        elif source.onnx_path is not None:
            model, *tensors = onnx_files(source.onnx_path)
            shutil.copyfile(model, folder / FILE)
            for file in tensors:
                copy = folder / file.relative_to(model.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        else:
            with torch.no_grad():
                program = torch.export.export(
                    source.flat(), source.example(), dynamic_shapes=(source.dynamic_shapes(),), strict=False
                )
                exported = torch.onnx.export(
                    program,
                    dynamo=True,
                    input_names=[spec.name for spec in source.signature.inputs],
                    output_names=[f"out.{spec.name}" for spec in source.signature.outputs],
                    verbose=False,
                )
            if exported is None:
                raise RuntimeError("torch.onnx.export returned nothing")
            exported.save(folder / FILE)
        self.load(source, precision, folder, 1)  # a file that this version can't load is no artifact
        return None

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Spinning threads starve each other beside a busy neighbour (measured: twofold throughput without).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        session = runtime.InferenceSession(str(folder / FILE), options, providers=["CPUExecutionProvider"])
        taken = [i.name for i in session.get_inputs()]  # an input that the graph ignores is not in the file
        names = [spec.name for spec in source.signature.outputs]

        def run(batch: Batch) -> Batch:
            arrays = session.run(None, {name: batch[name].numpy() for name in taken})
            return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

        run(stack(source.rows[:1], source.signature))
        return run

    def with_threads(self, run: Run, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        """A session has its threads for life, so this opens another one."""
        return self.load(source, precision, folder, num_threads)
