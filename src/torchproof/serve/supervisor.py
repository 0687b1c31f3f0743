"""Keeps replicas up: starts them, watches them, replaces those that end, hang, answer wrongly or grow, and reloads."""

import asyncio
import itertools
import logging
import statistics
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from torchproof.errors import BundleError, TorchproofError, TrialError, UserCodeError, said
from torchproof.machine.memory import usable_memory
from torchproof.serve.dispatch import WINDOW_BATCHES, Costs, Dispatcher, Holder
from torchproof.serve.generation import Generation
from torchproof.serve.metrics import Metrics
from torchproof.serve.processes import Replica
from torchproof.serve.wanted import Wanted
from torchproof.serve.wire import CHECK_ROWS, Answer, Begin, Broken, Health, Job, Message, Reply, Started
from torchproof.types.serving import Facts, MemorySample

TICK_S = 0.02  # how exactly deadlines are kept; answers to late requests leave so much before theirs
PAUSE_S = 0.2  # a tick that is so late says that this process stood still, not that replicas are silent
CHECK_S = 10.0  # between two looks at a replica: so long a wrong one may answer before it is found out
# Share of the machine's memory that the replicas may take before the largest is replaced.
MEMORY_SHARE = 0.8
# A replica that ends sooner after its start than this is started again after a pause, twice as long each time.
SETTLED_S = 10.0
MAX_PAUSE_S = 30.0
# A replica is given up that takes so many times as long to load as the first one, and so long.
LOAD_FACTOR = 10.0
MIN_LOAD_S = 60.0
NUM_PINGS = 20
# In-process, a forward holds up everything else that the server does, so it must be short at any size.
MAX_IN_PROCESS_S = 0.002

log = logging.getLogger("torchproof.serve")


