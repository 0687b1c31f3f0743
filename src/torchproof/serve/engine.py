"""What a replica does with the requests it holds: pools their rows, shares forwards, answers each one once.

One ``Job`` is one HTTP request. Its rows wait with those of the other jobs; a round puts all that wait into forwards by
their measured cost, and what arrives in between is encoded and waits for the next round.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch

from torchproof.serve import logs
from torchproof.serve.batching import CostModel, groups, padding_share
from torchproof.serve.formats import Parsed, Schema, TooLargeError, parse
from torchproof.serve.load import Loaded
from torchproof.serve.lone import Threads
from torchproof.serve.wire import Answer, Broken, Cancel, Job, Message, Started
from torchproof.target.request import NotJsonError, RequestError
from torchproof.target.respond import encode
from torchproof.target.rows import Row, restore, run_rows, sizes_of
from torchproof.types.serving import Caps, Costs

# A replica that is at work on the user's encode and decode says so after so long: silence would mean that it hangs.
HEARTBEAT_S = 0.1
# Seconds that one forward of several rows may be expected to take: so long a new request may wait behind it, and beyond
# it a larger batch gains little (on a CPU the gain ends at a few rows).
BUDGET_S = 0.1

log = logging.getLogger("torchproof.serve")


@dataclass(slots=True)
class _Work:
    """A job that was accepted; ``outputs`` are filled in row by row."""

    job: Job
    parsed: Parsed
    arrived: float
    outputs: list[Row | None]
    missing: int
    busy_s: float = 0.0
    model_s: float = 0.0
    wait_s: float = -1.0
    batch_size: int = 0
    padding: float = 0.0


@dataclass(slots=True)
class _Waiting:
    """One row that waits for its forward."""

    work: _Work
    index: int
    row: Row
    sizes: tuple[int, ...]


@dataclass
class Engine:
    """Takes jobs, runs one forward at a time, gives answers.

    Attributes:
        canary: what is wrong with the model, by a row whose answer is known; empty when nothing is.
        send: takes replies in order; called before each forward and after it.
        threads: for a request that has the machine to itself; None: as the model was loaded.
        num_requests: answered so far.
    """

    loaded: Loaded
    schema: Schema
    caps: Caps
    costs: Costs
    canary: Callable[[], str]
    send: Callable[[list[Message]], None]
    threads: Threads | None = None
    clock: Callable[[], float] = time.monotonic
    num_requests: int = 0
    _works: dict[int, _Work] = field(default_factory=dict)
    _waiting: list[_Waiting] = field(default_factory=list)
    _round: deque[list[_Waiting]] = field(default_factory=deque)
    _alone: deque[tuple[Job, float]] = field(default_factory=deque)
    _replies: list[Message] = field(default_factory=list)
    _sent: float = 0.0

    def __post_init__(self) -> None:
        self._model = CostModel(self.costs)

    @property
    def busy(self) -> bool:
        """Whether there is something for ``step`` to do."""
        return bool(self._round or self._waiting or self._alone)

    def take(self, job: Job) -> None:
        """Reads and encodes a job, whose rows wait then; what can't be read is answered at once."""
        if job.alone:
            self._alone.append((job, self.clock()))
        else:
            self._waiting += self._accept(job, self.clock())
            logs.current_request.set("")
            self._beat()

    def cancel(self, cancel: Cancel) -> None:
        """Forgets jobs: nobody waits for them."""
        for id in cancel.ids:
            self._works.pop(id, None)
        self._alone = deque(item for item in self._alone if item[0].id not in cancel.ids)

    def step(self) -> None:
        """One forward, and the answers that are complete with it."""
        if self._alone:
            job, arrived = self._alone.popleft()
            if job.deadline > self.clock():
                self._started([job.id], self.costs.seconds[-1][0])  # from here on it alone is to blame
                for waiting in self._accept(job, arrived):
                    if alive := self._alive([waiting]):  # the row before may have failed
                        self._run(alive)
        else:
            if not self._round:
                self._plan()
            if self._round and (group := self._alive(self._round.popleft())):
                self._run(group)
        logs.current_request.set("")
        self.flush()

    def flush(self) -> None:
        """Hands over the answers that wait."""
        if self._replies:
            replies, self._replies = self._replies, []
            self._sent = self.clock()
            self.send(replies)

    def _beat(self) -> None:
        """Says that it is alive, between two requests that are encoded or decoded."""
        if self.clock() - self._sent > HEARTBEAT_S:
            self._started((), 0.0)

    def _plan(self) -> None:
        waiting, self._waiting = self._alive(self._waiting), []
        choice = self.loaded.choice
        for group in groups(
            [item.sizes for item in waiting],
            self._model,
            max_batch_size=choice.max_batch_size,
            padding=choice.padding,
            budget_s=BUDGET_S,
        ):
            self._round.append([waiting[i] for i in group])

    def _alive(self, items: Sequence[_Waiting]) -> list[_Waiting]:
        """Those whose job is neither answered nor cancelled nor past its deadline."""
        now = self.clock()
        for item in items:
            if item.work.job.deadline < now:
                self._works.pop(item.work.job.id, None)
        return [item for item in items if self._works.get(item.work.job.id) is item.work]

    def _accept(self, job: Job, arrived: float) -> list[_Waiting]:
        start = self.clock()
        logs.current_request.set(job.request_id)
        try:
            parsed = parse(job, self.schema)
            inputs = self.loaded.signature.inputs
            rows = parsed.rows or self._encoded(parsed.requests)
            waiting = []
            work = _Work(job, parsed, arrived, [None] * len(rows), len(rows))
            for index, row in enumerate(rows):
                sizes = sizes_of(row, inputs)
                for dim, size in sizes.items():
                    if size > self.caps.max_sizes[dim]:
                        raise TooLargeError(
                            f"{dim} is {size}{self._which(index, rows)}; at most {self.caps.max_sizes[dim]} is taken",
                            help="send a smaller input",
                        )
                waiting.append(_Waiting(work, index, row, tuple(sizes.values())))
        except (Exception, SystemExit) as exc:  # noqa: BLE001  the user's code may raise anything
            self._reply_error(job, exc)
            return []
        work.busy_s = self.clock() - start
        self._works[job.id] = work
        return waiting

    def _encoded(self, requests: Sequence[Any]) -> list[Row]:
        """Raises RequestError; it names the item where there are several."""
        signature = self.loaded.signature
        rows = []
        for index, request in enumerate(requests):
            try:
                rows.append(encode(self.loaded.service, signature, request))
            except RequestError as exc:
                raise RequestError(f"{exc}{self._which(index, requests)}", help=exc.help) from None
        return rows

    @staticmethod
    def _which(index: int, items: Sequence[Any]) -> str:
        return f" in item {index}" if len(items) > 1 else ""

    def _run(self, group: Sequence[_Waiting]) -> None:
        """A forward; where it fails its halves, so that in the end a row fails alone."""
        largest = [max(sizes) for sizes in zip(*(item.sizes for item in group), strict=True)]
        volume = 1
        for size in largest:
            volume *= size
        works = {item.work.job.id: item.work for item in group}
        logs.current_request.set(group[0].work.job.request_id if len(works) == 1 else "")
        cost_s = self._model.cost_s(len(group), volume)
        lone = self.threads is not None and len(self._works) == 1 and group[0].work.job.lone
        if not lone or group[0].work.missing > len(group):
            # Of one forward alone the server knows; to hear of it would take time of the cores that it may use.
            self._started(list(works), cost_s)

        def forward() -> list[Row]:
            return run_rows(self.loaded.run, [item.row for item in group], self.loaded.signature)

        start = self.clock()
        for work in works.values():
            if work.wait_s < 0:
                work.wait_s = start - work.arrived
        try:
            outputs = forward() if self.threads is None else self.threads.run(forward, lone=lone, cost_s=cost_s)
        except (Exception, SystemExit) as exc:  # noqa: BLE001  a model may raise anything
            if len(group) == 1:
                self._reply_error(group[0].work.job, exc)
                return
            log.warning("a forward of %s rows failed and is done again in halves: %s", len(group), type(exc).__name__)
            half = len(group) // 2
            for part in (group[:half], group[half:]):
                if alive := self._alive(part):
                    self._run(alive)
            return
        each_s = (self.clock() - start) / len(group)
        if self.loaded.finite and not _finite(outputs) and (reason := self.canary()):
            ids = (*self._works, *(job.id for job, _ in self._alone))
            self._replies.append(Broken(ids=ids, reason=reason))
            self._works.clear()
            self._alone.clear()
            return
        share = padding_share([item.sizes for item in group])
        for item, row in zip(group, outputs, strict=True):
            work = item.work
            work.outputs[item.index] = row
            work.missing -= 1
            work.busy_s += each_s
            work.model_s += each_s
            if len(group) >= work.batch_size:
                work.batch_size, work.padding = len(group), share
            if not work.missing:
                self._answer(work)
                self._beat()

    def _answer(self, work: _Work) -> None:
        job, loaded = work.job, self.loaded
        start = self.clock()
        logs.current_request.set(job.request_id)
        rows = [row for row in work.outputs if row is not None]
        try:
            with torch.inference_mode():
                if work.parsed.requests:
                    kind = loaded.signature.output_kind
                    values = [
                        loaded.service.decode(restore(row, kind), request)
                        for row, request in zip(rows, work.parsed.requests, strict=True)
                    ]
                else:
                    values = list(rows)
                written = work.parsed.write(values)
        except (Exception, SystemExit) as exc:  # noqa: BLE001  the user's code may raise anything
            if isinstance(exc, (ValueError, OverflowError)) and not _finite(rows):  # int(inf) overflows
                exc = RequestError(f"for this request the model gives no finite answer: {exc}", help="")
            self._reply_error(job, exc)
            return
        del self._works[job.id]
        self.num_requests += 1
        self._replies.append(
            Answer(
                id=job.id,
                status=200,
                body=written.body,
                content_type=written.content_type,
                headers=written.headers,
                busy_s=work.busy_s + self.clock() - start,
                model_s=work.model_s,
                wait_s=work.wait_s,
                batch_size=work.batch_size,
                padding=work.padding,
            )
        )

    def _reply_error(self, job: Job, exc: BaseException) -> None:
        """What the client is told: of its own mistake everything, of others nothing but that the log says more."""
        self._works.pop(job.id, None)
        self.num_requests += 1
        if isinstance(exc, NotJsonError):
            status = HTTPStatus.BAD_REQUEST
        elif isinstance(exc, TooLargeError):
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        elif isinstance(exc, RequestError):
            status = HTTPStatus.UNPROCESSABLE_ENTITY
        else:
            log.error("a request was answered with 500", exc_info=exc)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        text = (
            str(exc) if status < HTTPStatus.INTERNAL_SERVER_ERROR else "the service raised an error; its log says more"
        )
        self._replies.append(Answer(id=job.id, status=status.value, body=text.encode("utf-8", "replace")))

    def _started(self, ids: Sequence[int], expected_s: float) -> None:
        self._replies.append(Started(ids=tuple(ids), expected_s=expected_s))
        self.flush()


def _finite(rows: Sequence[Row]) -> bool:
    """Whether all values are; a sum, which is one pass, is finite only where they are."""
    tensors = [tensor for row in rows for tensor in row.values() if tensor.is_floating_point()]
    return all(math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all()) for tensor in tensors)
