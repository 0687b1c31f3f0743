"""Which of the user's files a bundle takes along."""

import sys
from collections.abc import Iterable
from pathlib import Path

from torchproof.errors import TargetError
from torchproof.target.saved import onnx_files
from torchproof.types import Target

# Folders below the user's own that hold other people's code.
FOREIGN = {"site-packages", "dist-packages", "node_modules", "__pycache__"}


def user_files(target: Target, patterns: Iterable[str]) -> list[Path]:
    """The target's file, the user's modules that this process imported from its folder, and the files it names.

    Args:
        patterns: ``Service.files``.

    Raises:
        TargetError: a file named in ``files`` isn't there, or isn't below the target's folder.
    """
    if target.path is None or target.kind == "huggingface":
        return []
    path = Path(target.path)
    if target.kind == "onnx":
        return onnx_files(path)
    if target.kind != "python":
        return [path]
    return sorted({path, *_imported_from(path.parent), *_named(path.parent, patterns)})


def _imported_from(folder: Path) -> list[Path]:
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not Path(file).is_relative_to(folder):
            continue
        inner = Path(file).relative_to(folder)
        hidden = any(part.startswith(".") for part in inner.parts)
        if not hidden and not FOREIGN & set(inner.parts) and inner.suffix == ".py":
            found.append(Path(file))
    return found


def _named(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = []
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise TargetError(
                f"files names {pattern!r}, which lies outside {folder}", help="put a copy beside the Service's file"
            )
        matches = [p for p in sorted(folder.glob(pattern)) if p.is_file()]
        if not matches:
            raise TargetError(
                f"files names {pattern!r}, which is not in {folder}", help="name files relative to the Service's file"
            )
        found += matches
    return found
