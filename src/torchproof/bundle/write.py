"""Writes a bundle: into a folder beside it first, so that a bundle is there whole or not at all."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from torchproof.bundle.read import ARTIFACTS, CODE, GOLDEN, PROOF, SUMS, WEIGHTS, sha256
from torchproof.errors import UsageError
from torchproof.types import Proof, Target, encode


def check_destination(path: Path) -> None:
    """Looks before the search starts whether a bundle can be written there.

    Raises:
        UsageError: something else lies there, or the folder above can't be written to.
    """
    if path.exists() and not (path / PROOF).is_file():
        raise UsageError(f"{path} exists and is no bundle", help="name another folder with -o, or remove it")
    with disk_errors(path), tempfile.TemporaryFile(dir=existing_parent(path)):
        pass


def existing_parent(path: Path) -> Path:
    """The nearest folder above that is there already; nothing is made before there is something to write."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def write_bundle(
    path: Path,
    proof: Proof,
    *,
    golden: Path,
    weights: Path | None,
    artifacts: Mapping[str, Path],
    code: Iterable[Path] = (),
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Writes everything, proves it, then puts it in place of what was there.

    Args:
        proof: its target's path is absolute; in the bundle it is relative to ``code/``.
        artifacts: folders to copy, by the name that ``Choice.artifact`` gives them (``artifacts/onnxruntime``).
        code: the user's files, see ``user_files``.
        prove: called with the finished folder before it takes its place; what it raises leaves nothing behind.

    Raises:
        UsageError: the disk is full or can't be written to.
    """
    with disk_errors(path):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        with disk_errors(path):
            stored = copy_code(proof.target, partial / CODE, code)
            shutil.copyfile(golden, partial / GOLDEN)
            if weights is not None:
                shutil.copyfile(weights, partial / WEIGHTS)
            (partial / ARTIFACTS).mkdir()
            for name, folder in artifacts.items():
                shutil.copytree(folder, partial / name)
            (partial / PROOF).write_text(encode(msgspec.structs.replace(proof, target=stored)))
            write_sums(partial)
            partial.chmod(0o755)  # mkdtemp gives 0700; the server may run as another user
        if prove is not None:
            prove(partial)
        with disk_errors(path):
            _swap(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_sums(folder: Path) -> None:
    """Writes ``SHA256SUMS`` over every other file in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / SUMS)
    (folder / SUMS).write_text("".join(f"{sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in files))


def copy_code(target: Target, folder: Path, code: Iterable[Path]) -> Target:
    """Copies what the target's path names.

    Returns:
        the target with its path relative to ``folder``. An installed ``package.module:Name`` stays a name.
    """
    folder.mkdir()
    if target.path is None:
        return target
    path = Path(target.path)
    if target.kind == "huggingface":
        # The weights as safetensors only: the other formats are pickles, or another framework's.
        shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("*.bin", "*.h5", "*.msgpack", ".*"))
    for source in code:
        copy = folder / source.relative_to(path.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return msgspec.structs.replace(target, path=path.name)


def _swap(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    old = partial.with_suffix(".old")
    path.rename(old)
    try:
        partial.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the file system raises into a ``UsageError`` that names ``path``."""
    try:
        yield
    except (OSError, shutil.Error, SafetensorError) as exc:
        # shutil.Error and SafetensorError have no errno: they give what went wrong as text.
        code = getattr(exc, "errno", None)
        if any(code == full or os.strerror(full) in str(exc) for full in (errno.ENOSPC, errno.EDQUOT)):
            raise UsageError(
                f"the disk is full: {path} was not written", help="free some space, or name another place"
            ) from None
        raise UsageError(f"{path} can't be written: {exc}", help="name another place with -o") from None
