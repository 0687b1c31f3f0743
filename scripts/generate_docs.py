"""Writes docs/rules/ from the rules' docstrings; ``--check`` only names the pages that differ, and exits 1."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from torchproof.render.rule import markdown, markdown_index
from torchproof.rules.registry import all_rules

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """The text of every page by its file name."""
    out = {"index.md": markdown_index([rule.doc() for rule in all_rules()])}
    for rule in all_rules():
        module = inspect.getmodule(type(rule))
        assert module is not None  # a rule is found through its module
        source = "../../src/" + module.__name__.replace(".", "/") + ".py"
        out[f"{rule.code}.md"] = markdown(rule.doc(), source)
    return out


def differences(folder: Path) -> list[str]:
    """What has to change in ``folder``: ``stale: TP101.md``, ``missing: …`` or ``extra: …``."""
    wanted = pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return [
        *(f"missing: {name}" for name in sorted(wanted.keys() - found.keys())),
        *(f"stale: {name}" for name in sorted(wanted.keys() & found.keys()) if found[name] != wanted[name]),
        *(f"extra: {name}" for name in sorted(found.keys() - wanted.keys())),
    ]


def write(folder: Path) -> None:
    """Make ``folder`` hold exactly the pages; other files than markdown stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in pages():
            path.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 in sync or written, 1 when ``--check`` found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what differs")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "rules")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.folder)
        return 0
    found = differences(options.folder)
    if found:
        print("\n".join([*found, "  help: run python scripts/generate_docs.py"]), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
