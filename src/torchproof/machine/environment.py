"""The facts of this machine that every stored measurement carries, and those that a plan rests on."""

import platform

from torchproof.machine.cgroup import cpu_quota
from torchproof.machine.cores import num_cores
from torchproof.machine.cpu import cpu_flags, cpu_model
from torchproof.machine.memory import usable_memory
from torchproof.machine.software import variables, versions
from torchproof.types.environment import Environment


def read_environment(usable_cores: float | None = None) -> Environment:
    """This machine and its software, read now; imports none of it.

    Args:
        usable_cores: the estimate of ``measure_usable_cores``, where it was measured.
    """
    return Environment(
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_model=cpu_model(),
        cpu_flags=cpu_flags(),
        num_cores=num_cores(),
        cpu_quota=cpu_quota(),
        usable_cores=usable_cores,
        memory_bytes=usable_memory(),
        versions=versions(),
        variables=variables(),
    )


def plan_facts(environment: Environment) -> dict[str, str]:
    """By name, what decides which candidate is fastest; a package that is not installed is left out."""
    return {
        "cpu_model": environment.cpu_model,
        "num_cores": str(environment.num_cores),
        **{name: environment.versions[name] for name in ("torch", "onnxruntime") if name in environment.versions},
    }
