"""Bad input ends with exit code 2, one error with its cure, and nothing written; the user's traceback, never ours."""

from collections.abc import Callable
from pathlib import Path

import pytest

import torchproof
from torchproof.cli.main import main

Write = Callable[..., Path]
OURS = str(Path(torchproof.__file__).parent)

SERVICE = """
class Net(tp.Service):
    def load(self):
        return Model().eval()

    def encode(self, request: list[float]):
        return torch.tensor(request)

    def decode(self, outputs, request):
        return outputs.tolist()

    def samples(self):
        return [[1.0, 2.0], [3.0, 4.0]]

class Model(nn.Module):
    def forward(self, x):
        return x * 2
"""
SAMPLES = "return [[1.0, 2.0], [3.0, 4.0]]"
FORWARD = "return x * 2"


def check(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What ``torchproof check`` says on stderr, in one line; it exits 2, prints no result and no frame of ours."""
    code = main(["check", *map(str, args)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert OURS not in err
    return " ".join(err.split())


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("gone.py", "error: gone.py: no such file or folder help: a target is"),
        ("gone.py:Net", "error: gone.py: no such file or folder help: a target is"),
        ("gone.pt2", "error: gone.pt2: no such file or folder help: a target is"),
        ("gone_package.gone:Net", "error: there is no module 'gone_package.gone' help: check the name"),
        (".", "error: . is a folder without config.json help: a target is"),
    ],
)
def test_what_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error in check(capsys, reference)


@pytest.mark.parametrize(
    ("old", "new", "name", "error"),
    [
        ("", "", ":Nat", "has no 'Nat' help: did you mean Net? names there: Net, Model"),
        ("", "", ":torch", "app.py:torch is a module, no Service help: a target is a tp.Service"),
        ("class Net(tp.Service)", "class Net", ":Net", "app.py:Net gives a Net help: a target is a tp.Service"),
        (
            "class Net(tp.Service)", "class Net(tp.Recipe)", ":Net",
            "app.py:Net is a tp.Recipe, and this command is for models that are served help: torchproof train trains",
        ),
        ("class Net(tp.Service)", "class Net", "", "app.py defines no tp.Service help: name one after a colon"),
        ("def load", "def lod", "", "error: Net has no load() help: a Service has"),
        ("return Model().eval()", "return 3", "", "error: load() returned a int help: return the torch.nn.Module"),
        (SAMPLES, "return []", "", "error: samples() is empty help: return a few"),
        ("def samples", "def sample", "", "error: Net has no samples() help: write it, or pass --traffic"),
        (SAMPLES, "return [['a']]", "", "error: sample 0 of samples(): Expected `float`, got `str` - at `$[0]` help:"),
        (
            SAMPLES, "return [[1.0], [1.0, 2.0]]", "",
            "error: sample 1: dim 0 of input 'x' is 2, in sample 0 it is 1, and it is not declared variable "
            'help: declare it: variable_dims = {"x": {0: "length"}}',
        ),
        (FORWARD, "return {'a': {'b': x}}", "", "error: output 'a' is a nested dict help: supported are"),
        (FORWARD, "return [x, 'label']", "", "error: output 'output1' is a str help: supported are"),
        (FORWARD, "return 3", "", "error: the model returned a int help: supported are"),
        (FORWARD, "return x.sum()", "", "no batch dim in front help: return outputs with the batch dim first"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_used(
    write: Write, capsys: pytest.CaptureFixture[str], old: str, new: str, name: str, error: str
) -> None:
    path = write(SERVICE.replace(old, new, 1) if old else SERVICE)
    assert error in check(capsys, f"{path}{name}")


@pytest.mark.parametrize(
    ("old", "new", "error", "line"),
    [
        (SAMPLES, "return open('/gone')", "samples() raised FileNotFoundError", "return open('/gone')"),
        (SAMPLES, "yield [1.0]; yield {}['x']", "samples() raised KeyError", "yield [1.0]; yield {}['x']"),
        ("torch.tensor(request)", "request.x", "encode() of sample 0 raised AttributeError", "return request.x"),
        ("return Model().eval()", "1 / 0", "load() raised ZeroDivisionError", "1 / 0"),
        (FORWARD, "return x @ x", "running the model on a sample raised RuntimeError", "return x @ x"),
        ("def load(self):", "1 / 0", "importing app.py raised IndentationError", "return Model().eval()"),
        ("class Model", "1 / 0\nclass Model", "importing app.py raised ZeroDivisionError", "1 / 0"),
        ("class Model", "import sys; sys.exit('bye')\nclass Model", "called sys.exit('bye')", "sys.exit('bye')"),
    ],
)
def test_an_error_of_the_users_code(
    write: Write, capsys: pytest.CaptureFixture[str], old: str, new: str, error: str, line: str
) -> None:
    """The user's own traceback is there: the file, and the line that failed."""
    path = write(SERVICE.replace(old, new, 1))
    said = check(capsys, path)
    assert f'File "{path}"' in said
    assert line in said
    assert error in said


def test_files_of_traffic(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, empty, with a broken line, with a line of another type, with a line of another size."""
    path = write(SERVICE)
    traffic = tmp_path / "requests.jsonl"
    assert "requests.jsonl: no such file or directory help: name" in check(capsys, path, "--traffic", traffic)
    for content, error in (
        ("", "requests.jsonl: no request in it help: write one JSON request to a line"),
        ("[1.0, 2.0]\n\n[1.0,\n", "requests.jsonl, line 3: not JSON: "),
        ('[1.0, 2.0]\n["a"]\n', "requests.jsonl, line 2: Expected `float`, got `str` - at `$[0]` help:"),
        ("[1.0, 2.0]\n[1.0]\n", "sample 1: dim 0 of input 'x' is 1, in sample 0 it is 2"),
    ):
        traffic.write_text(content)
        assert error in check(capsys, path, "--traffic", traffic)


def test_tune_looks_at_its_arguments_before_it_works(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is not even imported, and nothing is left behind beside what was there."""
    path = write("raise RuntimeError('imported')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for args, error in (
        ([path, "-o", tmp_path / "folder"], "folder exists and is no bundle help: name another folder with -o"),
        ([path, "-o", tmp_path / "file"], "file exists and is no bundle help: name another folder with -o"),
        ([path, "-o", tmp_path / "file" / "net.tp"], "net.tp can't be written: "),
        ([path, "-o", "/proc/net.tp"], "/proc/net.tp can't be written: "),
        ([path], "missing option '-o' / '--output'"),
        ([tmp_path / "gone.py", "-o", tmp_path / "net.tp"], "gone.py: no such file or folder"),
        ([path, "-o", tmp_path / "net.tp", "--p99", "50"], "--p99: '50' has no unit"),
        ([path, "-o", tmp_path / "net.tp", "--tolerance", "cos<=1"], "cos is 1 for equal outputs"),
    ):
        assert main(["tune", *map(str, args)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert error in " ".join(err.split())
        assert " help: " in " ".join(err.split())
        assert OURS not in err
        assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (SAMPLES, "return []", "error: samples() is empty help: return a few"),
        (SAMPLES, "return [1 / 0]", "samples() raised ZeroDivisionError"),
    ],
)
def test_tune_leaves_nothing_of_a_target_that_cannot_be_used(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, error: str
) -> None:
    """Although it finds out in a process of its own; the user's traceback comes back from there."""
    path = write(SERVICE.replace(old, new, 1))
    assert main(["tune", str(path), "-o", str(tmp_path / "net.tp")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert error in " ".join(err.split())
    assert OURS not in err
    assert ("return [1 / 0]" in err) is ("1 / 0" in new)
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["app.py"]
