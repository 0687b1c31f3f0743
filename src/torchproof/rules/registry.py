"""Finds every rule by walking the package: adding a file is all it takes to add a rule."""

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import torchproof.rules
from torchproof.errors import UsageError
from torchproof.rules.base import Rule
from torchproof.types import Finding, Observation

AnyRule = Rule[Any]

# Of 1: a code with one character wrong, missing or too many has 0.8 and more; E501, another tool's, has 0.67 to TP501.
MIN_LIKENESS = 0.7


@cache
def all_rules() -> tuple[AnyRule, ...]:
    """Every rule, ordered by code."""
    modules = [import_module(m.name) for m in walk_packages(torchproof.rules.__path__, "torchproof.rules.")]
    found = [
        value()
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Rule) and "code" in vars(value)
        if value.__module__ == module.__name__  # not where it was only imported
    ]
    return tuple(sorted(found, key=lambda rule: rule.code))


def rule(code: str) -> AnyRule:
    """The rule of a code or a name, in upper or lower case.

    Raises:
        UsageError: no rule has it; the help line has the closest ones, or all codes.
    """
    known = {key.lower(): rule for rule in all_rules() for key in (rule.code, rule.name)}
    wanted = code.strip().lower()
    if wanted in known:
        return known[wanted]
    close = dict.fromkeys(known[key] for key in get_close_matches(wanted, known, cutoff=MIN_LIKENESS))
    if close:
        help = "close to it: " + ", ".join(f"{rule.code} {rule.name}" for rule in close)
    else:
        help = "known codes: " + ", ".join(rule.code for rule in all_rules())
    raise UsageError(f"no rule has the code {code!r}", help=help)


def judge(observation: Observation) -> tuple[Finding, ...]:
    """What all rules that observe this kind of record find in it, ordered by code."""
    return tuple(
        finding for rule in all_rules() if isinstance(observation, rule.observes) for finding in rule.judge(observation)
    )
