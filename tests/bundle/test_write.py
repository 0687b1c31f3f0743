"""A bundle is there whole or not at all, and holds what it needs and nothing else."""

import errno
import os
import pickletools
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from torchproof.bundle import write
from torchproof.bundle.code import user_files
from torchproof.bundle.read import open_bundle
from torchproof.bundle.write import check_destination
from torchproof.errors import TargetError, UsageError
from torchproof.measure.process import FreshProcess
from torchproof.types import Proof, Target, decode

TIMEOUT_S = 120.0


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def replay(bundle: Path) -> list[dict[str, Any]]:
    """The golden set through the bundle, in a process that has never seen the project."""
    with FreshProcess("torchproof.tune.jobs:Verify") as process:
        answer: list[dict[str, Any]] = process.call("run", timeout_s=TIMEOUT_S, bundle=str(bundle))
        return answer


def test_what_is_written_is_read_again(project: Any, tmp_path: Path) -> None:
    bundle = open_bundle(project.write(tmp_path / "app.tp"))
    stored = msgspec.structs.replace(project.target, path="app.py")
    assert bundle.proof == msgspec.structs.replace(project.proof(), target=stored)
    assert bundle.target.path == str(tmp_path / "app.tp" / "code" / "app.py")
    assert bundle.weights == tmp_path / "app.tp" / "weights.safetensors"
    assert bundle.proof == decode((tmp_path / "app.tp" / "proof.json").read_bytes(), Proof, what="proof.json")


def test_holds_the_users_files_and_no_others(project: Any, tmp_path: Path) -> None:
    """What was imported from the target's folder and what ``files`` names; not what merely lies there."""
    assert set(contents(project.write(tmp_path / "app.tp"))) == {
        "SHA256SUMS",
        "proof.json",
        "golden.safetensors",
        "weights.safetensors",
        "code/app.py",
        "code/helpers.py",
        "code/parts/__init__.py",
        "code/parts/inner.py",
        "code/data/factor.txt",
        "code/data/notes.txt",
        "code/labels.json",
    }


def test_runs_when_the_project_is_gone(new_project: Callable[[], Any], tmp_path: Path) -> None:
    """Moved elsewhere, too: no path in it leads back."""
    own = new_project()
    own.write(tmp_path / "app.tp")
    shutil.rmtree(own.folder)
    shutil.rmtree(own.work)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "app.tp").rename(tmp_path / "elsewhere" / "moved.tp")
    seen = replay(moved)
    assert [(s["batch_size"], s["num_rows"], s["within"]) for s in seen] == [(1, 4, True), (2, 4, True)]
    open_bundle(moved)  # running it changed nothing that is checked


def test_the_replay_can_fail(project: Any, tmp_path: Path) -> None:
    """A file that the code reads decides over the answers: with another one, the golden set is missed."""
    bundle = project.write(tmp_path / "app.tp")
    (bundle / "code" / "data" / "factor.txt").write_text("-2.5")
    (bundle / "SHA256SUMS").unlink()
    write.write_sums(bundle)
    assert not any(seen["within"] for seen in replay(bundle))


def test_sha256sum_checks_it_too(project: Any, tmp_path: Path) -> None:
    bundle = project.write(tmp_path / "app.tp")
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=bundle, check=False).returncode == 0
    (bundle / "proof.json").write_text("{}")
    assert subprocess.run(command, cwd=bundle, check=False, capture_output=True).returncode == 1


def test_others_may_read_it(project: Any, tmp_path: Path) -> None:
    """The server may run as another user."""
    assert (project.write(tmp_path / "app.tp").stat().st_mode & 0o777) == 0o755


def pickles(folder: Path) -> Iterator[str]:
    """Files, and members of archives, that are pickles."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        name = file.relative_to(folder).as_posix()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from (f"{name}!{m.partition('/')[2]}" for m in archive.namelist() if _is_pickle(archive.read(m)))
        elif _is_pickle(file.read_bytes()):
            yield name


def _is_pickle(data: bytes) -> bool:
    if data[:1] != b"\x80":  # protocol 2 and later; nothing writes older ones any more
        return False
    try:
        return next(iter(pickletools.genops(data)), None) is not None and list(pickletools.genops(data)) != []
    except Exception:  # noqa: BLE001  whatever it is, it is no pickle
        return False


def test_no_pickle_inside(project: Any, tmp_path: Path) -> None:
    """But for those of TorchScript's own format, which torch.jit.load reads without running code from them."""
    folder = tmp_path / "torchscript"
    folder.mkdir()
    traced = torch.jit.trace(torch.nn.Linear(4, 3), torch.zeros(2, 4))
    torch.jit.freeze(traced.eval()).save(folder / "model.ts")
    torch.save({"a": torch.ones(1)}, tmp_path / "planted.bin")
    assert any("data.pkl" in name for name in pickles(tmp_path)), "the search would find one"
    bundle = project.write(tmp_path / "app.tp", artifacts={"artifacts/torchscript-float32": folder})
    found = list(pickles(bundle))
    assert found
    assert all(name.startswith("artifacts/torchscript-float32/model.ts!") for name in found)


