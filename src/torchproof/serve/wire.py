"""What the server, its zygotes and its replicas say to each other: msgpack messages, each with its length in front.

Times are ``time.monotonic()``, which all processes of a machine share.
"""

import signal
import struct
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, dataclass_transform

import msgspec

from torchproof.types.serving import CapsAsked, Facts, MemorySample
from torchproof.types.target import Target

Format = Literal["json", "npy", "safetensors", "v2"]

# Of the golden set, for a ``Check``: smallest, median and largest. A few milliseconds of most models.
CHECK_ROWS = 3

# At this signal a zygote or a replica writes where each of its threads is, whatever they are about; it gets so long for
# it before it is ended.
WHERE = signal.SIGUSR2
WHERE_S = 0.2

LENGTH = struct.Struct("!I")


@dataclass_transform(frozen_default=True)  # for type checkers
class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all of them."""


class Setup(Message):
    """The first message to a zygote: what its replicas will serve.

    Attributes:
        bundle: its folder; None for a bare target.
        share: whether to load the service and its module before a replica is forked off.
        log_format: ``text`` or ``json``.
    """

    bundle: str | None
    target: Target | None
    share: bool
    log_format: Literal["text", "json"]


class Fork(Message):
    """Asks a zygote for a replica; the replica's end of its socket comes along."""


class Kill(Message):
    """Asks a zygote to end a replica at once; one that hangs is asked first where it is, for the log."""

    pid: int
    hung: bool = False


class Prepared(Message):
    """A zygote can fork; ``refusal`` says why it must not after what it loaded, empty when it may."""

    refusal: str


class Forked(Message):
    """The answer to ``Fork``, in order."""

    pid: int


class Exited(Message):
    """A replica has ended; ``status`` as ``os.waitstatus_to_exitcode`` has it."""

    pid: int
    status: int


class Begin(Message):
    """The first message to a replica.

    Attributes:
        cores: that it may run on.
        num_threads: at most so many; 0 as planned.
        name: of the model, in the URLs of the Open Inference Protocol.
        facts: of the first replica; None for the first one, which finds them out.
        lone_cores: that a request may use while no other one is at work; empty: the replica's own.
    """

    cores: tuple[int, ...]
    num_threads: int
    name: str
    asked: CapsAsked
    facts: Facts | None = None
    lone_cores: tuple[int, ...] = ()


class Job(Message):
    """One HTTP request: everything that is done with it happens in one replica.

    Attributes:
        format: of the body.
        header_length: of ``v2``, bytes of JSON in front of the binary tensors; 0 where all is JSON.
        deadline: after which nobody waits for it.
        alone: it was with a replica that ended, so it shares no forward with others.
        request_id: for the log.
        lone: no other request is at work.
    """

    id: int
    format: Format
    body: bytes
    deadline: float
    header_length: int = 0
    alone: bool = False
    request_id: str = ""
    lone: bool = False


class Cancel(Message):
    """Nobody waits for these any more."""

    ids: tuple[int, ...]


class Check(Message):
    """Asks for a ``Health``: a few rows of the golden set, and the memory."""


class Started(Message):
    """A forward begins, with rows of these jobs in it; nothing is heard before its end. Of none: it is alive.

    Attributes:
        expected_s: what it takes by the costs measured at warm-up.
    """

    ids: tuple[int, ...]
    expected_s: float


class Answer(Message):
    """What the client gets.

    Attributes:
        status: HTTP.
        body: for a status from 400 the problem's detail, as text.
        headers: besides the content type.
        busy_s: the replica's seconds that went into it; a forward's are divided among its rows.
        model_s: of these, in forwards.
        wait_s: between its arrival at the replica and its first forward.
        batch_size: rows of the largest forward that it was in.
        padding: share of that forward's elements that were padding.
    """

    id: int
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = {}
    busy_s: float = 0.0
    model_s: float = 0.0
    wait_s: float = 0.0
    batch_size: int = 0
    padding: float = 0.0


class Broken(Message):
    """The replica gives wrong answers; ``ids`` were with it and are not answered."""

    ids: tuple[int, ...]
    reason: str


class Health(Message):
    """The answer to ``Check``.

    Attributes:
        wrong: what differs from the golden set; empty when nothing does.
        num_fallbacks: inputs that a compiled model ran eagerly, as they would have needed another graph.
    """

    wrong: str
    memory: MemorySample
    num_fallbacks: int = 0


class Ready(Message):
    """The model answers. ``facts`` of the first replica; the others found nothing out."""

    facts: Facts | None
    memory: MemorySample


class Failed(Message):
    """It can't be loaded: what was raised, as ``errors.describe`` writes it."""

    error: dict[str, str]


Request = Begin | Job | Cancel | Check
Reply = Started | Answer | Broken | Health | Ready | Failed
Order = Setup | Fork | Kill  # to a zygote
Report = Prepared | Forked | Exited | Failed  # from it

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class Reader(Generic[M]):
    """Cuts a stream of bytes into messages.

    Args:
        kinds: which messages may come: ``Request``, ``Reply``, ``Order`` or ``Report``.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that are complete with ``data``."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            yield self._decoder.decode(body)
