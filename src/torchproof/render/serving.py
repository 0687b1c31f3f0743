"""What ``serve`` says when it is ready, as text or as one line of JSON."""

import msgspec

from torchproof.types import GoldenSeen
from torchproof.types.serving import Serving

_LABEL = 12  # columns of the labels in front


def text(serving: Serving) -> str:
    """One block; the findings in one line each."""
    rows = [
        ("serving", serving.target + (f" from {serving.bundle}" if serving.bundle else "")),
        ("candidate", serving.choice.candidate.label),
        ("golden set", _golden(serving.golden)),
        *(("finding", f"{f.code} {f.name}: {f.message}") for f in serving.findings),
    ]
    lines = [f"{label + ':':<{_LABEL}}{value}\n" for label, value in rows]
    return "".join(lines) + f"serving at {serving.url}   docs at /docs\n"


def json(serving: Serving) -> str:
    """The record on one line, for a program that waits for it."""
    return msgspec.json.encode(serving).decode() + "\n"


def _golden(replays: tuple[GoldenSeen, ...]) -> str:
    if not replays:
        return "none: nothing was measured"
    lower_is_worse = replays[0].metric == "cos"
    worst = (min if lower_is_worse else max)(replays, key=lambda seen: seen.error)
    bound = f"{worst.metric}{'>=' if lower_is_worse else '<='}{worst.bound:g}"
    num_rows = worst.num_rows  # every one is within: serve refuses otherwise
    sizes = " and ".join(str(seen.batch_size) for seen in replays)
    return f"{num_rows} of {num_rows} rows within {bound}, worst {worst.error:.5g}, at batch size {sizes}"
