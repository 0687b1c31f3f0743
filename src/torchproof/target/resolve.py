"""``file.py:Name`` -> a Target: looks at the file system, imports nothing."""

import os
import zipfile
from pathlib import Path

from torchproof.errors import TargetError
from torchproof.types import Target

SUFFIXES = (".py", ".onnx", ".pt2", ".pt", ".pth", ".ts")
FORMS = (
    "a target is path/to/file.py[:Name], package.module:Name, a saved model (.pt2, TorchScript .pt, .onnx) "
    "or a Hugging Face model folder"
)


def resolve(reference: str) -> Target:
    """What the user named, without importing or loading it.

    Raises:
        TargetError: nothing is there, or it is of no known kind.
    """
    left, colon, name = reference.rpartition(":")
    is_path = "/" in name or os.path.exists(reference)  # a path may have a colon in it
    location, name = (left, name) if colon and not is_path else (reference, "")
    place = os.path.expanduser(location)
    if not os.path.exists(place):
        if _is_dotted(location) and not location.endswith(SUFFIXES):
            file = Path(f"{location}.py")
            if name and file.is_file():  # app:Net means app.py, and a bundle takes a file along
                return Target(reference=reference, kind="python", path=str(file.resolve()), name=name)
            if name:
                return Target(reference=reference, kind="python", module=location, name=name)
            raise TargetError(f"{reference}: no such file, and no name after a colon", help=FORMS)
        raise TargetError(f"{location}: no such file or folder", help=FORMS)
    path = Path(place)
    absolute = str(path.resolve())
    if path.is_dir():
        if not (path / "config.json").exists():
            raise TargetError(f"{location} is a folder without config.json", help=FORMS)
        return _saved(reference, "huggingface", absolute, name)
    if path.suffix == ".py":
        return Target(reference=reference, kind="python", path=absolute, name=name or None)
    if path.suffix == ".onnx":
        return _saved(reference, "onnx", absolute, name)
    if path.suffix in SUFFIXES:
        return _saved(reference, _archive_kind(path), absolute, name)
    raise TargetError(f"{location}: {path.suffix or 'no suffix'} is no kind of target", help=FORMS)


def _saved(reference: str, kind: str, path: str, name: str) -> Target:
    if name:
        raise TargetError(f"{reference}: a saved model has no names to choose from", help=f"leave out ':{name}'")
    return Target(reference=reference, kind=kind, path=path)  # type: ignore[arg-type]


def _archive_kind(path: Path) -> str:
    """Tells a torch.export archive from a TorchScript one by the members of the zip file."""
    if not zipfile.is_zipfile(path):
        raise TargetError(
            f"{path}: neither a torch.export nor a TorchScript archive",
            help="a checkpoint (a state_dict) holds no code: write a Service whose load() builds the module",
        )
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
    if any("/code/" in m for m in members):
        return "torchscript"
    if any(m.endswith((".json", "serialized_exported_program.json")) and "models/" in m for m in members):
        return "exported"
    if any(m.endswith("data/aotinductor/model") or "aotinductor" in m for m in members):
        raise TargetError(f"{path}: a compiled AOTInductor package cannot be tuned", help="name the torch.export file")
    raise TargetError(
        f"{path}: a checkpoint, not a model: it holds no code",
        help="write a Service whose load() builds the module and loads this file",
    )


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
