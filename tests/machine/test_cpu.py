"""The flags are those that artifacts depend on, in a fixed order, and only what every core has."""

from pathlib import Path

from torchproof.machine import cpu


def write(root: Path, text: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)
    return root


def test_x86_flags_are_filtered_and_ordered(tmp_path: Path) -> None:
    core = "model name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu avx2 sse avx sse4_2 avx512_bf16 avx512f fma\n\n"
    root = write(tmp_path, core * 2)
    assert cpu.cpu_flags(root) == ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16")
    assert cpu.cpu_model(root) == "Some CPU @ 2.0GHz"


def test_a_flag_that_one_core_lacks_does_not_count(tmp_path: Path) -> None:
    assert cpu.cpu_flags(write(tmp_path, "flags : avx avx2\n\nflags : avx\n")) == ("avx",)


def test_aarch64(tmp_path: Path) -> None:
    root = write(tmp_path, "processor : 0\nFeatures : fp asimd evtstrm bf16 sve i8mm\n")
    assert cpu.cpu_flags(root) == ("asimd", "bf16", "i8mm", "sve")


def test_a_machine_without_cpuinfo(tmp_path: Path) -> None:
    assert cpu.cpu_flags(tmp_path) == ()
    assert isinstance(cpu.cpu_model(tmp_path), str)
