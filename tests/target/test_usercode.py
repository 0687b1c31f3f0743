"""An error in the user's code shows the user's traceback; importing it disturbs nothing."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchproof.check import audit
from torchproof.errors import TargetError, UserCodeError
from torchproof.target.resolve import resolve
from torchproof.target.usercode import OWN_FOLDER, import_file, import_module

Write = Callable[..., Path]

SERVICE = """
class Net(tp.Service):
    def load(self):
        return Model()
    def encode(self, request):
        return torch.tensor(request)
    def decode(self, outputs, request):
        return outputs.tolist()
    def samples(self):
        return [[1.0, 2.0]]

class Model(nn.Module):
    def forward(self, x):
        return {forward}
"""


def broken(reference: str) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        audit(resolve(reference))
    return caught.value


def assert_only_theirs(error: UserCodeError, path: Path, line: str) -> None:
    """The first frame is in the user's file, none is ours, and the failing line is shown."""
    frames = [text for text in error.trace.splitlines() if text.startswith("  File ")]
    assert frames[0].startswith(f'  File "{path}"')
    assert OWN_FOLDER not in error.trace
    assert "importlib" not in error.trace
    assert line in error.trace


@pytest.mark.parametrize(
    ("method", "doing"),
    [
        ("load(self)", "load() raised KeyError"),
        ("encode(self, request)", "encode() of sample 0 raised KeyError"),
        ("samples(self)", "samples() raised KeyError"),
        ("__init__(self)", "calling Net() raised KeyError"),
    ],
)
def test_an_error_in_a_method(write: Write, method: str, doing: str) -> None:
    path = write(SERVICE.format(forward="x") + f"\nclass Net(Net):\n    def {method}:\n        return {{}}['gone']\n")
    error = broken(f"{path}:Net")
    assert error.doing == doing
    assert_only_theirs(error, path, "return {}['gone']")
    assert error.trace.endswith("KeyError: 'gone'\n")


@pytest.mark.parametrize(
    "forward", ["self.helper(x)", "x if x.dim() < 3 and calls.append(1) or len(calls) < 3 else 1 / 0"]
)
def test_an_error_in_forward(write: Write, forward: str) -> None:
    """At the first forward, and at a later one, which goes through a wrapper of ours."""
    path = write("calls = []\n" + SERVICE.format(forward=forward))
    error = broken(f"{path}:Net")
    assert error.doing.startswith("running the model on a sample raised ")
    assert_only_theirs(error, path, f"return {forward}")


def test_an_error_at_import(write: Write) -> None:
    """Also one in a module that the user's file imports."""
    write("def f():\n    return 1 / 0\nf()\n", "helper_that_breaks.py", header="")
    path = write("import helper_that_breaks\n")
    error = broken(str(path))
    assert error.doing == "importing app.py raised ZeroDivisionError"
    assert_only_theirs(error, path, "helper_that_breaks.py")
    assert "app" not in sys.modules


def test_a_missing_import_is_the_users_error(write: Write) -> None:
    path = write("import a_package_that_is_not_there\n")
    error = broken(str(path))
    assert error.doing == "importing app.py raised ModuleNotFoundError"
    assert_only_theirs(error, path, "import a_package_that_is_not_there")


def test_a_syntax_error(write: Write) -> None:
    """There is no frame to show, but the line is."""
    path = write("class Net(:\n", header="")
    error = broken(str(path))
    assert error.doing == "importing app.py raised SyntaxError"
    assert f'File "{path}", line 1' in error.trace
    assert "class Net(:" in error.trace
    assert OWN_FOLDER not in error.trace


def test_sys_exit_does_not_end_the_command(write: Write) -> None:
    path = write("import sys\nsys.exit(0)\n")
    error = broken(str(path))
    assert error.doing == "importing app.py: the code called sys.exit(0)"
    assert_only_theirs(error, path, "sys.exit(0)")


def test_siblings_can_be_imported(write: Write) -> None:
    """The file's folder is first on sys.path, as with ``python app.py``."""
    write("VALUE = 7\n", "a_sibling.py", header="")
    path = write("from a_sibling import VALUE\n")
    assert import_file(path).VALUE == 7
    assert sys.path[0] == str(path.parent)


@pytest.mark.parametrize(("name", "module"), [("json", json), ("torch", torch)])
def test_a_file_named_like_another_module(write: Write, name: str, module: object) -> None:
    """It is loaded beside the other, which stays what ``import`` gives, inside the file too."""
    path = write(f"import {name}\nMINE = {name}\n", f"{name}.py", header="")
    imported = import_file(path)
    assert imported.MINE is module
    assert sys.modules[name] is module


def test_two_files_of_one_name(write: Write) -> None:
    """Each gives its own content, and is run once however often it is opened."""
    first, second = (write(f"VALUE = {n}\n", f"{n}/app.py", header="") for n in (1, 2))
    one, two = import_file(first), import_file(second)
    assert (one.VALUE, two.VALUE) == (1, 2)
    assert import_file(first) is one
    assert import_file(second) is two


def test_a_module_by_its_dotted_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for in the current folder, as with ``python -m``."""
    path = write("VALUE = 3\n", "a_package/inner.py", header="")
    monkeypatch.chdir(path.parent.parent)
    assert import_module("a_package.inner").VALUE == 3


@pytest.mark.parametrize("name", ["gone_package", "gone_package.inner", "json.gone", "json.decoder.gone"])
def test_a_module_that_is_not_there(name: str) -> None:
    with pytest.raises(TargetError, match=f"there is no module '{name}'"):
        import_module(name)


@pytest.mark.parametrize("where", ["broken_package/__init__.py", "broken_package/inner.py"])
@pytest.mark.parametrize("error", ["import a_package_that_is_not_there", "raise ValueError('x')"])
def test_an_error_inside_a_module_is_not_a_missing_module(
    write: Write, monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    """In the module itself and in the package around it."""
    write("", "broken_package/__init__.py", header="")
    write("", "broken_package/inner.py", header="")
    path = write(error + "\n", where, header="")
    monkeypatch.chdir(path.parent.parent)
    with pytest.raises(UserCodeError) as caught:
        import_module("broken_package.inner")
    assert_only_theirs(caught.value, path, error)
