"""The CPU's model and the instruction sets that compiled artifacts depend on."""

import platform
from collections.abc import Iterator
from pathlib import Path

from torchproof.machine.cgroup import read_text

# What torch, ONNX Runtime and OpenVINO dispatch on, and what else g++ -march=native may emit, which inductor calls
# (gcc's x86 options); the kernel's spelling, a fixed order.
_X86_FLAGS = """
    popcnt abm movbe bmi1 bmi2 adx aes pclmulqdq sha_ni rdrand rdseed rdpid clflushopt clwb clzero fsgsbase
    xsave xsaveopt xsavec xsaves sse4_1 sse4_2 sse4a xop fma4 tbm avx avx2 fma f16c vaes vpclmulqdq gfni
    avx512f avx512cd avx512bw avx512vl avx512dq avx512ifma avx512vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq
    avx512_vp2intersect avx512_vnni avx_vnni avx_ifma avx_vnni_int8 avx_ne_convert avx512_bf16 avx512_fp16
    amx_tile amx_bf16 amx_int8 amx_fp16 movdiri movdir64b serialize cldemote waitpkg
"""
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
    return tuple(flag for flag in (*_X86_FLAGS.split(), *_ARM_FLAGS) if flag in common)


def _cpuinfo(root: Path) -> Iterator[tuple[str, str]]:
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()
