"""A rule's documentation as terminal text, as markdown, as JSON; the list of rules as a table."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from torchproof.rules.base import RuleDoc
from torchproof.types import encode

MIN_WIDTH = 40  # narrower terminals get lines that the terminal itself breaks
FENCE = "```"


def text(doc: RuleDoc, width: int) -> str:
    """One rule for a terminal: plain, wrapped at ``width`` columns; code blocks keep their lines."""
    width = max(width, MIN_WIDTH)
    facts = f"part {doc.part.number}, {doc.part.title}; {doc.severity}; since {doc.since}"
    out = [f"{doc.code} {doc.name}", facts, "", *_wrap(doc.summary, width)]
    for title, body in doc.sections.items():
        out += ["", title, *(f"  {line}" if line else "" for line in _body(body, width - 2))]
    return "\n".join(out) + "\n"


def markdown(doc: RuleDoc, source: str) -> str:
    """One rule as a page of the documentation; ``source`` links to the file that defines it."""
    facts = (
        f"Part {doc.part.number}, {doc.part.title}. Severity: {doc.severity}. Since {doc.since}. [Source]({source})."
    )
    sections = [f"## {title}\n\n{body}" for title, body in doc.sections.items()]
    return "\n\n".join([f"# {doc.code} {doc.name}", doc.summary, facts, *sections]) + "\n"


def markdown_index(docs: Sequence[RuleDoc]) -> str:
    """All rules as the index page of the documentation, a table for each part."""
    out = ["# Rules", "Every problem that torchproof can name, by part."]
    for part in sorted({(doc.part.number, doc.part.title) for doc in docs}):
        rows = [
            f"| [{doc.code}]({doc.code}.md) | {doc.name} | {doc.severity} | {doc.summary} |"
            for doc in docs
            if doc.part.number == part[0]
        ]
        head = "| code | name | severity | finds |\n|---|---|---|---|"
        out.append(f"## Part {part[0]}: {part[1]}\n\n" + "\n".join([head, *rows]))
    return "\n\n".join(out) + "\n"


def table(docs: Sequence[RuleDoc], width: int | None = None) -> str:
    """All rules, one line each; with a ``width`` long summaries go on below themselves."""
    cells = [("code", "name", "severity", "summary")]
    cells += [(doc.code, doc.name, doc.severity, doc.summary) for doc in docs]
    sizes = [max(len(row[column]) for row in cells) for column in range(3)]
    indent = sum(sizes) + 2 * len(sizes)
    out = []
    for *head, summary in cells:
        start = "".join(cell.ljust(size + 2) for cell, size in zip(head, sizes, strict=True))
        room = 0 if width is None else width - indent
        lines = [summary] if room < MIN_WIDTH // 2 else _wrap(summary, room)
        out += [start + lines[0], *(" " * indent + line for line in lines[1:])]
    return "\n".join(out) + "\n"


def json(docs: Sequence[RuleDoc]) -> str:
    """The rules as a JSON list, indented."""
    return encode(docs)


def _body(body: str, width: int) -> Iterator[str]:
    """The lines of a section, without the fences around its code; an empty line between its blocks."""
    blocks: list[list[str]] = []
    for position, part in enumerate(re.split(rf"^{FENCE}.*$", body, flags=re.MULTILINE)):
        if position % 2:  # between two fences
            blocks.append(part.strip("\n").splitlines())
        else:
            blocks += [_paragraph(block, width) for block in re.split(r"\n\s*\n", part.strip()) if block]
    for position, lines in enumerate(blocks):
        yield from ["", *lines] if position else lines


def _paragraph(block: str, width: int) -> list[str]:
    """Prose, or the items of a list with what follows hanging below its first word."""
    items = re.split(r"\n(?=- )", block)
    return [line for item in items for line in _wrap(item, width, "  " if item.startswith("- ") else "")]


def _wrap(paragraph: str, width: int, hanging: str = "") -> list[str]:
    joined = " ".join(paragraph.split())
    return textwrap.wrap(joined, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
