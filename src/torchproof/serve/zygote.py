"""A zygote: loads what replicas can share and forks them off, so that N replicas don't cost N times the weights.

Run as ``python -m torchproof.serve.zygote FD``. It runs no forward and keeps to one thread: of a process with more, a
fork copies only one, and what the others were about stays undone for ever.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from torchproof.bundle.read import open_bundle
from torchproof.errors import describe
from torchproof.machine.parent import end_with_parent
from torchproof.serve import logs, replica
from torchproof.serve.load import Prepared, prepare
from torchproof.serve.wire import WHERE, WHERE_S, Exited, Failed, Fork, Forked, Kill, Order, Reader, Setup, pack
from torchproof.serve.wire import Prepared as CanFork

SETTLE_S = 1.0  # for threads that are about to end, such as a pool's that has read the weights
log = logging.getLogger("torchproof.serve")


def main(fd: int) -> None:
    """Obeys until the other end of the socket is closed; its replicas end with it."""
    end_with_parent()
    faulthandler.register(WHERE, all_threads=True)
    with socket.socket(fileno=fd) as server:
        orders: Reader[Order] = Reader(Order)
        data, fds, _, _ = socket.recv_fds(server, 1 << 16, 8)
        setup, *rest = orders.feed(data)
        assert isinstance(setup, Setup)
        logs.configure(setup.log_format)
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        prepared = _prepare(server, setup)
        if prepared is None and setup.share:
            return
        pids: set[int] = set()
        while True:
            for order in rest:
                if isinstance(order, Fork):
                    if pid := _fork(server, fds.pop(0), setup, prepared):
                        pids.add(pid)
                elif isinstance(order, Kill) and order.pid in pids:
                    if order.hung:
                        os.kill(order.pid, WHERE)
                        time.sleep(WHERE_S)
                    os.kill(order.pid, signal.SIGKILL)
            ready, _, _ = select.select([server.fileno(), wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                _reap(server, pids)
            rest = []
            if server.fileno() in ready:
                data, more, _, _ = socket.recv_fds(server, 1 << 16, 8)
                if not data:
                    break
                fds += more
                rest = list(orders.feed(data))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def _load(setup: Setup) -> Prepared:
    if setup.target is not None:
        return prepare(setup.target)
    return prepare(open_bundle(Path(setup.bundle or "")))


def _prepare(server: socket.socket, setup: Setup) -> Prepared | None:
    """What replicas share; None where each one loads for itself. Says how it went."""
    if not setup.share:
        server.sendall(pack(CanFork(refusal="")))
        return None
    _stop_progress_bars()
    before = _num_threads()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parallel work, such as the first copy of large weights, would start a pool
    try:
        prepared = _load(setup)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  the user's code may raise anything; the server says it
        server.sendall(pack(Failed(error=describe(exc))))
        return None
    torch.set_num_threads(num_threads)
    gc.collect()
    gc.freeze()  # a collection writes to each object, and so would copy most of the pages that replicas share
    refusal = ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        refusal = "it has initialized CUDA, which no fork survives"
    elif (more := _more_threads(before)) > 0:
        refusal = f"it has started {more} threads, of which a fork copies none"
    server.sendall(pack(CanFork(refusal=refusal)))
    return None if refusal else prepared


def _stop_progress_bars() -> None:
    """tqdm's bars, which transformers draws over its weights, would start a thread that never ends."""
    with contextlib.suppress(ImportError):
        import tqdm  # type: ignore[import-untyped]

        tqdm.tqdm.monitor_interval = 0


def _more_threads(before: int) -> int:
    """How many more there are than before, after those that are just ending have had time for it."""
    deadline = time.monotonic() + SETTLE_S
    while (more := _num_threads() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return more


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _fork(server: socket.socket, fd: int, setup: Setup, prepared: Prepared | None) -> int:
    try:
        pid = os.fork()
    except OSError as exc:  # no memory, or a limit on processes: those that are there go on
        log.error("no replica can be forked: %s", exc)
        os.close(fd)  # by which the server learns it
        server.sendall(pack(Forked(pid=0)))
        return 0
    if not pid:
        server.close()
        _be_replica(fd, setup, prepared)
    os.close(fd)
    server.sendall(pack(Forked(pid=pid)))
    return pid


def _be_replica(fd: int, setup: Setup, prepared: Prepared | None) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        logs.configure(setup.log_format, fields={"pid": os.getpid()})
        os.set_inheritable(fd, False)  # what the user's code starts must not keep it open
        with socket.socket(fileno=fd) as end:
            replica.run(replica.Link(end), lambda: prepared or _load(setup))
        status = 0
    except BrokenPipeError:
        status = 0  # the server has gone
    except BaseException:  # noqa: BLE001  a bug of ours, or the user's os._exit in disguise
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # never back into the zygote's loop, nor its exit handlers


def _reap(server: socket.socket, pids: set[int]) -> None:
    for pid in list(pids):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            pids.remove(pid)
            server.sendall(pack(Exited(pid=pid, status=os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
