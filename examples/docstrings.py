"""Real text that every machine has: the first paragraphs of the docstrings in Python's standard library."""

import ast
import random
import sysconfig
from pathlib import Path

SEED = 0


def first_paragraphs() -> dict[str, str]:
    """``{"csv.DictReader": "first paragraph of its docstring", ...}``, read from the sources; nothing is imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith("_") or part in ("test", "tests", "idlelib", "site-packages") for part in parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        _collect(".".join(parts), tree, found)
    return found


def _collect(prefix: str, node: ast.Module | ast.ClassDef, found: dict[str, str]) -> None:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            name = f"{prefix}.{child.name}"
            paragraph = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
            if len(paragraph) >= 10:
                found[name] = paragraph
            if isinstance(child, ast.ClassDef):
                _collect(name, child, found)


def sample(num: int) -> dict[str, str]:
    """A fixed sample of them."""
    everything = first_paragraphs()
    names = random.Random(SEED).sample(sorted(everything), min(num, len(everything)))
    return {name: everything[name] for name in names}
