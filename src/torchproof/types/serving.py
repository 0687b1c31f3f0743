"""What ``torchproof serve`` knows about a model once it can answer, and what it says then."""

from torchproof.types.candidate import Choice
from torchproof.types.finding import Finding
from torchproof.types.observation import GoldenSeen
from torchproof.types.record import Record


class Caps(Record):
    """What one HTTP request may be; more is answered with 413 before the model sees it.

    Attributes:
        max_body_bytes: of the whole body.
        max_item_bytes: of one request; a longer body must be a list of them, or tensors with a batch dim.
        max_items: requests in one list, or rows in one tensor request.
        max_sizes: for each variable dim, by its name, the largest size; proven at warm-up.
    """

    max_body_bytes: int
    max_item_bytes: int
    max_items: int
    max_sizes: dict[str, int]


class CapsAsked(Record):
    """Caps that the user named; None and missing names are derived from the samples."""

    max_body_bytes: int | None = None
    max_items: int | None = None
    max_sizes: dict[str, int] = {}


class Costs(Record):
    """Seconds of one forward, measured at warm-up.

    Attributes:
        volumes: product of a row's variable sizes, ascending; (1,) where there are none.
        batch_sizes: rows to a forward, ascending from 1.
        seconds: ``seconds[i][j]`` at ``volumes[i]`` and ``batch_sizes[j]``.
    """

    volumes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


class MemorySample(Record):
    """One look at the memory of a replica.

    Attributes:
        at_s: monotonic clock, seconds.
        num_requests: answered by this replica so far.
        rss_bytes: resident, what replicas share included.
        private_bytes: resident and not shared with any other process.
        in_use_bytes: handed out by malloc, mapped blocks included; None where malloc can't be asked.
        free_bytes: held by malloc and not handed out; None as above.
        device_allocated_bytes, device_reserved_bytes, num_device_ooms: CUDA; None without it.
    """

    at_s: float
    num_requests: int
    rss_bytes: int
    private_bytes: int
    in_use_bytes: int | None = None
    free_bytes: int | None = None
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    num_device_ooms: int | None = None


class Facts(Record):
    """What the first replica found out; the server and the other replicas go by it.

    Attributes:
        target: as the user wrote it when the plan was made.
        choice: the plan's choice that runs.
        golden: replays of the golden set at this start; empty without a bundle.
        findings: of this start.
        idempotent: whether a request may be answered by another replica where the first one ended.
        request_s: seconds of one sampled request in the replica, all of it, and ``request_bytes`` its body.
        samples: JSON bodies of a few sampled requests, ascending by size; empty where there are none.
        documents: JSON by name: ``openapi``; ``server`` and ``model``, the Open Inference Protocol's metadata.
    """

    target: str
    choice: Choice
    golden: tuple[GoldenSeen, ...]
    findings: tuple[Finding, ...]
    caps: Caps
    costs: Costs
    idempotent: bool
    request_s: tuple[float, ...]
    request_bytes: tuple[int, ...]
    samples: tuple[bytes, ...]
    documents: dict[str, bytes]


class Serving(Record):
    """What is served, and where.

    Attributes:
        bundle: the bundle's folder; None for a target without one.
        caps: as in ``Facts``.
        max_queue: requests accepted and not yet answered.
        deadline_s: after which a request is answered with an error.
        num_replicas: 0: the model runs in the server's own process.
        num_threads: intra-op threads of each; 0: torch's own default.
        memory: of each replica, after warm-up.
        golden: replays of the golden set at this start; empty without a bundle.
        url: without a slash at its end; ``/docs`` below it is the documentation.
    """

    target: str
    bundle: str | None
    choice: Choice
    golden: tuple[GoldenSeen, ...]
    findings: tuple[Finding, ...]
    caps: Caps
    max_queue: int
    deadline_s: float
    num_replicas: int
    num_threads: int
    memory: tuple[MemorySample, ...]
    url: str
