"""Findings read worst first, fit the width, and never break a path or a pair."""

from torchproof.render import findings
from torchproof.types import Finding, Severity


def finding(
    code: str = "TP101", severity: Severity = "warning", where: str = "app.py:Net", message: str = "it trains"
) -> Finding:
    return Finding(
        code=code,
        name="train-mode-in-effect",
        severity=severity,
        where=where,
        message=message,
        evidence={
            "repeat_diff": 0.123456,
            "training": True,
            "num_samples": 4,
            "output": "last hidden",
            "nan": float("nan"),
        },
        fix="call eval() in load()",
    )


def test_one_finding() -> None:
    assert findings.text([finding()]) == (
        "TP101 warning  train-mode-in-effect  app.py:Net\n"
        "  it trains\n"
        '  repeat_diff=0.1235  training=true  num_samples=4  output="last hidden"\n'
        "  nan=nan\n"
        "  fix: call eval() in load()\n"
        "  why: torchproof explain TP101\n"
    )


def test_worst_first() -> None:
    given = [
        finding("TP300", "info"),
        finding("TP200", "warning"),
        finding("TP101", "warning"),
        finding("TP700", "error"),
    ]
    heads = [line.split()[0] for line in findings.text(given).splitlines() if line.startswith("TP")]
    assert heads == ["TP700", "TP101", "TP200", "TP300"]


def test_none() -> None:
    assert findings.text([]) == "no findings\n"


def test_long_lines_wrap_and_paths_stay_whole() -> None:
    path = "/srv/models/" + "very-long-folder/" * 6 + "app.py:Net"
    out = findings.text([finding(where=path, message=f"words {'word ' * 30} {path} end")], width=60)
    assert out.count(path) == 2
    assert all(len(line) <= 60 for line in out.splitlines() if path not in line)


def test_evidence_may_be_empty() -> None:
    bare = Finding(code="TP1", name="n", severity="info", where="w", message="m", evidence={}, fix="f")
    assert "=" not in findings.text([bare])
