"""A rule reads well in a terminal of any width, and its code is never broken."""

import pytest

from torchproof.render.rule import markdown, table, text
from torchproof.rules.base import Part, RuleDoc
from torchproof.rules.registry import all_rules

DOC = RuleDoc(
    code="TP900",
    name="made-up-pattern",
    part=Part(number=1, title="modes"),
    severity="warning",
    since="0.1.0",
    summary="The model does something that it should not do.",
    sections={
        "Why it matters": "A first paragraph that is\nlonger than one line of a narrow terminal.\n\nA second one.",
        "Example": "```python\ndef forward(self, x):\n\n    return self.linear(x)  # longer than any terminal\n```",
        "Sources": "- PyTorch docs, a title that does not fit\n  on one line.\n- Measured: 1.",
    },
)


def test_text_wraps_prose_and_keeps_code() -> None:
    assert text(DOC, 40) == (
        "TP900 made-up-pattern\n"
        "part 1, modes; warning; since 0.1.0\n"
        "\n"
        "The model does something that it should\n"
        "not do.\n"
        "\n"
        "Why it matters\n"
        "  A first paragraph that is longer than\n"
        "  one line of a narrow terminal.\n"
        "\n"
        "  A second one.\n"
        "\n"
        "Example\n"
        "  def forward(self, x):\n"
        "\n"
        "      return self.linear(x)  # longer than any terminal\n"
        "\n"
        "Sources\n"
        "  - PyTorch docs, a title that does not\n"
        "    fit on one line.\n"
        "  - Measured: 1.\n"
    )


@pytest.mark.parametrize("width", [0, 40, 72, 100])
def test_every_rule_keeps_its_code_and_its_width(width: int) -> None:
    for rule in all_rules():
        doc = rule.doc()
        shown = text(doc, width)
        code = [
            line
            for title in ("Example", "Use instead")
            for line in doc.sections[title].splitlines()
            if line and not line.startswith("```")
        ]
        assert all(f"  {line}" in shown.splitlines() for line in code)
        prose = [line for line in shown.splitlines() if line[2:] not in code and " " in line.strip()]
        assert all(len(line) <= max(width, 40) or len(line.split()) <= 2 for line in prose[2:]), doc.code


def test_markdown_has_the_summary_the_facts_and_the_sections() -> None:
    page = markdown(DOC, "../../src/made_up.py")
    assert page.startswith("# TP900 made-up-pattern\n\nThe model does something")
    assert (
        "Part 1, modes. Severity: warning. Since 0.1.0. [Source](../../src/made_up.py).\n\n## Why it matters\n\n"
        in page
    )
    assert page.count("```") == 2


def test_the_table_has_one_line_to_a_rule_where_no_width_is_given() -> None:
    assert table([DOC]) == (
        "code   name             severity  summary\n"
        "TP900  made-up-pattern  warning   The model does something that it should not do.\n"
    )


def test_the_table_continues_a_summary_below_itself() -> None:
    assert table([DOC], width=66).splitlines()[1:] == [
        "TP900  made-up-pattern  warning   The model does something that it",
        "                                  should not do.",
    ]


def test_a_table_that_has_no_room_is_left_to_the_terminal() -> None:
    assert table([DOC], width=20) == table([DOC])
