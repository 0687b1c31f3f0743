"""Which request goes to which replica, which one is refused, and what becomes of those whose replica has ended.

Nothing here waits or reads a clock of its own: the supervisor calls, with the time, and a test can do the same.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from torchproof.serve.metrics import Outcome
from torchproof.serve.wire import Answer, Cancel, Check, Job, Message, Started

# A replica is silent for too long once it has said nothing for this many times what its work should take, and not
# before the minimum: then its requests are given to another one as well.
SILENCE_FACTOR = 4.0
MIN_SILENCE_S = 0.3
# It is ended where it then makes no progress on the CPU, or is still silent after so many times and so long.
STALLED_S = 2.0
MAX_SILENCE_FACTOR = 20.0
MAX_SILENCE_S = 30.0
# Forwards' worth of requests that a replica holds, so that it can choose which to put together: of eight it pads half
# as much as of four.
WINDOW_BATCHES = 8
MIN_WINDOW = 2
# Share of a deadline that the backlog may take up: the estimate is one, and the answer has to travel.
DEADLINE_SHARE = 0.8
# How fast the estimate of the cost follows what is measured: the last 20 answers or so.
SMOOTHING = 0.05
# A request that waits for longer is looked after, in case its client has gone.
LOOK_AFTER_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a request ended without an answer of the model's; ``retry_after_s`` 0: trying again would not help."""

    outcome: Outcome
    status: int
    detail: str
    retry_after_s: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """A request that was accepted.

    Attributes:
        done: called once, with what the client gets and the seconds it waited before a replica had it.
        gone: whether nobody waits for it any more.
        num_bytes: that were reserved for it.
        holders: the replicas that have it; two where the first one is silent.
        retried: it was in the forward of a replica that ended, or fell silent.
    """

    job: Job
    cost_s: float
    arrived: float
    done: Callable[[Answer | Ended, float], None]
    gone: Callable[[], bool]
    holders: list["Holder"] = field(default_factory=list)
    sent: float = 0.0
    retried: bool = False
    queued: bool = False
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class Holder:
    """A replica as the dispatcher sees it.

    Attributes:
        send: a message to it.
        progress: its CPU time, and whether it waits for the CPU; None where it is not a process of its own.
        working: requests in the forward that it has begun; ``expected_s`` what that should take.
        heard: when it last said something, or had nothing to say before it got work.
        silent: it has said nothing for too long; it gets nothing new until it does.
        draining: it gets nothing new, and ends when it has answered.
    """

    send: Callable[[Message], None]
    progress: Callable[[], tuple[float, bool]] | None
    entries: dict[int, Entry] = field(default_factory=dict)
    load_s: float = 0.0
    working: tuple[int, ...] = ()
    expected_s: float = 0.0
    heard: float = 0.0
    silent: bool = False
    draining: bool = False
    checking: bool = False
    checked: float = 0.0
    _cpu: tuple[float, float] = (-1.0, 0.0)  # CPU time, and since when it is that

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it."""
        return not self.entries and not self.checking


class Costs:
    """What a request will cost a replica: by the size of its body, and by how fast things go now.

    Args:
        seconds, num_bytes: of sampled requests; without any, ``default_s`` for all.
        max_items: of a list of requests, so that no body is taken for more of them.
    """

    def __init__(
        self, seconds: Sequence[float], num_bytes: Sequence[int], default_s: float, max_items: int = 1
    ) -> None:
        self.factor = 1.0
        self._max_items = max_items
        if not seconds or len(seconds) != len(num_bytes):
            self._fixed, self._per_byte, self._largest = (min(seconds) if seconds else default_s), 0.0, 0
            return
        pairs = sorted(zip(num_bytes, seconds, strict=True))
        (small, least), (large, most) = pairs[0], pairs[-1]
        self._per_byte = max(0.0, (most - least) / (large - small)) if large > small else 0.0
        self._fixed = max(1e-6, least - self._per_byte * small)
        self._largest = large

    def of(self, num_bytes: int) -> float:
        """Seconds in a replica that has nothing else to do, at the speed of the samples."""
        if num_bytes <= self._largest or not self._largest:
            return self._fixed + self._per_byte * num_bytes
        num_items = min(num_bytes / self._largest, self._max_items)
        return (self._fixed + self._per_byte * self._largest) * num_items

    def seen(self, cost_s: float, busy_s: float) -> None:
        """One request took so long; shared forwards make it less, a busy machine more."""
        self.factor += SMOOTHING * (min(max(busy_s / cost_s, 1e-3), 1e3) - self.factor)


class Dispatcher:
    """Accepts, queues and gives out requests; each one accepted is answered once.

    Args:
        max_queue: requests accepted and not yet answered.
        max_bytes: of their bodies, all together.
        retried: called with the number of requests that go to another replica.
    """

    def __init__(
        self, max_queue: int, retried: Callable[[int], None] = lambda number: None, max_bytes: float = math.inf
    ) -> None:
        self.max_queue = max_queue
        self.max_bytes = max_bytes
        self.costs = Costs((), (), 0.01)
        self.idempotent = True
        self.window = MIN_WINDOW
        self.check_s = 0.0  # of a replica's answer to a check
        self.holders: list[Holder] = []
        self.closed = ""  # why nothing more is accepted, whatever the replicas
        self.reason = "the model is not loaded yet"  # why there is no replica, where there is none
        self._retried = retried
        self._entries: dict[int, Entry] = {}
        self._queue: deque[Entry] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._reserved = 0
        self._bytes = 0
        self._load_s = 0.0  # of all that was accepted, at the speed of the samples

    @property
    def depth(self) -> int:
        """Requests accepted and not yet answered."""
        return len(self._entries) + self._reserved

    @property
    def unready(self) -> str:
        """Why no request can be answered now; empty when one can."""
        if self.closed:
            return self.closed
        return "" if any(not holder.draining for holder in self.holders) else self.reason

    def backlog_s(self) -> float:
        """Seconds until a request that comes now would be answered, by what is known."""
        return self._load_s * self.costs.factor / max(1, len(self._open()))

    def reserve(self, num_bytes: int, left_s: float, held_bytes: int = 0) -> Ended | None:
        """Takes a place in the queue before the body is read; what is refused has taken none.

        Args:
            num_bytes: of the body; 0 where it isn't known.
            left_s: until the deadline.
            held_bytes: that the body may come to.
        """
        if unready := self.unready:
            return Ended("not_ready", 503, unready, 1)
        backlog_s = self.backlog_s()
        wait_s = max(1, math.ceil(backlog_s))
        if self.depth >= self.max_queue:
            return Ended("refused_queue_full", 429, f"{self.depth} requests are waiting, which is the most", wait_s)
        if self._load_s and backlog_s + self.costs.of(num_bytes) * self.costs.factor > DEADLINE_SHARE * left_s:
            detail = (
                f"the answer would come after the deadline: {backlog_s:.3g} s of work wait, {left_s:.3g} s are left"
            )
            return Ended("refused_deadline", 503, detail, wait_s)
        if self.depth and self._bytes + held_bytes > self.max_bytes:
            detail = f"requests of {self._bytes} bytes are waiting; at most {self.max_bytes:.0f} may"
            return Ended("refused_queue_full", 429, detail, wait_s)
        self._reserved += 1
        self._bytes += held_bytes
        return None

    def release(self, held_bytes: int = 0) -> None:
        """Gives a place back whose request never came."""
        self._reserved -= 1
        self._bytes -= held_bytes

    def submit(self, entry: Entry) -> None:
        """Takes the request whose place was reserved."""
        self._reserved -= 1
        self._entries[entry.job.id] = entry
        self._load_s += entry.cost_s
        heapq.heappush(self._deadlines, (entry.job.deadline, entry.job.id))
        entry.queued = True
        self._queue.append(entry)
        self.pump(entry.arrived)

    def pump(self, now: float) -> None:
        """Gives out what waits, the oldest first, to the replica with the least to do."""
        passed = []
        while self._queue:
            free = [holder for holder in self._open() if len(holder.entries) < self.window]
            if not free:
                break
            entry = self._queue.popleft()
            others = [holder for holder in free if holder not in entry.holders]
            if others:
                entry.queued = False
                self._give(entry, min(others, key=lambda holder: holder.load_s), now)
            else:
                passed.append(entry)  # only those that have it could take it; it must not hold up the others
        self._queue.extendleft(reversed(passed))

    def _open(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.silent and not holder.draining]

    def _give(self, entry: Entry, holder: Holder, now: float) -> None:
        if holder.idle:
            holder.heard = now
        entry.sent = entry.sent or now
        entry.holders.append(holder)
        holder.entries[entry.job.id] = entry
        holder.load_s += entry.cost_s
        lone = self.depth == 1 and not entry.job.alone
        holder.send(msgspec.structs.replace(entry.job, lone=True) if lone else entry.job)

    def started(self, holder: Holder, message: Started, now: float) -> None:
        """A replica begins a forward, or is alive between two."""
        self._heard(holder, now)
        holder.working, holder.expected_s = message.ids, message.expected_s

    def answered(self, holder: Holder, answer: Answer, now: float) -> None:
        """A replica has an answer; the first one counts."""
        self._heard(holder, now)
        holder.working = ()
        entry = holder.entries.get(answer.id)
        if entry is None:
            return  # nobody waits for it any more
        if answer.batch_size:
            self.costs.seen(entry.cost_s, answer.busy_s)
        self._end(entry, answer)
        self.pump(now)

    def health(self, holder: Holder, now: float) -> None:
        """A replica has answered a check."""
        self._heard(holder, now)
        holder.working = ()  # it answers checks between forwards only
        holder.checking, holder.checked = False, now

    def _heard(self, holder: Holder, now: float) -> None:
        holder.heard, holder.silent = now, False
        holder._cpu = (-1.0, 0.0)

    def _end(self, entry: Entry, result: Answer | Ended) -> None:
        if entry.queued:
            entry.queued = False
            self._queue.remove(entry)  # at once: it holds a body
        del self._entries[entry.job.id]
        self._bytes -= entry.num_bytes
        self._load_s = self._load_s - entry.cost_s if self._entries else 0.0
        cancelled = not isinstance(result, Answer) or len(entry.holders) > 1
        for holder in entry.holders:
            holder.entries.pop(entry.job.id, None)
            holder.load_s = holder.load_s - entry.cost_s if holder.entries else 0.0
            if cancelled:
                holder.send(Cancel(ids=(entry.job.id,)))
        entry.holders.clear()
        entry.done(result, max(0.0, entry.sent - entry.arrived))

    def add(self, holder: Holder, now: float) -> None:
        """A replica is ready."""
        holder.heard = holder.checked = now
        self.holders.append(holder)
        self.pump(now)

    def drop(self, holder: Holder, now: float, *, blame: bool) -> None:
        """A replica has ended. Its requests go to others; those in its forward once, and alone.

        Args:
            blame: whether a request may have ended it.
        """
        self.holders = [other for other in self.holders if other is not holder]
        entries = list(holder.entries.values())
        suspects = set(holder.working or holder.entries) if blame else set()
        holder.entries.clear()
        again = []
        for entry in entries:
            entry.holders.remove(holder)
            if entry.holders or entry.queued:
                continue  # another one has it already, or will
            if not self.idempotent:
                detail = "the process that had the request has ended; it may have been carried out or not"
                self._end(entry, Ended("error", 500, detail))
            elif entry.job.id in suspects and entry.retried:
                self._end(entry, Ended("error", 500, "the process that had the request has ended, twice"))
            else:
                if entry.job.id in suspects:
                    self._suspect(entry)
                again.append(entry)
        self._requeue(again, now)

    def _suspect(self, entry: Entry) -> None:
        entry.retried = True
        entry.job = msgspec.structs.replace(entry.job, alone=True)

    def drain(self, holder: Holder) -> None:
        """Gives it nothing new."""
        holder.draining = True

    def fail_all(self, reason: str) -> None:
        """Ends all that waits."""
        for entry in list(self._entries.values()):
            self._end(entry, Ended("not_ready", 503, reason, 1))

    def expire(self, now: float) -> None:
        """Answers what is past its deadline, and forgets what nobody waits for."""
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self._entries.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                self._end(entry, Ended("deadline_exceeded", 504, "the deadline passed before the answer was there"))
        for entry in list(self._entries.values()):
            if now - entry.arrived > LOOK_AFTER_S and entry.gone():
                self._end(entry, Ended("disconnected", 499, "the client has gone"))
        self.pump(now)

    def paused(self, now: float) -> None:
        """Nothing was heard because nobody listened: the server, or the whole machine, stood still until now."""
        for holder in self.holders:
            holder.heard = max(holder.heard, now)

    def check(self, now: float, every_s: float) -> None:
        """Asks replicas for their health whose last one is so old."""
        for holder in self.holders:
            if not holder.checking and now - holder.checked >= every_s:
                if holder.idle:
                    holder.heard = now
                holder.checking = True
                holder.send(Check())

    def hung(self, now: float) -> list[Holder]:
        """Replicas that must be ended; requests of those that are only silent go to others as well."""
        stuck = []
        for holder in self.holders:
            if holder.idle or holder.progress is None:
                continue
            # It says when a forward begins, but for a lone request's; else only a request's own code is at work.
            longest_s = max((entry.cost_s for entry in holder.entries.values()), default=0.0)
            work_s = holder.expected_s if holder.working else longest_s
            if holder.checking:
                work_s = max(work_s, self.check_s)
            usual_s = work_s * max(1.0, self.costs.factor)
            silence_s = now - holder.heard
            if silence_s < max(MIN_SILENCE_S, SILENCE_FACTOR * usual_s):
                continue
            holder.silent = True
            self._hedge(holder, now)
            cpu_s, runnable = holder.progress()
            if runnable or cpu_s != holder._cpu[0]:
                holder._cpu = (cpu_s, now)
            stalled = now - holder._cpu[1] > STALLED_S
            if stalled or silence_s > max(MAX_SILENCE_S, MAX_SILENCE_FACTOR * usual_s):
                stuck.append(holder)
        return stuck

    def _hedge(self, holder: Holder, now: float) -> None:
        if not self.idempotent or not any(other is not holder for other in self._open()):
            return
        suspects = set(holder.working or holder.entries)
        again = [
            entry
            for entry in holder.entries.values()
            if len(entry.holders) == 1 and not entry.retried and not entry.queued
        ]
        for entry in again:
            if entry.job.id in suspects:
                self._suspect(entry)
        self._requeue(again, now)

    def _requeue(self, entries: Sequence[Entry], now: float) -> None:
        """In front of the others; they are older."""
        again = [entry for entry in entries if not entry.queued]
        for entry in again:
            entry.queued = True
        self._queue.extendleft(reversed(again))
        if again:
            self._retried(len(again))
        self.pump(now)
