"""Every runtime answers as eager does, at batch sizes and lengths that it was not built with."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from torchproof.machine.environment import read_environment
from torchproof.runtimes import RUNTIMES, open_runtime, skip_reason
from torchproof.runtimes.eager import BF16_FLAGS, Eager
from torchproof.types import Precision, Target

Fresh = Callable[[], Callable[..., Any]]
PACKAGE = Path(__file__).parents[2] / "src" / "torchproof" / "runtimes"
SHAPES = ((1, 12), (2, 7), (1, 1), (3, 1), (5, 9), (1, 30), (33, 4))  # the example has 2 x 12
ONE_ROW = ((1, 12), (1, 7), (1, 1), (1, 30))
ROUNDING = 1e-5  # float32, the order of a sum of 30 values
LOW_PRECISION = 0.1  # bf16 keeps 8 bits of a value, int8 weights 7: the answer is the same, not its digits

IN_PROCESS: list[tuple[str, Precision, float]] = [
    ("eager", "float32", 0.0),
    ("eager", "bfloat16", LOW_PRECISION),
    ("torchscript", "float32", ROUNDING),
    ("onnxruntime", "float32", ROUNDING),
    ("onnxruntime", "int8", LOW_PRECISION),
]
PYTHON = Target(reference="app.py:Net", kind="python", path="/app.py")
COMPILED = ["inductor", "aotinductor"]


def build_and_load(bench: Any, folder: Path, runtime: str, precision: Precision) -> None:
    built: dict[str, str] = {}
    for step in ["float32", "int8"] if precision == "int8" else [precision]:
        bench.build(runtime, step, str(folder / step), built)
        built[step] = str(folder / step)
    bench.load(runtime, precision, str(folder / precision), 1)


@pytest.mark.parametrize("returns", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize(("runtime", "precision", "bound"), IN_PROCESS)
def test_answers_as_eager_does_at_every_size(
    bench: Any, tmp_path: Path, runtime: str, precision: Precision, bound: float, returns: str
) -> None:
    """Two inputs in, a tensor, a tuple or a dict out; names, dtypes and shapes are those of eager."""
    bench.open(returns=returns, batching=True)
    build_and_load(bench, tmp_path, runtime, precision)
    errors = bench.errors(SHAPES)
    assert max(errors.values()) <= bound, errors
    assert bound in (0.0, ROUNDING) or max(errors.values()) > ROUNDING, "this precision was not used at all"
    assert not bench.needs_grad()


@pytest.mark.parametrize(("runtime", "precision", "bound"), IN_PROCESS)
def test_builds_for_one_row_where_rows_may_not_share_a_batch(
    bench: Any, tmp_path: Path, runtime: str, precision: Precision, bound: float
) -> None:
    bench.open(returns="dict", batching=False)
    build_and_load(bench, tmp_path, runtime, precision)
    errors = bench.errors(ONE_ROW)
    assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize(("runtime", "precision", "bound"), IN_PROCESS)
def test_another_thread_count_gives_the_same_answers(
    bench: Any, tmp_path: Path, runtime: str, precision: Precision, bound: float
) -> None:
    bench.open(returns="tuple", batching=True)
    build_and_load(bench, tmp_path, runtime, precision)
    bench.set_threads(2)
    assert max(bench.errors(SHAPES).values()) <= bound
    assert torch.get_num_threads() == 2 or runtime == "onnxruntime", "onnxruntime has threads of its own"


@pytest.mark.parametrize("runtime", COMPILED)
def test_compiled_artifacts_answer_in_another_process_as_eager_does(fresh: Fresh, tmp_path: Path, runtime: str) -> None:
    """Built in one process, loaded in another."""
    artifact = str(tmp_path / "artifact")
    builder = fresh()
    builder("open", returns="dict", batching=True)
    builder("build", runtime=runtime, precision="float32", folder=artifact, built={})
    loader = fresh()
    loader("open", returns="dict", batching=True)
    loader("load", runtime=runtime, precision="float32", folder=artifact, num_threads=1)
    errors = loader("errors", shapes=SHAPES)
    assert max(errors.values()) <= ROUNDING, errors
    assert loader("needs_grad") is False


def test_int8_without_a_float32_export_says_so(bench: Any, tmp_path: Path) -> None:
    bench.open(returns="tensor", batching=True)
    with pytest.raises(RuntimeError, match="no float32 export"):
        bench.build("onnxruntime", "int8", str(tmp_path / "int8"), {})


def test_a_broken_artifact_is_an_error_and_no_answer(bench: Any, tmp_path: Path) -> None:
    bench.open(returns="tensor", batching=True)
    for runtime, file in (("onnxruntime", "model.onnx"), ("torchscript", "model.ts")):
        folder = tmp_path / runtime
        bench.build(runtime, "float32", str(folder), {})
        (folder / file).write_bytes((folder / file).read_bytes()[:200])
        with pytest.raises(Exception, match=r"\w"):
            bench.load(runtime, "float32", str(folder), 1)


def test_the_table_lists_every_file() -> None:
    """A new runtime is one new file and one line."""
    files = {path.stem for path in PACKAGE.glob("*.py") if "(Runtime):" in path.read_text()}
    assert set(RUNTIMES) == files
    assert next(iter(RUNTIMES)) == "eager", "the reference comes first"


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_describes_itself(name: str) -> None:
    runtime = open_runtime(RUNTIMES[name])
    assert runtime.name == name
    assert runtime.precisions[0] == "float32"
    assert bool(runtime.extra) == bool(runtime.modules)


def test_no_two_runtimes_are_equally_simple() -> None:
    """Else a tie between them would depend on the order of the table."""
    ranks = [open_runtime(path).simplicity for path in RUNTIMES.values()]
    assert len(set(ranks)) == len(ranks)


class NeedsMore(Eager):
    extra: ClassVar[str] = "sparkle"
    modules: ClassVar[tuple[str, ...]] = ("msgspec", "no_such_module_a")
    build_modules: ClassVar[tuple[str, ...]] = ("no_such_module_b",)


def test_a_missing_module_names_the_pip_line() -> None:
    """What building needs besides is not missed where an artifact is only loaded."""
    for to_build, named in ((True, "no_such_module_a, no_such_module_b"), (False, "no_such_module_a")):
        reason = skip_reason(NeedsMore(), "float32", read_environment(), PYTHON, to_build=to_build)
        assert reason == f"needs {named}: pip install 'torchproof[sparkle]'"


@pytest.mark.parametrize("name", RUNTIMES)
def test_an_onnx_file_is_run_by_onnxruntime_only(name: str) -> None:
    """And by the reference, which stands for it with its default settings."""
    target = Target(reference="model.onnx", kind="onnx", path="/model.onnx")
    reason = skip_reason(open_runtime(RUNTIMES[name]), "float32", read_environment(), target, to_build=True)
    assert bool(reason) == (name not in ("eager", "onnxruntime"))
    assert not skip_reason(open_runtime(RUNTIMES[name]), "float32", read_environment(), PYTHON, to_build=True)


def test_the_extras_exist() -> None:
    """What the pip line names is in pyproject.toml."""
    extras = tomllib.loads((PACKAGE.parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for runtime in (open_runtime(path) for path in RUNTIMES.values()):
        assert not runtime.extra or runtime.extra in extras


@pytest.mark.parametrize(
    ("flags", "skipped"),
    [((), True), (("avx2", "avx512f", "avx512vl"), True), *(((flag,), False) for flag in sorted(BF16_FLAGS))],
)
def test_bf16_is_skipped_where_the_cpu_has_no_arithmetic_for_it(flags: tuple[str, ...], skipped: bool) -> None:
    environment = msgspec.structs.replace(read_environment(), cpu_flags=flags)
    reason = skip_reason(Eager(), "bfloat16", environment, PYTHON, to_build=True)
    assert reason == ("this CPU has no bf16 arithmetic" if skipped else "")
    assert skip_reason(Eager(), "float32", environment, PYTHON, to_build=True) == ""


def test_importing_the_table_imports_no_runtime() -> None:
    """A user without onnxruntime can import everything."""
    code = (
        "import sys, torchproof.runtimes\nprint([m for m in sys.modules if m.split('.')[0] in ('onnxruntime', 'onnx')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
