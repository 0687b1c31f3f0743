"""The pages in docs/rules are what the generator makes of the rules."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_in_sync(generator: ModuleType) -> None:
    assert generator.differences(ROOT / "docs" / "rules") == []


def test_every_page_links_to_an_existing_source(generator: ModuleType) -> None:
    for name, text in generator.pages().items():
        if name != "index.md":
            source = text.split("[Source](")[1].split(")")[0]
            assert (ROOT / "docs" / "rules" / source).is_file(), name


def test_check_names_what_differs_and_writes_nothing(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.write(tmp_path)
    assert generator.main(["--check", "--folder", str(tmp_path)]) == 0
    (tmp_path / "TP101.md").write_text("old")
    (tmp_path / "TP102.md").unlink()
    (tmp_path / "TP999.md").write_text("of a rule that is gone")
    assert generator.main(["--check", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[:3] == ["missing: TP102.md", "stale: TP101.md", "extra: TP999.md"]
    assert (tmp_path / "TP101.md").read_text() == "old"


def test_writing_removes_pages_of_rules_that_are_gone(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "TP999.md").write_text("of a rule that is gone")
    assert generator.main(["--folder", str(tmp_path)]) == 0
    assert generator.differences(tmp_path) == []
