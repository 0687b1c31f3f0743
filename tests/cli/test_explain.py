"""``explain`` prints rules as text or JSON, and never needs torch."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from torchproof.cli.explain import command
from torchproof.errors import UsageError
from torchproof.rules.base import SECTIONS
from torchproof.rules.registry import all_rules


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_a_code_in_lower_case_is_explained() -> None:
    result = run("tp101")
    assert result.exit_code == 0
    assert result.output.startswith("TP101 train-mode-in-effect\n")
    assert all(f"\n{section}\n" in result.output for section in SECTIONS)
    assert "```" not in result.output


def test_several_codes_come_in_the_order_asked_and_once() -> None:
    output = run("TP702", "TP701", "tp702").output
    assert output.index("TP702 padding-changes-output\n") < output.index("TP701 row-depends-on-batch\n")
    assert output.count("TP702 padding-changes-output\n") == 1


def test_without_a_code_all_rules_are_listed() -> None:
    head, *rows = run().output.splitlines()
    assert head.split() == ["code", "name", "severity", "summary"]
    assert [row.split()[:3] for row in rows] == [[rule.code, rule.name, rule.severity] for rule in all_rules()]


def test_json_has_the_same_facts() -> None:
    (page,) = json.loads(run("TP701", "--format", "json").output)
    assert page.keys() == {"code", "name", "part", "severity", "since", "summary", "sections"}
    assert page["part"] == {"number": 7, "title": "inference and serving"}
    assert list(page["sections"]) == list(SECTIONS)
    assert len(json.loads(run("--format", "json").output)) == len(all_rules())


def test_an_unknown_code_raises_for_the_caller_to_print() -> None:
    with pytest.raises(UsageError, match="no rule has the code 'TP1'"):
        run("TP101", "TP1")


def test_help_shows_examples() -> None:
    assert "  torchproof explain TP301 --format json\n" in run("--help").output


def test_it_needs_no_torch() -> None:
    script = "import sys, torchproof.cli.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
