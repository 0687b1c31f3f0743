"""The shape of the package: imports go downwards, the light parts stay light, and an import changes nothing."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "torchproof"
MAX_LINES = 450

# Lowest first. Packages of one height are siblings and never import one another.
ORDER = [
    {"errors"},
    {"types"},
    {"stats"},
    {"rules"},
    {"render"},
    {"machine"},
    {"target"},
    {"measure"},
    {"runtimes"},
    {"bundle"},
    {"check"},
    {"train"},
    {"tune", "serve"},
    {"cli"},
]
HEIGHT = {name: height for height, names in enumerate(ORDER) for name in names}

# Below what the order allows: the packages that each of these may use beside itself.
ONLY = {"render": {"errors", "types", "stats", "rules"}, "machine": {"errors", "types"}}

TORCH_FREE = ("errors", "types", "stats", "rules", "render", "machine", "cli")
HEAVY = {"torch", "numpy", "scipy", "onnx", "onnxruntime", "transformers", "safetensors"}


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def part_of(module: str) -> str | None:
    """The part that a module belongs to; None for the package's own face, which exports from several."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def statements(tree: ast.AST, top_level: bool) -> Iterator[ast.stmt]:
    """Import statements; with ``top_level`` only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from statements(ast.Module([other], []), top_level)
        else:
            yield from statements(node, top_level)


def imports(module: str, *, top_level: bool) -> set[str]:
    """Dotted names that a module imports; ``from a import b`` is ``a.b`` where that is a module, else ``a``."""
    found = set()
    is_package = MODULES[module].name == "__init__.py"
    for node in statements(TREES[module], top_level):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join(parents[: len(parents) - up] + ([node.module] if node.module else []))
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module)])
def test_imports_go_downwards(module: str) -> None:
    part = part_of(module)
    assert part in HEIGHT, f"{part} is not in the order: say where it belongs"
    for imported in sorted(imports(module, top_level=False)):
        other = part_of(imported) if imported.split(".")[0] == "torchproof" else None
        if other is None or other == part:
            continue
        assert HEIGHT[other] < HEIGHT[part], f"{module} imports {imported}, which is not below it"
        assert other in ONLY.get(part, {other}), f"{module} imports {imported}: {part} may use {sorted(ONLY[part])}"


def test_no_cycles() -> None:
    """No module reaches itself through what runs at import."""
    graph = {module: imports(module, top_level=True) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) in TORCH_FREE])
def test_light_parts_import_nothing_heavy(module: str) -> None:
    assert not {imported.split(".")[0] for imported in imports(module, top_level=True)} & HEAVY


@pytest.mark.parametrize("command", ["main", "doctor", "explain", "options"])
def test_light_commands_never_load_torch(command: str) -> None:
    module = f"torchproof.cli.{command}"
    assert python(f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))") == "[]\n"


SNAPSHOT = """
import logging, os, signal, sys, threading, warnings
def snapshot():
    return (dict(os.environ), list(logging.root.handlers), logging.root.level, list(warnings.filters), list(sys.path),
            threading.active_count(), [signal.getsignal(s) for s in sorted(signal.valid_signals())], sys.excepthook,
            os.getcwd(), sys.flags, sys.getswitchinterval())
before = snapshot()
"""


@pytest.mark.parametrize("module", ["torchproof", "torchproof.cli.main", "torchproof.machine.environment"])
def test_an_import_changes_nothing(module: str) -> None:
    assert python(f"{SNAPSHOT}\nimport {module}\nprint(snapshot() == before)") == "True\n"


def test_the_package_itself_is_light() -> None:
    code = "import sys, typing; old = set(sys.modules); import torchproof; print(sorted(set(sys.modules) - old))"
    assert python(code) == "['torchproof']\n"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_are_short_and_say_what_they_are(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert ast.get_docstring(TREES[module]) or not text.strip(), f"{module} has no docstring"
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_LINES, f"{module} has {num_lines} lines"


def python(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout
