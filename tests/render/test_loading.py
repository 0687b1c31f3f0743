"""The report of a search for a DataLoader's settings, from a recorded one."""

import msgspec

from torchproof.render.loading import text
from torchproof.types import Comparison, Target
from torchproof.types.doctor import SharedMemory
from torchproof.types.loading import (
    Cost,
    LoadingArm,
    LoadingCosts,
    LoadingProof,
    ThreadCosts,
    TransferCosts,
    WorkerCosts,
)
from torchproof.types.training import Loading


def cost(cpu_s: float, wait_s: float = 0.0) -> Cost:
    return Cost(cpu_s=cpu_s, wait_s=wait_s, wall_s=cpu_s + wait_s)


CONTROL = Loading(num_threads=1)
CHOSEN = Loading(num_threads=1, num_workers=4)
PROOF = LoadingProof(
    target=Target(reference="recipe.py", kind="python", path="/recipe.py"),
    chosen=CHOSEN,
    reason="3.0x [2.9, 3.1] the speed of 0 workers, 1 thread",
    costs=LoadingCosts(
        batch_size=32,
        num_samples=60_000,
        num_epochs=3,
        device="cpu",
        batch_bytes=19_300_352,
        threads=tuple(
            ThreadCosts(num_threads=n, loads=(cost(0.1, 0.02),), collate=cost(0.004), step=cost(0.03)) for n in (1, 8)
        ),
        worker=WorkerCosts(send_cpu_s=0.02, receive_cpu_s=0.0035, start_s=0.05, uss_bytes=30 << 20),
    ),
    capacity=(),
    arms=(
        LoadingArm(
            loading=Loading(num_threads=1, num_workers=8), predicted=1400.0, refusal="its batches are too large"
        ),
        LoadingArm(loading=CHOSEN, predicted=1000.0, measured=(900.0,) * 8, shared_memory_bytes=9 * 19_300_352),
        LoadingArm(loading=CONTROL, predicted=220.0, measured=(290.0, 310.0) * 8),
    ),
    comparisons=(
        Comparison(
            baseline="0 workers, 1 thread",
            candidate="4 workers, 1 thread",
            ratio=3.0,
            low=2.9,
            high=3.1,
            num_pairs=8,
            verdict="better",
        ),
    ),
    out_of_order=None,
    shared_memory=SharedMemory(size_bytes=8 << 30, free_bytes=8 << 30),
    findings=(),
    search_s=24.2,
)

EXPECTED = """\
a batch   32 of 60,000 samples
samples   100 ms computing, 20.0 ms waiting
collate   4.00 ms
step      30.0 ms with 1 thread; 30.0 ms with 8 threads (cpu)
a worker  20.0 ms to send 18.4 MiB, 3.50 ms to receive it; 50.0 ms to start;
          30.0 MiB of its own memory

setting              predicted  measured samples/s    /dev/shm
8 workers, 1 thread  1,400                            0 B
4 workers, 1 thread  1,000      900.0 [900.0, 900.0]  166 MiB
0 workers, 1 thread  220        300 [290, 310]
not 8 workers, 1 thread: its batches are too large

loading   4 workers, 1 thread   3.0x [2.9, 3.1] the speed of 0 workers, 1 thread
prefetch  2 batches for each worker: 166 MiB of /dev/shm at most; 8.0 GiB are
          free
workers   persist from epoch to epoch, which saves 200 ms an epoch
          4 workers, 1 thread: 3.0x [2.9, 3.1] the speed of 0 workers, 1 thread
            (better)
the search took 24.2 s
"""


def test_the_report_says_what_was_measured_and_chosen() -> None:
    assert text(PROOF) == EXPECTED


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(map(len, text(PROOF, 80).splitlines())) <= 80


def test_settings_without_workers_say_nothing_of_workers() -> None:
    out = text(msgspec.structs.replace(PROOF, chosen=CONTROL, reason="no other setting is faster"))
    assert "loading   0 workers, 1 thread   no other setting is faster" in out
    assert "prefetch  " not in out
    assert "persist" not in out


def test_why_there_can_be_no_workers_is_said() -> None:
    costs = msgspec.structs.replace(PROOF.costs, worker=None, worker_error="TypeError: cannot pickle a lock")
    assert "a worker  none can be used: TypeError: cannot pickle a lock" in text(
        msgspec.structs.replace(PROOF, costs=costs)
    )


def test_batches_out_of_order_are_reported_and_not_chosen() -> None:
    gain = msgspec.structs.replace(PROOF.comparisons[0], candidate="4 workers, 1 thread, in_order=False")
    out = " ".join(text(msgspec.structs.replace(PROOF, out_of_order=gain)).split())
    assert "in_order=False: 3.0x [2.9, 3.1]" in out
    assert "not chosen: a run could not go on bit for bit" in out


def test_transfer_is_said_where_there_is_a_device() -> None:
    transfer = TransferCosts(pageable_s=0.004, pinned_s=0.001, pin_s=0.002)
    out = text(msgspec.structs.replace(PROOF, costs=msgspec.structs.replace(PROOF.costs, transfer=transfer)))
    assert "transfer  4.00 ms, 1.00 ms from pinned memory" in out
    assert "memory    pinned" in out
    assert "memory    " not in text(PROOF)
