"""The CPU's model and the instruction sets that compiled artifacts depend on."""

import platform
from collections.abc import Iterator
from pathlib import Path

from torchproof.machine.cgroup import read_text

# What the compilers behind torch, ONNX Runtime and OpenVINO dispatch on; the kernel's spelling, a fixed order.
_X86_FLAGS = (
    "sse4_1",
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_ARM_FLAGS = ("asimd", "bf16", "i8mm", "sve")


def cpu_model(root: Path = Path("/")) -> str:
    """The CPU's name, such as ``AMD EPYC 9654``; the architecture's name where the kernel gives none."""
    for key, value in _cpuinfo(root):
        if key in ("model name", "Model", "cpu model"):
            return value
    return platform.processor() or platform.machine()


def cpu_flags(root: Path = Path("/")) -> tuple[str, ...]:
    """Instruction sets present on every core, of those that compiled artifacts depend on; empty when unknown."""
    cores = [set(value.split()) for key, value in _cpuinfo(root) if key in ("flags", "Features")]
    if not cores:
        return ()
    common = set.intersection(*cores)
    return tuple(flag for flag in _X86_FLAGS + _ARM_FLAGS if flag in common)


def _cpuinfo(root: Path) -> Iterator[tuple[str, str]]:
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()
