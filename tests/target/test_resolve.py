"""What the user named is told apart by looking at the file system; nothing is imported."""

import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from torchproof.errors import TargetError
from torchproof.target.resolve import resolve


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One linear layer, saved in every way that ends in .pt or .pt2."""
    folder = tmp_path_factory.mktemp("saved")
    module = nn.Linear(2, 2).eval()
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), folder / "exported.pt2")
    torch.jit.save(torch.jit.script(module), folder / "script.pt")
    torch.save(module.state_dict(), folder / "checkpoint.pt")
    torch.save(module, folder / "whole.pth")
    torch.save(module.state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return folder


def test_a_python_file_with_and_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path becomes absolute, the file is not imported."""
    (tmp_path / "app.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    named = resolve("app.py:Net")
    assert (named.kind, named.path, named.name, named.module) == ("python", str(tmp_path / "app.py"), "Net", None)
    assert (resolve("app.py").name, resolve("app.py:").name) == (None, None)
    assert resolve("./app.py:Net").path == named.path
    assert "app" not in sys.modules


def test_a_dotted_module_with_a_name() -> None:
    """Nothing of it is looked for on disk."""
    target = resolve("package.module:Name")
    assert (target.kind, target.path, target.module, target.name) == ("python", None, "package.module", "Name")


def test_a_path_may_have_a_colon_in_it(tmp_path: Path) -> None:
    """The last colon separates a name only where what follows is one."""
    file = tmp_path / "run-12:30" / "app.py"
    file.parent.mkdir()
    file.write_text("")
    assert (resolve(str(file)).path, resolve(str(file)).name) == (str(file), None)
    assert (resolve(f"{file}:Net").path, resolve(f"{file}:Net").name) == (str(file), "Net")


@pytest.mark.parametrize(("name", "kind"), [("exported.pt2", "exported"), ("script.pt", "torchscript")])
def test_archives_are_told_apart_by_what_is_in_them(saved: Path, tmp_path: Path, name: str, kind: str) -> None:
    """The suffix says nothing: each is found under the other's suffix too."""
    assert resolve(str(saved / name)).kind == kind
    for suffix in (".pt", ".pt2", ".pth"):
        copy = (tmp_path / "copy").with_suffix(suffix)
        copy.write_bytes((saved / name).read_bytes())
        assert resolve(str(copy)).kind == kind


@pytest.mark.parametrize("name", ["checkpoint.pt", "whole.pth", "legacy.pt"])
def test_a_checkpoint_is_no_model(saved: Path, name: str) -> None:
    """It holds no code, and the help says what to write."""
    with pytest.raises(TargetError) as caught:
        resolve(str(saved / name))
    assert "load() builds the module" in caught.value.help


def test_an_aotinductor_package_is_named_as_one(tmp_path: Path) -> None:
    """It is compiled already, and must not be taken for a torch.export archive."""
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/aotinductor/model/cabc.wrapper.so", b"")
        archive.writestr("model/data/aotinductor/model/cabc.wrapper_metadata.json", "{}")
    with pytest.raises(TargetError, match="AOTInductor package cannot be tuned"):
        resolve(str(path))


def test_onnx_and_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "model.onnx")).kind == "onnx"
    assert resolve(str(tmp_path / "bert")).kind == "huggingface"
    with pytest.raises(TargetError) as caught:
        resolve(f"{tmp_path / 'model.onnx'}:Net")
    assert caught.value.help == "leave out ':Net'"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py", "gone.py: no such file or folder"),
        ("gone.py:Net", "gone.py: no such file or folder"),
        ("gone.pt2:Net", "gone.pt2: no such file or folder"),
        ("folder/gone.py:Net", "folder/gone.py: no such file or folder"),
        ("package.module", "package.module: no such file, and no name after a colon"),
        ("~nobody/app.py", "~nobody/app.py: no such file or folder"),
        ("x" * 300 + ".py", "no such file or folder"),
        ("", "no such file or folder"),
    ],
)
def test_what_is_not_there(reference: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is missing is said to be, with the forms that a target has."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError) as caught:
        resolve(reference)
    assert message in str(caught.value)
    assert "a target is path/to/file.py[:Name]" in caught.value.help


def test_what_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "Makefile").write_text("")
    for name, message in (("notes.txt", ".txt is no kind"), ("Makefile", "no suffix"), ("", "without config.json")):
        with pytest.raises(TargetError, match=message):
            resolve(str(tmp_path / name))


def test_a_dotted_name_of_a_file_at_hand_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``app:Net`` beside app.py: a bundle takes a file along, and an imported module not."""
    monkeypatch.chdir(tmp_path)
    assert resolve("app:Net").module == "app"
    (tmp_path / "app.py").touch()
    assert resolve("app:Net").path == str(tmp_path / "app.py")
