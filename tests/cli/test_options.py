"""What a user may write for a duration, a size and a tolerance, and what is said of the rest."""

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from torchproof.cli import options
from torchproof.types import Tolerance


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2m", 120),
        ("90s", 90),
        ("50ms", 0.05),
        ("1m30s", 90),
        ("1.5h", 5400),
        ("250us", 0.00025),
        (".5s", 0.5),
        (" 1s ", 1),
    ],
)
def test_durations(text: str, value: float) -> None:
    assert options.parse_duration(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("90", "write 90s, 90ms or 90m"),
        ("fast", "is not a duration"),
        ("1m 30s", "is not a duration"),
        ("30s1m", "the largest first"),
        ("1s1s", "each unit once"),
        ("-1s", "is not a duration"),
        ("0s", "above zero"),
        ("", "is not a duration"),
        ("infs", "is not a duration"),
    ],
)
def test_bad_durations(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options.parse_duration(text)


@given(hours=st.integers(0, 99), minutes=st.integers(0, 99), ms=st.integers(1, 10**6))
def test_duration_round_trip(hours: int, minutes: int, ms: int) -> None:
    text = f"{hours}h{minutes}m{ms}ms"
    assert options.parse_duration(text) == pytest.approx(hours * 3600 + minutes * 60 + ms / 1000)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("1 KiB", 1024), ("7B", 7), ("2gib", 2 << 30)],
)
def test_sizes(text: str, value: int) -> None:
    assert options.parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("512", "has no unit: write 512MiB"),
        ("2G", "write 2GiB or 2GB"),
        ("2Gi", "write 2GiB or 2GB"),
        ("2parsecs", "unknown unit 'parsecs'"),
        ("-2GiB", "is not a size"),
        ("0B", "above zero"),
        ("1e400GiB", "is not a size"),
        ("", "is not a size"),
    ],
)
def test_bad_sizes(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options.parse_size(text)


@given(st.integers(1, 10**6), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_size_round_trip(number: int, unit: str) -> None:
    size = options.parse_size(f"{number}{unit}")
    assert size % number == 0
    assert options.parse_size(f"{size}B") == size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("cos>=0.999", Tolerance(metric="cos", bound=0.999)),
        ("max_abs<=1e-3", Tolerance(metric="max_abs", bound=1e-3)),
        (" max_rel <= 0.01 ", Tolerance(metric="max_rel", bound=0.01)),
        ("max_abs<=0", Tolerance(metric="max_abs", bound=0.0)),
    ],
)
def test_tolerances(text: str, value: Tolerance) -> None:
    assert options.parse_tolerance(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cos<=0.999", "write cos>=0.999"),
        ("cos>0.9", "write cos>=0.9"),
        ("cos>=2", "between -1 and 1"),
        ("cos>=nan", "between -1 and 1"),
        ("max_abs>=1e-3", "write max_abs<=1e-3"),
        ("max_rel<=-1", "bounds none"),
        ("max_rel<=inf", "bounds none"),
        ("cosine>=0.9", "no metric 'cosine': write cos>=0.999, max_abs<=1e-3 or max_rel<=0.01"),
        ("cos>=high", "'high' in 'cos>=high' is not a number"),
        ("0.999", "is not a tolerance"),
    ],
)
def test_bad_tolerances(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options.parse_tolerance(text)


def test_as_click_options() -> None:
    @click.command()
    @click.option("--budget", type=options.DURATION, default="2m")
    @click.option("--memory", type=options.BYTE_SIZE)
    @click.option("--tolerance", type=options.TOLERANCE, default=Tolerance())
    @options.format_option
    def command(budget: float, memory: int | None, tolerance: Tolerance, format_: str) -> None:
        click.echo(f"{budget} {memory} {tolerance.metric} {format_}")

    run = CliRunner().invoke
    assert run(command, []).output == "120.0 None cos text\n"
    given = ["--budget", "5s", "--memory", "1KiB", "--tolerance", "max_abs<=1", "--format", "json"]
    assert run(command, given).output == "5.0 1024 max_abs json\n"
    bad = run(command, ["--budget", "90"])
    assert bad.exit_code == 2
    assert "'90' has no unit" in bad.output
