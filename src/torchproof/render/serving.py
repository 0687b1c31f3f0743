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
        ("replicas", _replicas(serving)),
        ("batches", _batches(serving)),
        ("limits", _limits(serving)),
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


def _replicas(serving: Serving) -> str:
    if not serving.num_replicas:
        return "none: the model runs in the server's own process"
    num_ready = len(serving.memory)
    if not num_ready:
        return f"{serving.num_replicas}, of which none is up at the moment"
    private = [sample.private_bytes for sample in serving.memory]
    shared = [sample.rss_bytes - sample.private_bytes for sample in serving.memory]
    each = f"{_mib(min(private))}" if min(private) == max(private) else f"{_mib(min(private))} to {_mib(max(private))}"
    number = f"{serving.num_replicas}" + (f" ({num_ready} up)" if num_ready < serving.num_replicas else "")
    every = "each " if serving.num_replicas > 1 else ""
    return f"{number}, {every}with {each} of its own and {_mib(max(shared))} shared"


def _batches(serving: Serving) -> str:
    size = serving.choice.max_batch_size
    if size == 1:
        return "one request at a time"
    kind = "padded where it pays" if serving.choice.padding else "of equal sizes"
    return f"up to {size} requests, {kind}"


def _limits(serving: Serving) -> str:
    caps = serving.caps
    sizes = "".join(f"{dim} {size}, " for dim, size in caps.max_sizes.items())
    return (
        f"{sizes}body {_mib(caps.max_body_bytes)}, one request {_mib(caps.max_item_bytes)}, list {caps.max_items}, "
        f"queue {serving.max_queue}, deadline {serving.deadline_s:g} s"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
