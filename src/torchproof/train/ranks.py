"""Fresh processes that are the ranks of a rehearsal. Whatever one of them does, the caller gets an answer in time."""

from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from torchproof.errors import RefusedError, TorchproofError, TrialError, UserCodeError, said
from torchproof.machine.cores import num_cores
from torchproof.machine.threads import thread_environment
from torchproof.measure.process import FreshProcess

HANDLER = "torchproof.train.rehearsed:RehearsedRank"
GRACE_S = 2.0  # for the other ranks, once one has an error: it may be them that it is from
LOST_ANOTHER = ("gloo", "Connection closed by peer", "Connection reset by peer")  # what a rank that waited says


class Ranks:
    """The ranks of one process group, each with a ``RehearsedRank``; all of them end with this object.

    Args:
        timeout_s: limit of each call.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(world_size)
        self._processes: list[FreshProcess] = []
        threads = thread_environment(max(1, num_cores() // world_size))
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "CUDA_VISIBLE_DEVICES": ""}
        try:
            for rank in range(world_size):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(FreshProcess(HANDLER, environment={**threads, **sizes, **place}))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all of them."""
        for process in self._processes:
            process.kill()  # first of all, so that no call waits any longer
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def each(self, method: str, doing: str, **arguments: Any) -> list[Any]:
        """Calls a method on all ranks at once; the answers by rank.

        Args:
            doing: for errors, after "while": ``"calling model()"``.

        Raises:
            TorchproofError, UserCodeError: what a rank raised; a RefusedError names a rank that died or gave no answer.
        """
        calls = [
            self._pool.submit(process.call, method, timeout_s=self.timeout_s, **arguments)
            for process in self._processes
        ]
        _, waiting = wait(calls, return_when=FIRST_EXCEPTION)  # each call has its own limit
        if waiting:
            wait(waiting, timeout=GRACE_S)
        errors: dict[int, BaseException] = {}
        for rank, call in enumerate(calls):
            if not call.done():
                errors[rank] = TrialError("timed out", "the other ranks have ended or wait for it")
            elif error := call.exception():
                errors[rank] = error
        if errors:
            raise _cause(errors, doing)
        return [call.result() for call in calls]

    def first(self, method: str, **arguments: Any) -> Any:
        """Calls a method on rank 0 alone; see ``FreshProcess.call`` for errors."""
        return self._processes[0].call(method, timeout_s=self.timeout_s, **arguments)


def _cause(errors: Mapping[int, BaseException], doing: str) -> BaseException:
    """The error that the others come from, which a rank has that didn't only wait; it names its rank."""
    rank = min(errors, key=lambda rank: _order(errors[rank]))
    error = errors[rank]
    alone = f" (on rank {rank})" if len(errors) == 1 or any(_order(other) for other in errors.values()) else ""
    if isinstance(error, UserCodeError):
        return UserCodeError(error.doing + alone, error.trace)
    if isinstance(error, TorchproofError):
        return type(error)(str(error) + alone, help=error.help)
    if not isinstance(error, TrialError):
        return error
    if error.kind == "timed out":
        hanging = [r for r, other in errors.items() if isinstance(other, TrialError) and other.kind == "timed out"]
        names = " and ".join(f"rank {r}" for r in hanging)
        help = "look for what only one rank does or waits for, such as a barrier inside a condition"
        return RefusedError(f"{names} timed out while {doing}: {error}", help=help)
    how = "raised" if error.kind == "failed" else error.kind
    help = "train on one process first: torchproof train RECIPE -o FOLDER"
    return RefusedError(f"rank {rank} {how} while {doing}: {error}", help=help)


def _order(error: BaseException) -> int:
    """0 for an error of the rank itself, more for one that may come from another rank."""
    if any(text in said(error) for text in LOST_ANOTHER):
        return 2
    return 1 if isinstance(error, TrialError) and error.kind == "timed out" else 0
