"""What the first replica finds out once its model answers: costs, caps, and the documents that say both."""

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from torchproof.errors import UsageError
from torchproof.serve import oip, openapi
from torchproof.serve.formats import Schema, takes_lists
from torchproof.serve.load import Loaded
from torchproof.serve.warmup import WarmUp, warm_up
from torchproof.target.request import request_type, to_json
from torchproof.target.respond import respond
from torchproof.target.rows import Row, run_rows, sizes_of
from torchproof.types import InputSpec
from torchproof.types.serving import Caps, CapsAsked, Costs, Facts

MAX_ITEMS = 64  # requests in one list: more than any batch that pays on a CPU, and still one short answer
# One request may be so many times as long as the longest sampled one, and is never held to less than the minimum.
ITEM_FACTOR = 4
MIN_ITEM_BYTES = 64 * 1024
# A float as JSON writes it, with its comma and some white space.
JSON_BYTES_PER_NUMBER = 25
# A list's whole body, where one request is smaller: so much is read into memory for each client.
MAX_LIST_BYTES = 16 * 1024 * 1024
MAX_SAMPLES = 3


def find_facts(loaded: Loaded, asked: CapsAsked, name: str) -> tuple[Facts, WarmUp]:
    """Warms the model up and says what it takes and costs.

    Args:
        name: of the model, in the URLs of the Open Inference Protocol.

    Raises:
        UsageError: a cap that the user named can't be kept, or takes none of the samples.
    """
    choice = loaded.choice
    warm = warm_up(
        loaded.run,
        loaded.signature,
        loaded.rows,
        max_batch_size=choice.max_batch_size,
        padding=choice.padding,
        max_sizes=asked.max_sizes,
    )
    bodies = [body for request in loaded.requests if (body := _as_json(request))]
    caps = _caps(loaded, asked, warm, bodies)
    lists = takes_lists(loaded.service, loaded.requests)
    facts = Facts(
        target=loaded.target,
        choice=choice,
        golden=loaded.golden,
        findings=loaded.findings,
        caps=caps,
        costs=warm.costs,
        idempotent=loaded.service.idempotent,
        request_s=tuple(_seconds_of(loaded)),
        request_bytes=tuple(map(len, bodies)),
        samples=tuple(sorted(bodies, key=len)[:MAX_SAMPLES]),
        documents={
            "openapi": openapi.document(
                loaded.service,
                loaded.target,
                loaded.requests[:1],
                caps=caps,
                takes_lists=lists,
                model_name=name,
                signature=loaded.signature,
            ),
            "server": msgspec.json.encode(oip.server_metadata()),
            "model": msgspec.json.encode(oip.model_metadata(name, loaded.signature)),
        },
    )
    return facts, warm


def schema_of(loaded: Loaded, caps: Caps, name: str) -> Schema:
    """What bodies are read by; ``name`` is the model's."""
    return Schema(
        signature=loaded.signature,
        service=loaded.service,
        request_type=request_type(loaded.service),
        takes_lists=takes_lists(loaded.service, loaded.requests),
        max_items=caps.max_items,
        max_item_bytes=caps.max_item_bytes,
        model_name=name,
    )


def touch(loaded: Loaded, costs: Costs) -> None:
    """The first forwards, which are slow, at the smallest and the largest sampled size and batch."""
    rows = [loaded.rows[0], loaded.rows[-1]]
    for batch_size in sorted({1, costs.batch_sizes[-1]}):
        for row in rows:
            run_rows(loaded.run, [row] * batch_size, loaded.signature)


def _as_json(request: Any) -> bytes:
    try:
        return to_json(request)
    except (TypeError, ValueError):  # a request that JSON has no form for
        return b""


def _seconds_of(loaded: Loaded) -> list[float]:
    """Of each sampled request, all of its way but the waiting; the better of two, the first warms the user's code."""
    found = []
    for request in loaded.requests:
        seconds = math.inf
        for _ in range(2):
            start = time.perf_counter()
            respond(loaded.service, loaded.signature, loaded.run, request)
            seconds = min(seconds, time.perf_counter() - start)
        found.append(seconds)
    return found


def _caps(loaded: Loaded, asked: CapsAsked, warm: WarmUp, bodies: Sequence[bytes]) -> Caps:
    largest_sample = max(map(len, bodies), default=0)
    at_caps = JSON_BYTES_PER_NUMBER * sum(
        _numel(spec, loaded.rows[-1], warm.max_sizes) for spec in loaded.signature.inputs
    )
    item = max(MIN_ITEM_BYTES, ITEM_FACTOR * largest_sample, at_caps)
    items = asked.max_items or MAX_ITEMS
    body = asked.max_body_bytes or min(item * items, max(item, MAX_LIST_BYTES))
    smallest_sample = min(map(len, bodies), default=0)
    if body < smallest_sample:
        raise UsageError(
            f"--max-body-bytes {body} takes none of the samples: the smallest has {smallest_sample} bytes",
            help=f"the largest has {largest_sample}",
        )
    one = asked.max_body_bytes or item  # who names a larger body means one large request too
    return Caps(max_body_bytes=body, max_item_bytes=min(one, body), max_items=items, max_sizes=warm.max_sizes)


def _numel(spec: InputSpec, row: Row, max_sizes: dict[str, int]) -> int:
    sizes = sizes_of(row, [spec]) | max_sizes
    return math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
