"""Memory of workers: what a batch takes on its way, and which of the dataset's objects a worker has copied."""

import io
import os
import pickle
import resource
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

MAX_OBJECTS = 1_000_000  # that are looked at: more of them prove no more
PAGE_BYTES = resource.getpagesize()

_CONTAINERS = (list, tuple, dict, set, frozenset)
# Of a page's entry in /proc/PID/pagemap: it is in memory, and no other process has it.
_PRESENT, _EXCLUSIVE = 1 << 63, 1 << 56
_ENTRY_BYTES = 8


class Objects:
    """The Python objects in the lists, tuples, dicts and sets that a dataset holds.

    Those in other datasets and in one another are included; counted to ``MAX_OBJECTS``.

    Attributes:
        count: how many there are.
        pages: numbers of the memory pages where they begin, ascending; the same in a process that is forked.
    """

    def __init__(self, dataset: object) -> None:
        self.count = 0
        pages: set[int] = set()
        waiting: list[Any] = [dataset]
        seen: set[int] = set()
        while waiting and self.count < MAX_OBJECTS:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Dataset):
                members = list(getattr(value, "__dict__", {}).values())
            else:
                members = list(_members(value))
                self.count += len(members)
                pages.update(id(member) // PAGE_BYTES for member in members)
            waiting.extend(member for member in members if isinstance(member, (*_CONTAINERS, Dataset)))
        self.pages = sorted(pages)

    def copied_bytes(self, pid: int) -> int | None:
        """Those of their pages that a forked process has for itself, because it has written into them.

        Looking at an object counts a reference to it, which is written next to the object.

        Returns:
            None where the kernel doesn't tell.
        """
        try:
            descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        except OSError:
            return None
        count = 0
        try:
            for first, length in _runs(self.pages):
                entries = array("Q")
                read = os.pread(descriptor, _ENTRY_BYTES * length, _ENTRY_BYTES * first)
                entries.frombytes(read[: len(read) // _ENTRY_BYTES * _ENTRY_BYTES])
                count += sum(1 for entry in entries if entry & _PRESENT and entry & _EXCLUSIVE)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return count * PAGE_BYTES


def _members(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container.keys()
        yield from container.values()
    else:
        yield from container


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring pages together: the first one, and how many."""
    begin = 0
    for number in range(1, len(pages) + 1):
        if number == len(pages) or pages[number] != pages[number - 1] + 1:
            yield pages[begin], number - begin
            begin = number


def batch_bytes(batch: Any) -> int:
    """Shared memory that a batch takes on its way from a worker: each storage once, in whole pages."""
    counter = _Storages(io.BytesIO())
    counter.dump(batch)
    return sum(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES for num_bytes in counter.found.values())


class _Storages(pickle.Pickler):
    """Finds tensors wherever pickle does."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.found: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self.found[storage.data_ptr()] = storage.nbytes()
            return int, ()
        return NotImplemented


class Nowhere(io.RawIOBase):
    """A file that forgets: pickling into it takes no memory."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
