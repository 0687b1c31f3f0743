"""The model in the server's own process."""

import sys
import types
from pathlib import Path

from torchproof.serve.inprocess import _forget_code


def test_code_is_imported_again_at_a_reload(tmp_path: Path) -> None:
    """The user's own modules beside the target are forgotten; installed ones below its folder, and others, stay."""
    places = {
        "forgotten": tmp_path / "helper.py",
        "forgotten_too": tmp_path / "package" / "part.py",
        "installed": tmp_path / ".venv" / "lib" / "site-packages" / "torch.py",
        "elsewhere": tmp_path.parent / "other.py",
    }
    for name, path in places.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__file__ = str(path)
    try:
        _forget_code(tmp_path)
        assert {name for name in places if name in sys.modules} == {"installed", "elsewhere"}
        assert "torchproof.serve.inprocess" in sys.modules
    finally:
        for name in places:
            sys.modules.pop(name, None)
