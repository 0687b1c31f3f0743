"""The registry finds rules by walking the package, and rules by code."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchproof.rules
from torchproof.errors import UsageError
from torchproof.rules.registry import all_rules, rule


def test_every_file_in_a_part_is_a_rule() -> None:
    folder = Path(torchproof.rules.__file__).parent
    files = {path.stem for path in folder.glob("*/*.py") if path.stem != "__init__"}
    assert files == {rule.name.replace("-", "_") for rule in all_rules()}


def test_rules_are_ordered_by_code() -> None:
    codes = [rule.code for rule in all_rules()]
    assert codes == sorted(codes)


@pytest.mark.parametrize("code", ["TP101", "tp101", " Tp101 ", "train-mode-in-effect", "Train-Mode-In-Effect"])
def test_a_rule_is_found_by_code_or_name_in_any_case(code: str) -> None:
    assert rule(code).code == "TP101"


def test_an_unknown_code_names_the_closest_rules() -> None:
    with pytest.raises(UsageError, match="no rule has the code 'train-mode-effect'") as caught:
        rule("train-mode-effect")
    assert caught.value.help.startswith("close to it: TP101 train-mode-in-effect")


@pytest.mark.parametrize("code", ["", "E501", "TP999", "nonsense"])
def test_a_code_like_no_other_lists_all_codes(code: str) -> None:
    with pytest.raises(UsageError) as caught:
        rule(code)
    assert caught.value.help == "known codes: " + ", ".join(rule.code for rule in all_rules())


def test_the_catalogue_needs_no_torch() -> None:
    script = "import sys, torchproof.rules.registry as registry; registry.all_rules(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
