"""Every way that a command can end has one form on stderr and one exit code, and the help needs nothing heavy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from torchproof.cli import main as entry
from torchproof.cli import options, stderr
from torchproof.errors import BundleError, LimitsError, RefusedError, UserCodeError

Run = Callable[..., int]
SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``torchproof try …`` with a function as that command's body."""
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(body: Callable[[], object], *args: str) -> int:
        @click.command("try")
        @click.option("--budget", type=options.DURATION)
        @click.argument("target", required=False)
        def command(budget: float | None, target: str | None) -> object:
            return body()

        module = ModuleType("torchproof_try")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchproof_try", module)
        monkeypatch.setitem(entry.COMMANDS, "try", entry.Entry("torchproof_try", "Try."))
        return entry.main(["try", *args])

    return invoke


def raising(exc: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise exc

    return body


def python(code: str, *, stdout: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": SRC, "COLUMNS": "80", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize(
    ("body", "code"), [(lambda: None, 0), (lambda: 1, 1), (lambda: 3, 3), (raising(click.exceptions.Exit(1)), 1)]
)
def test_the_command_gives_the_exit_code(run: Run, body: Callable[[], object], code: int) -> None:
    assert run(body) == code


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (RefusedError("cos 0.91 is below 0.999", help="tune again"), 1),
        (BundleError("cos 0.91 is below 0.999", help="tune again"), 2),
        (LimitsError("cos 0.91 is below 0.999", help="tune again"), 3),
    ],
)
def test_our_errors(run: Run, capsys: pytest.CaptureFixture[str], exc: Exception, code: int) -> None:
    assert run(raising(exc)) == code
    assert capsys.readouterr() == ("", "error: cos 0.91 is below 0.999\n  help: tune again\n")


def test_user_code_shows_the_users_traceback(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "Traceback (most recent call last):\n  File \"app.py\", line 3, in load\nKeyError: 'x'\n"
    assert run(raising(UserCodeError("calling load() of app.py:Net", trace))) == 2
    assert capsys.readouterr().err == trace + "error: calling load() of app.py:Net\n"


def test_interrupt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_is_said_to_be_one(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(ZeroDivisionError("one\ntwo"))) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "error: this is a bug in torchproof" in err


def test_a_broken_pipe_of_our_own_is_a_bug(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a stdout that went away is quiet: a trial's broken pipe isn't."""
    assert run(raising(BrokenPipeError(32, "Broken pipe"))) == 1
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "torchproof[torch]"), ("onnxruntime", "torchproof[onnx]"), ("uvicorn", "[serve]")]
)
def test_a_missing_package_names_its_extra(
    run: Run, capsys: pytest.CaptureFixture[str], package: str, extra: str
) -> None:
    assert run(raising(ModuleNotFoundError(f"No module named '{package}.x'", name=f"{package}.x"))) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: this command needs {package}, which is not installed\n  help: pip install ")
    assert extra in err


def test_a_missing_module_of_ours_is_a_bug(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(ModuleNotFoundError("No module named 'torchproof.x'", name="torchproof.x"))) == 1
    assert "this is a bug" in capsys.readouterr().err


def test_a_torch_that_breaks_at_import_is_no_bug_of_ours(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise AttributeError('no levels')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def body() -> None:
        import torch  # noqa: F401

    assert run(body) == 2
    assert capsys.readouterr().err.startswith("error: `import torch` raises AttributeError: no levels\n  help: ")


@pytest.mark.parametrize(
    ("args", "error", "help"),
    [
        (["--bugdet", "2m"], "error: no such option", "usage: torchproof try [OPTIONS] [TARGET]"),
        (["--budget", "90"], "error: --budget: '90' has no unit: write 90s, 90ms or 90m\n", "usage: torchproof try"),
        (["--budget"], "error: option '--budget' requires an argument\n", "more with `torchproof try --help`"),
        (["a", "b"], "error: got unexpected extra argument (b)\n", "more with `torchproof try --help`"),
    ],
)
def test_wrong_use(run: Run, capsys: pytest.CaptureFixture[str], args: list[str], error: str, help: str) -> None:
    assert run(lambda: None, *args) == 2
    err = capsys.readouterr().err
    assert err.startswith(error)
    assert help in " ".join(err.split())


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["tnue"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'tnue'\n  help: did you mean `torchproof tune`?\n"
    assert entry.main(["zzz"]) == 2
    assert "the commands are check, tune, train, serve, explain, doctor" in capsys.readouterr().err


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == 2
    out, err = capsys.readouterr()
    assert "Commands:" in out + err


def test_messages_wrap_and_paths_stay_whole(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/srv/" + "long-folder/" * 9 + "app.py:Net"
    exc = BundleError(f"{'word ' * 20}{path} has changed since it was written", help="again " * 30)
    run(raising(exc))
    err = capsys.readouterr().err
    assert path in err
    assert all(len(line) <= 80 or path in line for line in err.splitlines())
    assert err.splitlines()[-1].startswith("        again")


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_on_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    written: list[str] = []
    monkeypatch.setattr(stderr, "_write", written.append)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    stderr.error("no", help="yes")
    assert ("\x1b[" in "".join(written)) is coloured
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    written.clear()
    stderr.error("no", help="yes")
    assert "".join(written) == "error: no\n  help: yes\n"


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    done = python(
        "import sys; from torchproof.cli.main import main; code = main(sys.argv[1:] or " + repr(args) + ")\n"
        "heavy = {'torch', 'numpy', 'rich', 'msgspec', 'psutil'} | {n for n in sys.modules if n in "
        "{'torchproof.cli.' + c for c in ('check', 'tune', 'serve', 'explain', 'doctor')}}\n"
        "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)"
    )
    assert done.stderr == "[] 0\n"
    assert done.stdout


def test_help_lists_every_command_and_fits_80_columns() -> None:
    out = python("from torchproof.cli.main import main; main(['--help'])").stdout
    assert all(name in out for name in entry.COMMANDS)
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("name", sorted(entry.COMMANDS))
def test_every_command_of_the_table_has_its_own_help(name: str) -> None:
    done = python(f"from torchproof.cli.main import main; raise SystemExit(main([{name!r}, '--help']))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: torchproof {name} ")


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "torchproof", "--version"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": SRC}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "torchproof")


def test_a_reader_that_went_away_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    done = python("from torchproof.cli.main import main; raise SystemExit(main(['--help']))", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_is_one_clear_line() -> None:
    with open("/dev/full", "w") as full:
        done = python("from torchproof.cli.main import main; raise SystemExit(main(['--help']))", stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout can't be written: no space left on device\n  help: ")
    assert done.stderr.count("\n") == 2
