"""Reads a bundle and checks that nothing in it changed."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from torchproof.errors import BundleError, UsageError
from torchproof.types import SCHEMA, Proof, Target, decode

PROOF = "proof.json"
SUMS = "SHA256SUMS"
GOLDEN = "golden.safetensors"
WEIGHTS = "weights.safetensors"
CODE = "code"
ARTIFACTS = "artifacts"

AGAIN = "write it again with torchproof tune, or copy it again"


@dataclass(frozen=True)
class Bundle:
    """A bundle that was checked."""

    path: Path
    proof: Proof

    @property
    def target(self) -> Target:
        """The target, with its path inside this bundle."""
        stored = self.proof.target
        if stored.path is None:
            return stored
        return msgspec.structs.replace(stored, path=str(self.path / CODE / stored.path))

    @property
    def weights(self) -> Path | None:
        """The weights' file, where the module has any."""
        path = self.path / WEIGHTS
        return path if path.exists() else None


class _Version(msgspec.Struct):
    """The part of proof.json that every version of it has."""

    schema: int
    torchproof: str


def open_bundle(path: Path) -> Bundle:
    """The bundle in a folder.

    Raises:
        BundleError: no bundle, a missing, changed or added file (named), a name that leads out of the bundle, or a
            schema newer than this torchproof's.
    """
    if not path.is_dir():
        raise BundleError(f"{path}: no such folder", help="a bundle is the folder that torchproof tune -o wrote")
    try:
        text = (path / PROOF).read_bytes()
    except OSError:
        raise BundleError(f"{path} holds no {PROOF}, so it is no bundle", help=AGAIN) from None
    try:
        version = msgspec.json.decode(text, type=_Version)
    except msgspec.DecodeError as exc:
        raise BundleError(f"{path / PROOF}: {exc}", help=AGAIN) from None
    if version.schema > SCHEMA:
        raise BundleError(
            f"{path} was written by torchproof {version.torchproof} with schema {version.schema}; "
            f"this one reads up to {SCHEMA}",
            help="pip install --upgrade torchproof",
        )
    _check_sums(path)
    try:
        proof = decode(text, Proof, what=str(path / PROOF))
    except UsageError as exc:
        raise BundleError(str(exc), help=AGAIN) from None
    choices = (proof.plan.chosen, *proof.plan.runners_up)
    _check_names(path / PROOF, [proof.target.path or "", *(choice.artifact for choice in choices)])
    return Bundle(path=path.resolve(), proof=proof)


def _check_sums(path: Path) -> None:
    try:
        lines = (path / SUMS).read_bytes().decode().removesuffix("\n").split("\n")  # splitlines takes other ends, too
    except OSError:
        raise BundleError(f"{path}: {SUMS} is missing", help=AGAIN) from None
    except UnicodeDecodeError:
        raise BundleError(f"{path}: {SUMS} was changed after the bundle was written", help=AGAIN) from None
    sums = [line.partition("  ")[::2] for line in lines]
    _check_names(path / SUMS, [name for _, name in sums])
    vital = [file for file in (path / PROOF, path / GOLDEN, path / WEIGHTS) if file.exists()]
    unknown = {file.relative_to(path).as_posix() for file in (*vital, *_code(path))} - {name for _, name in sums}
    if unknown:
        raise BundleError(f"{path}: {min(unknown)} is not in {SUMS}: it was added later", help=f"remove it, or {AGAIN}")
    for digest, name in sums:
        file = path / name
        if not file.is_file():
            raise BundleError(f"{path}: {name} is missing", help=AGAIN)
        if sha256(file) != digest:
            raise BundleError(f"{path}: {name} was changed after the bundle was written", help=AGAIN)


def _code(path: Path) -> list[Path]:
    """What may be imported or read: whatever its suffix, and links too, since a folder may lie behind them."""
    code = path / CODE
    return [
        file
        for file in code.rglob("*")
        if file.is_symlink() or not file.is_dir()
        if "__pycache__" not in file.relative_to(code).parts  # written by running the bundle
    ]


def _check_names(file: Path, names: Iterable[str]) -> None:
    """Names in ``file`` stay inside the bundle."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise BundleError(f"{file}: {name!r} leads out of the bundle", help=AGAIN)


def sha256(path: Path) -> str:
    """The file's digest in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
