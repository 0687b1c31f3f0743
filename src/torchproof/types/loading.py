"""What was measured to choose a DataLoader's settings, and what was chosen."""

from torchproof.types.doctor import SharedMemory, UsableCores
from torchproof.types.finding import Finding
from torchproof.types.measurement import Comparison
from torchproof.types.record import Record
from torchproof.types.target import Target
from torchproof.types.training import Loading


class Cost(Record):
    """Seconds of one operation.

    Attributes:
        cpu_s: of all threads of the process.
        wait_s: the calling thread slept: it waited for a disk, a network or a device, and not for a core.
        wall_s: from beginning to end, the time that it waited for a core included.
    """

    cpu_s: float
    wait_s: float
    wall_s: float


class ThreadCosts(Record):
    """What the training process itself does, with so many intra-op threads.

    Attributes:
        loads: the samples of one batch each, without collate.
        step: forward, backward, the optimizer, and the transfer to the device where there is one.
    """

    num_threads: int
    loads: tuple[Cost, ...]
    collate: Cost
    step: Cost


class WorkerCosts(Record):
    """What one worker adds.

    Attributes:
        send_cpu_s: of the worker for a batch, beside its samples and collate.
        receive_cpu_s: of the training process for a batch.
        start_s: of the training process, to start one worker.
        uss_bytes: memory of the worker that no other process shares, once it has read.
    """

    send_cpu_s: float
    receive_cpu_s: float
    start_s: float
    uss_bytes: int


class TransferCosts(Record):
    """A batch from the CPU's memory to the device: from where it lies, from pinned memory, and to pin it."""

    pageable_s: float
    pinned_s: float
    pin_s: float


class LoadingCosts(Record):
    """What the parts of training cost by themselves; the throughput of each setting is predicted from them.

    Attributes:
        batch_size: samples of a batch.
        batch_bytes: shared memory that a batch takes on its way from a worker.
        threads: with one intra-op thread, then with as many as training has by default.
        worker: None where no worker can be used; ``worker_error`` says why.
        transfer: None without CUDA.
    """

    batch_size: int
    num_samples: int
    num_epochs: int
    device: str
    batch_bytes: int
    threads: tuple[ThreadCosts, ...]
    worker: WorkerCosts | None
    worker_error: str = ""
    transfer: TransferCosts | None = None


class LoadingArm(Record):
    """One setting.

    Attributes:
        predicted: samples/s of the whole run, the start of its workers included.
        measured: samples/s of each block of real training; empty where it was not confirmed.
        shared_memory_bytes: what its batches on their way take of ``/dev/shm``.
        refusal: why it can't be chosen; empty where it can.
    """

    loading: Loading
    predicted: float
    measured: tuple[float, ...] = ()
    shared_memory_bytes: int = 0
    refusal: str = ""

    @property
    def label(self) -> str:
        """How people call it: ``2 workers, 1 thread``."""
        workers = "1 worker" if self.loading.num_workers == 1 else f"{self.loading.num_workers} workers"
        threads = {0: "default threads", 1: "1 thread"}.get(
            self.loading.num_threads, f"{self.loading.num_threads} threads"
        )
        prefetch = f", prefetch_factor {self.loading.prefetch_factor}" if self.loading.prefetch_factor != 2 else ""
        return f"{workers}, {threads}{prefetch if self.loading.num_workers else ''}"


class SharedMemorySeen(Record):
    """The setting that should be fastest, and the shared memory that it needs.

    Attributes:
        batch_bytes: of one batch.
        size_bytes, free_bytes: of ``/dev/shm``.
    """

    target: str
    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    size_bytes: int
    free_bytes: int


class WorkerMemorySeen(Record):
    """A worker that was forked, and the memory of the dataset's objects, which it shared when it started.

    Attributes:
        num_objects: Python objects in the lists, tuples, dicts and sets of the dataset; counted to a million.
        object_bytes: memory pages where they begin.
        copied_bytes: those of these pages that the worker has copied by now.
        uss_bytes: all memory that only the worker has by now.
        num_samples: of the dataset.
        num_read: samples that the worker has read.
    """

    target: str
    num_objects: int
    object_bytes: int
    copied_bytes: int
    uss_bytes: int
    num_samples: int
    num_read: int


class PickleSeen(Record):
    """The dataset on its way to a worker.

    Attributes:
        start_method: how workers are started here: ``fork`` needs no pickle.
        error: first line of what pickling it raised; empty where it could be pickled or needs no pickle.
    """

    target: str
    start_method: str
    error: str


class LoadingProof(Record):
    """The chosen settings with all their evidence.

    Attributes:
        reason: why these.
        capacity: parallel work that the machine did when the costs were measured, by number of busy processes.
        arms: every setting that was considered, the fastest predicted first.
        comparisons: in the order taken; the candidate of each has more workers or threads than the baseline.
        out_of_order: the chosen setting with ``in_order=False`` against itself; None where batches cost much the same.
            Never chosen: a run could not go on bit for bit.
        shared_memory: None where there is no ``/dev/shm``.
        search_s: wall seconds.
    """

    target: Target
    chosen: Loading
    reason: str
    costs: LoadingCosts
    capacity: tuple[UsableCores, ...]
    arms: tuple[LoadingArm, ...]
    comparisons: tuple[Comparison, ...]
    out_of_order: Comparison | None
    shared_memory: SharedMemory | None
    findings: tuple[Finding, ...]
    search_s: float
