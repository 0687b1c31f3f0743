"""``torchproof doctor`` as text."""

import textwrap
from collections.abc import Iterator

from torchproof.render import units
from torchproof.types.doctor import DoctorReport, UsableCores
from torchproof.types.environment import Environment

_LABEL_WIDTH = 11  # the longest label and two spaces
_UNKNOWN = "unknown"


def text(report: DoctorReport, width: int = 80) -> str:
    """The machine in one line for each fact, then what deserves attention; wrapped at ``width`` columns."""
    environment = report.environment
    rows = [
        ("cores", _cores(report)),
        ("usable", _usable(report.usable_cores)),
        ("memory", _memory(report)),
        ("/dev/shm", _shm(report)),
        ("malloc", report.malloc or _UNKNOWN),
        ("cpu", environment.cpu_model or _UNKNOWN),
        ("cpu flags", " ".join(environment.cpu_flags) or _UNKNOWN),
        ("compiler", _compiler(report)),
        ("torch", _torch(report)),
        ("packages", _packages(environment)),
        ("extras", "\n".join(_extras(report))),
        ("variables", "\n".join(f"{name}={value}" for name, value in environment.variables.items()) or "none set"),
    ]
    lines = textwrap.wrap(
        f"torchproof {report.torchproof}, Python {environment.python}, {environment.platform}",
        width,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines.append("")
    for label, value in rows:
        lines += _row(label, value, width)
    lines.append("")
    if not report.advice:
        lines.append("nothing here needs attention")
    for advice in report.advice:
        lines += _paragraph("attention  ", advice.message, width)
        lines += _paragraph("  fix: ", advice.fix, width)
    return "\n".join(lines) + "\n"


def _cores(report: DoctorReport) -> str:
    allowed, physical = report.environment.num_cores, report.num_physical_cores
    parts = [f"{allowed} by affinity", "physical cores unknown" if physical is None else f"{physical} physical"]
    if physical is not None and physical < allowed:
        parts[-1] += " (SMT)"
    quota = report.environment.cpu_quota
    parts.append("no cgroup quota" if quota is None else f"cgroup quota {quota:.2f}")
    return ", ".join(parts)


def _usable(usable: UsableCores | None) -> str:
    if usable is None:
        return f"{_UNKNOWN}: the measuring processes could not be started"
    estimate, low, high = (f"{value:.2f}" for value in (usable.estimate, usable.low, usable.high))
    return f"{estimate} [{low}, {high}] cores of work by {usable.num_processes} busy processes just now"


def _memory(report: DoctorReport) -> str:
    parts = [units.size(report.environment.memory_bytes)]
    if report.available_bytes is not None:
        parts.append(f"{units.size(report.available_bytes)} available")
    parts.append("the cgroup's limit" if report.memory_limit_bytes is not None else "no cgroup limit")
    return ", ".join(parts)


def _shm(report: DoctorReport) -> str:
    if report.shm is None:
        return "none"
    return f"{units.size(report.shm.size_bytes)}, {units.size(report.shm.free_bytes)} free"


def _compiler(report: DoctorReport) -> str:
    return f"{report.cxx or 'no C++ compiler'}, {'Python.h' if report.python_header else 'no Python.h'}"


def _torch(report: DoctorReport) -> str:
    version = report.environment.versions.get("torch")
    if report.torch is None or version is None:
        return "not installed; check, tune and serve need it: pip install torch"
    if report.torch.error:
        return f"{version}, can't be imported: {report.torch.error}"
    parts = [version, f"{report.torch.num_threads} intra-op and {report.torch.num_interop_threads} inter-op threads"]
    return ", ".join([*parts, *([report.torch.openmp] if report.torch.openmp else [])])


def _packages(environment: Environment) -> str:
    others = [f"{name} {version}" for name, version in environment.versions.items() if name != "torch"]
    return ", ".join(others) or "none"


def _extras(report: DoctorReport) -> Iterator[str]:
    complete = [extra.name for extra in report.extras if not extra.missing]
    if complete:
        yield f"complete: {', '.join(complete)}"
    for extra in report.extras:
        if extra.missing:
            yield f"{extra.name} lacks {', '.join(extra.missing)}: {extra.install}"


def _row(label: str, value: str, width: int) -> list[str]:
    lines: list[str] = []
    for part in value.splitlines() or [""]:
        lines += _paragraph(" " * _LABEL_WIDTH if lines else label.ljust(_LABEL_WIDTH), part, width)
    return lines


def _paragraph(start: str, message: str, width: int) -> list[str]:
    return textwrap.wrap(
        message,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
