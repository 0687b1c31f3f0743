"""Configurations to try."""

from typing import Literal

from torchproof.types.record import Record

Precision = Literal["float32", "bfloat16", "int8"]


class Candidate(Record):
    """A runtime at a precision with a thread count.

    Attributes:
        runtime: a name in the table of runtimes, such as ``onnxruntime``.
        num_threads: intra-op threads; 0 is the runtime's own default (only the baseline uses it).
    """

    runtime: str
    precision: Precision = "float32"
    num_threads: int = 1

    @property
    def label(self) -> str:
        """``onnxruntime int8, 2 threads``: how reports name it."""
        precision = "" if self.precision == "float32" else f" {self.precision}"
        threads = {0: "default threads", 1: "1 thread"}.get(self.num_threads, f"{self.num_threads} threads")
        return f"{self.runtime}{precision}, {threads}"


class Choice(Record):
    """A candidate that may be served, with its batching and its artifact.

    Attributes:
        max_batch_size: requests that share one forward; 1 where batching brought nothing or changes the answer.
        padding: whether requests of different sizes may share a batch; False unless proven safe.
        artifact: folder inside the bundle that the runtime loads.
        cpu_flags: instruction sets that the artifact was compiled for; empty when it runs on any CPU.
    """

    candidate: Candidate
    max_batch_size: int
    padding: bool
    artifact: str
    cpu_flags: tuple[str, ...] = ()