class Supervisor:
    """Starts what is wanted and keeps the dispatcher supplied with replicas."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.generation: Generation | None = None
        self._generations: list[Generation] = []  # that one, and those before it until they have answered
        self._reloading = asyncio.Lock()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._pings: dict[int, asyncio.Future[None]] = {}

    @property
    def facts(self) -> Facts | None:
        """What the first replica found out; None before it is ready."""
        return self.generation.facts if self.generation else None

    def replicas(self) -> dict[str, int]:
        """How many are in each state."""
        holders = self.dispatcher.holders
        silent = sum(holder.silent for holder in holders)
        draining = sum(holder.draining for holder in holders)
        wanted = len(self.generation.keepers) if self.generation else 0
        ready = len(holders) - silent - draining
        return {"ready": ready, "silent": silent, "draining": draining, "starting": max(0, wanted - ready - silent)}

    def memory(self) -> dict[int, MemorySample]:
        """The last sample of each replica."""
        replicas = self.generation.replicas if self.generation else []
        return {replica.number: replica.memory for replica in replicas if replica.memory is not None}

    async def start(self, wanted: Wanted) -> Generation:
        """Starts the first generation, or one that takes the place of the present one once it answers.

        Raises:
            TorchproofError, UserCodeError, TrialError: it can't be served; what was served before goes on.
        """
        generation = Generation(wanted)
        self._generations.append(generation)
        try:
            if wanted.num_replicas == 0:
                self._adopt(generation, await self._go_in_process(generation, None))
            else:
                await self._start_replicas(generation)
        except BaseException:
            await self._close(generation, drain=False)
            raise
        before, self.generation = self.generation, generation
        if before is not None:
            await self._close(before, drain=True)
        return generation

    async def filled(self) -> None:
        """Waits until every slot has had its first replica, or failed to get one."""
        generation = self.generation
        if generation is not None:
            await asyncio.gather(*generation.first_tries)

    async def _start_replicas(self, generation: Generation) -> None:
        wanted = generation.wanted
        first = await self._open(generation, 0)
        facts = first.ready.result().facts
        assert facts is not None
        if wanted.num_replicas is None and await self._is_tiny(first, facts):
            holder = await self._go_in_process(generation, facts)
            self._end(generation, first, "")
            if generation.zygote is not None:
                generation.zygote.close()
            self._adopt(generation, holder)
            return
        generation.facts = facts
        self._apply(facts)
        self._join(first)
        for slot in range(len(wanted.cores)):
            tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            generation.first_tries.append(tried)
            keeper = self._keep(generation, slot, first if slot == 0 else None, tried)
            generation.keepers.append(asyncio.create_task(keeper))

    def _apply(self, facts: Facts) -> None:
        dispatcher = self.dispatcher
        default_s = facts.costs.seconds[len(facts.costs.volumes) // 2][0]
        dispatcher.costs = Costs(facts.request_s, facts.request_bytes, default_s, facts.caps.max_items)
        dispatcher.check_s = CHECK_ROWS * facts.costs.seconds[-1][0]
        dispatcher.idempotent = facts.idempotent
        dispatcher.window = WINDOW_BATCHES * facts.choice.max_batch_size
        self.metrics.loaded(facts.target, facts.choice.candidate.label)
        for finding in facts.findings:
            self.metrics.found(finding.code)

    async def _open(self, generation: Generation, slot: int) -> Replica:
        """A replica that answers; the first one proves the bundle and finds out the facts."""
        wanted = generation.wanted
        begin = Begin(
            cores=wanted.cores[slot],
            num_threads=wanted.num_threads,
            name=wanted.name,
            asked=wanted.asked,
            facts=generation.facts,
            lone_cores=wanted.lone_cores,
        )
        zygote = await generation.open_zygote()
        began = time.monotonic()
        replica = await zygote.fork(next(self._numbers), begin, self._on_reply)
        try:
            # The first one compiles, measures and proves: no fixed time would be right for all.
            await replica.loaded(max(MIN_LOAD_S, LOAD_FACTOR * generation.load_s) if generation.facts else None)
        except BaseException as exc:
            hung = isinstance(exc, TrialError) and exc.kind == "timed out"
            if hung and generation.share and generation.zygote is zygote:
                # What it was forked with may be what it waits for. The replicas from before need their zygote to live.
                generation.share, generation.zygote = False, None
            zygote.kill(replica.pid, hung=hung)
            replica.close()
            raise
        generation.load_s = generation.load_s or time.monotonic() - began
        replica.zygote = zygote
        generation.replicas.append(replica)
        replica.watch.add(replica.ready.result().memory)
        return replica

    async def _is_tiny(self, replica: Replica, facts: Facts) -> bool:
        """Whether a hop to a replica and back costs more than the model, and no request takes long."""
        if not facts.request_s or max(facts.costs.seconds[-1]) > MAX_IN_PROCESS_S:
            return False
        hops = []
        for number in range(NUM_PINGS):
            done = self._pings[-number - 1] = asyncio.get_running_loop().create_future()
            start = time.perf_counter()
            # No JSON: answered with 400 by the same path that all requests take, without the model.
            replica.send(Job(id=-number - 1, format="json", body=b"", deadline=time.monotonic() + 10))
            try:
                await asyncio.wait_for(done, MIN_LOAD_S)
            except TimeoutError:
                raise TrialError("crashed", "the first replica did not answer after it was loaded") from None
            hops.append(time.perf_counter() - start)
        hop_s, request_s = statistics.median(hops), statistics.median(facts.request_s)
        return request_s < hop_s

    async def _go_in_process(self, generation: Generation, facts: Facts | None) -> Holder:
        """Loads the model into this process; sets the generation's facts."""
        from torchproof.serve.inprocess import open_in_process

        holder, generation.facts = await open_in_process(generation.wanted, facts, self._heard_in_process)
        generation.in_process = holder
        return holder

    def _adopt(self, generation: Generation, holder: Holder) -> None:
        assert generation.facts is not None
        self._apply(generation.facts)
        self.dispatcher.add(holder, time.monotonic())

    def _join(self, replica: Replica) -> None:
        self.dispatcher.add(replica.holder, time.monotonic())

        def ended(_: "asyncio.Future[None]") -> None:  # at once, whatever its keeper waits for
            if replica.holder in self.dispatcher.holders:
                self.dispatcher.drop(replica.holder, time.monotonic(), blame=replica.why in ("", "hung"))

        replica.ended.add_done_callback(ended)

    async def _keep(
        self, generation: Generation, slot: int, replica: Replica | None, tried: "asyncio.Future[None]"
    ) -> None:
        """Sees to it that there is a replica in this slot."""
        failures = 0
        while not generation.closing:
            if replica is None:
                try:
                    replica = await self._open(generation, slot)
                except Exception as exc:  # noqa: BLE001  whatever it is, it is tried again
                    failures += 1
                    self.dispatcher.reason = "no replica is up; the log says why"
                    _set(tried)
                    log.error("a replica could not be started: %s", said(exc))
                    if isinstance(exc, BundleError):
                        log.error("the bundle is read again, as at a reload")
                        # A task of its own: where it succeeds it cancels this one. Where not, the bundle may be back.
                        await asyncio.wait([self._spawn(self.reload(generation))])
                    await asyncio.sleep(_pause_s(failures))
                    continue
                if generation.closing:
                    self._end(generation, replica, "")
                    return
                self._join(replica)
            _set(tried)
            began = time.monotonic()
            await asyncio.wait({replica.ended, replica.retired}, return_when=asyncio.FIRST_COMPLETED)
            if not replica.ended.done():
                successor = await self._succeed(generation, slot, replica)
            else:
                successor = None
                self._lost(generation, replica)
                if generation.closing:
                    return
                failures = failures + 1 if time.monotonic() - began < SETTLED_S else 0
                if failures > 1:
                    await asyncio.sleep(_pause_s(failures))
            replica = successor

    async def _succeed(self, generation: Generation, slot: int, replica: Replica) -> Replica | None:
        """Replaces a replica that still answers: the new one first, and one replica after the other."""
        async with generation.succession:
            try:
                successor = await self._open(generation, slot)
            except Exception as exc:  # noqa: BLE001  whatever it is, the old one goes on
                log.error("no successor of replica %s could be started: %s", replica.number, said(exc))
                await asyncio.wait({replica.ended}, timeout=MAX_PAUSE_S)
                replica.retired = asyncio.get_running_loop().create_future()
                return replica
            if generation.closing:
                self._end(generation, successor, "closed")
                return replica
            self._join(successor)
            self.dispatcher.drain(replica.holder)
            while replica.holder.entries and not replica.ended.done():
                await asyncio.sleep(TICK_S)
        self.metrics.restarted("memory")
        self._end(generation, replica, "memory")
        return successor

    def _lost(self, generation: Generation, replica: Replica) -> None:
        """A replica has ended, or was told to."""
        why = replica.why or "ended"
        log.warning("replica %s is replaced: %s", replica.number, why)
        self.dispatcher.reason = f"no replica is up: the last one {why}"
        self.metrics.restarted({"": "ended"}.get(replica.why, replica.why))
        self._end(generation, replica, replica.why)

    def _end(self, generation: Generation, replica: Replica, why: str) -> None:
        replica.why = replica.why or why
        if replica.holder in self.dispatcher.holders:
            self.dispatcher.drop(replica.holder, time.monotonic(), blame=not why or why == "hung")
        if replica.zygote is not None:
            replica.zygote.kill(replica.pid)
        replica.close()
        if replica in generation.replicas:
            generation.replicas.remove(replica)

    def _kill(self, replica: Replica, why: str) -> None:
        """Takes it out; its keeper starts another."""
        replica.why = why
        self.dispatcher.drop(replica.holder, time.monotonic(), blame=why == "hung")
        if replica.zygote is not None:
            replica.zygote.kill(replica.pid, hung=why == "hung")
        if not replica.ended.done():
            replica.ended.set_result(None)

    def _on_reply(self, replica: Replica, reply: Reply) -> None:
        now = time.monotonic()
        if isinstance(reply, Answer):
            if reply.id < 0:
                if not (ping := self._pings.pop(reply.id)).done():
                    ping.set_result(None)
                return
            self.dispatcher.answered(replica.holder, reply, now)
        elif isinstance(reply, Started):
            self.dispatcher.started(replica.holder, reply, now)
        elif isinstance(reply, Broken):
            log.error("replica %s gives wrong answers: %s", replica.number, reply.reason)
            self.metrics.checked(False)
            self._kill(replica, "wrong")
        elif isinstance(reply, Health):
            self.dispatcher.health(replica.holder, now)
            self._on_health(replica, reply)

    def _on_health(self, replica: Replica, health: Health) -> None:
        replica.memory = health.memory
        self.metrics.checked(not health.wrong)
        self.metrics.fell_back(max(0, health.num_fallbacks - replica.num_fallbacks))
        replica.num_fallbacks = health.num_fallbacks
        if health.wrong:
            log.error("replica %s gives wrong answers: %s", replica.number, health.wrong)
            self._kill(replica, "wrong")
            return
        if self.facts is None or self.generation is None:
            return
        watch = replica.watch
        watch.add(health.memory)
        for finding in watch.judge(self.facts.target, replica.number):
            self.metrics.found(finding.code)
            log.warning("%s: %s: %s", finding.code, finding.where, finding.message)
        shared = max(health.memory.rss_bytes - health.memory.private_bytes, 0)  # by all, so it is there once
        budget = int((MEMORY_SHARE * usable_memory() - shared) / max(1, len(self.generation.replicas)))
        if watch.over_budget(budget) and not replica.retired.done():
            log.warning("replica %s has grown over its share of the memory and is replaced", replica.number)
            replica.retired.set_result(None)

    def _heard_in_process(self, holder: Holder, replies: Sequence[Message]) -> None:
        now = time.monotonic()
        for reply in replies:
            if isinstance(reply, Answer):
                self.dispatcher.answered(holder, reply, now)
            elif isinstance(reply, Health):
                self.dispatcher.health(holder, now)
                self.metrics.checked(not reply.wrong)
            if isinstance(reply, Broken) or (isinstance(reply, Health) and reply.wrong):
                reason = reply.reason if isinstance(reply, Broken) else reply.wrong
                log.error("the model gives wrong answers: %s", reason)
                self.dispatcher.reason = "the model gives wrong answers"
                self.dispatcher.drop(holder, now, blame=False)
                self.dispatcher.fail_all("the model gives wrong answers")
                self._spawn(self._reload_until_it_works())

    async def _reload_until_it_works(self) -> None:
        while await self.reload():
            await asyncio.sleep(MAX_PAUSE_S)

    async def watch(self) -> None:
        """Keeps deadlines and looks for replicas that hang; until it is cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - last > PAUSE_S:
                self.dispatcher.paused(now)
            last = now
            try:
                self._look(now)
            except Exception:  # whatever it is, deadlines are kept after it
                log.exception("looking after the replicas failed")

    def _look(self, now: float) -> None:
        self.dispatcher.expire(now + TICK_S)
        hung = self.dispatcher.hung(now)
        self.dispatcher.check(now, CHECK_S)
        for replica in [replica for generation in self._generations for replica in generation.replicas]:
            if replica.holder in hung:
                log.error("replica %s hangs", replica.number)
                self._kill(replica, "hung")

    async def reload(self, instead_of: Generation | None = None) -> str:
        """Starts the bundle as it lies on the disk now, beside the present one, and switches once it is proven.

        Args:
            instead_of: only where this is still the present one.

        Returns:
            what went wrong, so that the present one stays; empty when it is served.
        """
        assert self.generation is not None
        try:
            async with self._reloading:
                if instead_of is not None and instead_of is not self.generation:
                    return ""
                generation = await self.start(self.generation.wanted)
        except (TorchproofError, UserCodeError, TrialError, OSError) as exc:
            log.error("reload failed, what was served before goes on: %s", said(exc))
            self.metrics.reloaded(False)
            return str(exc)
        assert generation.facts is not None
        log.info("reloaded: %s", generation.facts.choice.candidate.label)
        self.metrics.reloaded(True)
        return ""

    async def _close(self, generation: Generation, *, drain: bool) -> None:
        generation.closing = True
        holders = [replica.holder for replica in generation.replicas]
        if generation.in_process is not None:
            holders.append(generation.in_process)
        for holder in holders:
            self.dispatcher.drain(holder)
        while drain and any(holder.entries for holder in holders):
            await asyncio.sleep(TICK_S)
        for keeper in generation.keepers:
            keeper.cancel()
        for tried in generation.first_tries:
            _set(tried)
        for replica in list(generation.replicas):
            self._end(generation, replica, "closed")
        if generation.in_process in self.dispatcher.holders and generation.in_process is not None:
            self.dispatcher.drop(generation.in_process, time.monotonic(), blame=False)
        for zygote in generation.zygotes:
            zygote.close()
        self._generations.remove(generation)

    async def close(self) -> None:
        """Ends all processes."""
        for task in self._tasks:
            task.cancel()
        if self.generation is not None:
            await self._close(self.generation, drain=False)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Future[Any]":
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _pause_s(failures: int) -> float:
    return min(MAX_PAUSE_S, 0.5 * 2.0 ** min(failures, 10))
