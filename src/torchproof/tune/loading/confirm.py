"""Real training with several settings in turns: each in a process of its own, stopped while another has its turn."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from torchproof.errors import RefusedError, TrialError
from torchproof.machine.threads import thread_environment
from torchproof.stats import LOOKS
from torchproof.tune.loading.arms import choose, settled
from torchproof.tune.loading.process import LoaderProcess
from torchproof.types import Comparison, Target
from torchproof.types.loading import LoadingArm

OPEN_TIMEOUT_S = 600.0  # a dataset may take long to open; it is the user's own code, and Ctrl-C ends it
RUN_TIMEOUT_S = 600.0
MIN_BLOCK_S, MAX_BLOCK_S = 0.2, 1.0  # shorter ones are noise, longer ones fewer pairs
PAIRS_HOPED_FOR = LOOKS[1]

Take = Callable[[int, int], float]  # the arm's number, steps -> seconds


@dataclass
class Confirmed:
    """What real training says.

    Attributes:
        arms: those that ran, the simplest first, with what was measured.
        lost: those that ended early, with the reason as their refusal.
        best: number of the arm that won.
    """

    arms: list[LoadingArm]
    lost: list[LoadingArm] = field(default_factory=list)
    best: int = 0
    comparisons: tuple[Comparison, ...] = ()


class Contestant:
    """A process that trains with one setting.

    Args:
        num_threads: of its training process.
        begin: the part of the first epoch that it leaves out.
    """

    def __init__(
        self, target: Target, arm: LoadingArm, num_threads: int, *, begin: float, in_order: bool = True
    ) -> None:
        self.arm = arm
        self._open = {
            "target": msgspec.to_builtins(target),
            "loading": msgspec.to_builtins(arm.loading),
            "begin": begin,
            "in_order": in_order,
        }
        self._process = LoaderProcess(
            "torchproof.tune.loading.training:Training", environment=thread_environment(num_threads)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()

    def open(self) -> float | TrialError:
        """Seconds of a step, roughly; or why it can't train."""
        try:
            step_s = float(self._process.call("open", timeout_s=OPEN_TIMEOUT_S, **self._open))
        except TrialError as exc:
            return exc
        self._signal(signal.SIGSTOP)
        return step_s

    def run(self, num_steps: int) -> float:
        """Seconds of so many steps. Its workers stop with it: none fills its queues in another's turn."""
        self._signal(signal.SIGCONT)
        seconds = float(self._process.call("run", timeout_s=RUN_TIMEOUT_S, num_steps=num_steps))
        self._signal(signal.SIGSTOP)
        return seconds

    def kill(self) -> None:
        """Ends it; a call that waits for it in another thread raises."""
        self._process.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.alive:
            os.killpg(self._process.pid, number)