def test_replaces_the_bundle_that_was_there(project: Any, tmp_path: Path) -> None:
    """As a whole: nothing of the old one is left in it or beside it."""
    path = project.write(tmp_path / "app.tp")
    (path / "left.txt").write_text("from the old one")
    newer = msgspec.structs.replace(project.proof(), created="2031-01-01T00:00:00+00:00")
    project.write(path, proof=newer)
    assert open_bundle(path).proof.created == "2031-01-01T00:00:00+00:00"
    assert not (path / "left.txt").exists()
    assert os.listdir(tmp_path) == ["app.tp"]


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("the proof failed")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("where", "what", "raised"),
    [
        ("torchproof.bundle.write.shutil.copyfile", no_space, UsageError),
        ("torchproof.bundle.write.shutil.copytree", no_space, UsageError),
        ("pathlib.Path.write_text", no_space, UsageError),
        ("torchproof.bundle.write.write_sums", no_space, UsageError),
        ("torchproof.bundle.write.shutil.copyfile", interrupt, KeyboardInterrupt),
        ("torchproof.bundle.write.write_sums", interrupt, KeyboardInterrupt),
        ("prove", refuse, RuntimeError),
        ("prove", interrupt, KeyboardInterrupt),
    ],
)
def test_whatever_goes_wrong_leaves_nothing_half_written(
    project: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: bool,
    where: str,
    what: Callable[..., None],
    raised: type[BaseException],
) -> None:
    """Neither a folder beside it, nor a scratch on the bundle that was there."""
    path = tmp_path / "app.tp"
    artifacts = {"artifacts/a": project.folder / "data"}
    if there:
        project.write(path)
    before = contents(tmp_path)
    prove = what if where == "prove" else None
    with monkeypatch.context() as patched:
        if prove is None:
            patched.setattr(where, what)
        with pytest.raises(raised) as caught:
            project.write(path, artifacts=artifacts, prove=prove)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == (["app.tp"] if there else [])
    if raised is UsageError:
        assert str(caught.value) == f"the disk is full: {path} was not written"


@pytest.mark.parametrize("error", [no_space, interrupt])
def test_a_failure_at_the_last_step_puts_the_old_one_back(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[..., None]
) -> None:
    """The old bundle has stepped aside and the new one can't take its place."""
    path = project.write(tmp_path / "app.tp")
    before = contents(tmp_path)
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            error()
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", second_fails)
        with pytest.raises((UsageError, KeyboardInterrupt)):
            project.write(path)
    assert contents(tmp_path) == before


def test_a_full_disk_in_the_middle_of_a_folder(project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """copytree reports it in a form of its own, without an errno."""
    copyfile = shutil.copyfile

    def full_in_artifacts(source: Path, copy: Path, **options: Any) -> object:
        return no_space() if "artifacts" in str(copy) else copyfile(source, copy, **options)

    monkeypatch.setattr("shutil.copyfile", full_in_artifacts)
    with pytest.raises(UsageError, match="the disk is full"):
        project.write(tmp_path / "app.tp", artifacts={"artifacts/a": project.folder / "data"})
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 64 KiB; only where the sandbox lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(project: Any, tmp_path: Path, small_disk: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (big / "model.bin").write_bytes(bytes(200_000))
    path = project.write(small_disk / "app.tp")
    before = contents(small_disk)
    with pytest.raises(UsageError, match="the disk is full"):
        project.write(path, artifacts={"artifacts/big": big})
    assert contents(small_disk) == before
    open_bundle(path)


def test_a_destination_that_is_something_else_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("folder", "file"):
        with pytest.raises(UsageError, match="exists and is no bundle"):
            check_destination(tmp_path / name)
    with pytest.raises(UsageError, match="can't be written"):
        check_destination(tmp_path / "file" / "app.tp")
    check_destination(tmp_path / "new" / "deep" / "app.tp")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"], "nothing is made before there is something to write"


def test_folders_above_it_are_made(project: Any, tmp_path: Path) -> None:
    open_bundle(project.write(tmp_path / "new" / "deep" / "app.tp"))


@pytest.mark.parametrize("pattern", ["../outside.txt", "data/../../outside.txt", "/etc/hostname"])
def test_files_outside_the_projects_folder_are_refused(tmp_path: Path, pattern: str) -> None:
    """In the bundle they would land on its own files, or beside it."""
    (tmp_path / "outside.txt").write_text("")
    (tmp_path / "project" / "data").mkdir(parents=True)
    target = Target(reference="app.py", kind="python", path=str(tmp_path / "project" / "app.py"))
    with pytest.raises(TargetError, match="outside"):
        user_files(target, [pattern])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    target = Target(reference="app.py", kind="python", path=str(tmp_path / "app.py"))
    with pytest.raises(TargetError, match=r"'vocab\.txt'"):
        user_files(target, ["vocab.txt"])


@pytest.mark.parametrize("kind", ["exported", "torchscript"])
def test_of_a_saved_model_the_file_is_taken(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "model.bin"
    assert user_files(Target(reference="m", kind=kind, path=str(path)), []) == [path]


def test_an_installed_module_stays_a_name(project: Any, tmp_path: Path) -> None:
    target = Target(reference="package.module:Name", kind="python", module="package.module", name="Name")
    assert user_files(target, []) == []
    stored = write.copy_code(target, tmp_path / "code", [])
    assert stored == target


def test_of_a_hugging_face_folder_no_pickled_weights_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", ".git"):
        (folder / name).write_text("x")
    stored = write.copy_code(Target(reference="m", kind="huggingface", path=str(folder)), tmp_path / "code", [])
    assert stored.path == "model"
    assert set(contents(tmp_path / "code")) == {"model/config.json", "model/model.safetensors"}
