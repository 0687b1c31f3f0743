"""``torchproof doctor``: what this machine really offers, and what deserves attention."""

import shutil

import click
import msgspec

from torchproof import __version__
from torchproof.cli.options import format_option
from torchproof.machine import advice, cgroup, cores, environment, memory, software, torch_settings
from torchproof.render import doctor as render
from torchproof.types import encode
from torchproof.types.doctor import DoctorReport

_MAX_WIDTH = 100  # longer lines are hard to read


EPILOG = """\b
Examples:
  torchproof doctor
  torchproof doctor --format json
  OMP_NUM_THREADS=2 torchproof doctor       as torch sees it with this setting
"""


@click.command("doctor", epilog=EPILOG)
@format_option
def command(format_: str) -> None:
    """Show what this machine really offers, and what deserves attention.

    Usable cores are measured (0.3 s), torch is asked in a process of its own. Nothing is changed.
    """
    report = examine()
    if format_ == "json":
        click.echo(encode(report), nl=False)
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        click.echo(render.text(report, min(columns, _MAX_WIDTH)), nl=False)


def examine() -> DoctorReport:
    """Run every probe on this machine; takes as long as ``import torch`` and 0.3 s."""
    torch = torch_settings.torch_settings()  # first: its process must not run beside the measurement of the cores
    usable = cores.measure_usable_cores()
    siblings = cores.smt_siblings()
    report = DoctorReport(
        torchproof=__version__,
        environment=environment.read_environment(None if usable is None else usable.estimate),
        num_physical_cores=None if siblings is None else len(siblings),
        usable_cores=usable,
        memory_limit_bytes=cgroup.memory_limit(),
        available_bytes=memory.available_memory(),
        shm=memory.shared_memory(),
        malloc=memory.malloc_in_use(),
        cxx=software.cxx_compiler(),
        python_header=software.python_header(),
        extras=software.extras(),
        torch=torch,
        advice=(),
    )
    return msgspec.structs.replace(report, advice=advice.advise(report))