def confirm(
    target: Target,
    arms: Sequence[tuple[LoadingArm, int]],
    *,
    batch_size: int,
    budget_s: float,
    in_order: Sequence[bool] = (),
) -> Confirmed:
    """Trains with each of these settings in turns, the simplest first, and says which won.

    Args:
        arms: each with the number of its intra-op threads.
        batch_size: samples of a step.
        in_order: of each arm; by default all of them are.

    Raises:
        RefusedError: the simplest one can't train.
        TargetError, UserCodeError: the recipe.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        contestants = [
            stack.enter_context(Contestant(target, arm, threads, begin=number / len(arms), in_order=ordered))
            for number, ((arm, threads), ordered) in enumerate(zip(arms, in_order or [True] * len(arms), strict=True))
        ]
        opened = open_all(contestants)
        if isinstance(opened[0], TrialError):
            raise _refused(target, opened[0])
        lost = [
            _lost(contestant.arm, step_s)
            for contestant, step_s in zip(contestants, opened, strict=True)
            if isinstance(step_s, TrialError)
        ]
        running = [c for c, step_s in zip(contestants, opened, strict=True) if not isinstance(step_s, TrialError)]
        seconds = [step_s for step_s in opened if not isinstance(step_s, TrialError)]
        # Starting may have taken all of it, on a busy machine; without a comparison that would be for nothing.
        left_s = max(budget_s - (time.monotonic() - start), LOOKS[0] * len(running) * MIN_BLOCK_S)
        end = time.monotonic() + left_s
        steps = block_steps(seconds, [c.arm for c in running], left_s)
        blocks: list[list[float]] = []
        while steps and not blocks and len(running) > 1:
            try:
                blocks = take_turns(
                    _taking(running), [c.arm for c in running], steps=steps, budget_s=end - time.monotonic()
                )
            except _EndedError as ended:
                if not ended.number:
                    raise _refused(target, ended.error) from None
                lost.append(_lost(running.pop(ended.number).arm, ended.error))
                steps.pop(ended.number)
    confirmed = Confirmed([contestant.arm for contestant in running], lost)
    if not blocks:
        return confirmed
    confirmed.best, confirmed.comparisons = choose(confirmed.arms, blocks)
    confirmed.arms = [
        msgspec.structs.replace(arm, measured=tuple(batch_size / step_s for step_s in taken))
        for arm, taken in zip(confirmed.arms, blocks, strict=True)
    ]
    return confirmed


def open_all(contestants: Sequence[Contestant]) -> list[float | TrialError]:
    """Opens them side by side. An error of the user's code, and Ctrl-C, wait for none of the others."""
    with ThreadPoolExecutor(len(contestants)) as pool:
        try:
            return list(pool.map(lambda contestant: contestant.open(), contestants))
        except BaseException:
            for contestant in contestants:
                contestant.kill()
            raise


class _EndedError(Exception):
    """A contestant that can't go on in its turn: a worker was killed, or shared memory ran out."""

    def __init__(self, number: int, error: TrialError) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error


def _taking(running: Sequence[Contestant]) -> Take:
    def take(number: int, num_steps: int) -> float:
        try:
            return running[number].run(num_steps)
        except TrialError as exc:
            raise _EndedError(number, exc) from None

    return take


def _lost(arm: LoadingArm, error: TrialError) -> LoadingArm:
    return msgspec.structs.replace(arm, refusal=f"{error.kind}: {error}")


def _refused(target: Target, error: TrialError) -> RefusedError:
    return RefusedError(f"{target.reference} can't be trained: {error}", help="torchproof train shows what it says")


def block_steps(seconds: Sequence[float], arms: Sequence[LoadingArm], budget_s: float) -> list[int]:
    """Steps of a block of each arm; none where not even the shortest blocks can be compared in twice the budget.

    Blocks take about as long, and are whole rounds of the workers, which bring their batches together: with less, one
    block takes what was ready and the next one waits for all of them. Measured where samples wait, with 4 workers: 0 to
    19,000 samples/s in blocks of a few steps, where some 320 go.

    Args:
        seconds: of a step of each arm.
    """
    rounds = [max(1, arm.loading.num_workers) for arm in arms]
    shortest_s = [step_s * number for step_s, number in zip(seconds, rounds, strict=True)]
    if LOOKS[0] * sum(shortest_s) > 2 * budget_s:
        return []
    block_s = min(max(budget_s / len(arms) / PAIRS_HOPED_FOR, MIN_BLOCK_S), MAX_BLOCK_S)
    return [number * math.ceil(block_s / round_s) for number, round_s in zip(rounds, shortest_s, strict=True)]


def take_turns(
    take: Take,
    arms: Sequence[LoadingArm],
    *,
    steps: Sequence[int],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[list[float]]:
    """Seconds of a step in each block, all arms in each round, the order turned round from one to the next.

    Looked at after 8, 16, 32 and 64 rounds; ends when no comparison is undecided, or with the budget, but never before
    8 rounds.
    """
    blocks: list[list[float]] = [[] for _ in arms]
    end = clock() + budget_s
    for look in LOOKS:
        while len(blocks[0]) < look:
            if len(blocks[0]) >= LOOKS[0] and clock() >= end:
                return blocks
            forward = range(len(arms))
            for number in reversed(forward) if len(blocks[0]) % 2 else forward:
                blocks[number].append(take(number, steps[number]) / steps[number])
        if settled(choose(arms, blocks)[1]):
            break
    return blocks
