"""Whatever happens in the fresh process, the caller gets an answer or an error that says what happened."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from torchproof.errors import LimitsError, TargetError, TrialError, UserCodeError
from torchproof.measure.process import FreshProcess

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
TIMEOUT_S = 30.0
MIB = 1 << 20

Start = Callable[..., FreshProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that are closed at the end."""
    with ExitStack() as stack:

        def started(
            name: str = "Handler", *, memory_limit_bytes: int | None = None, **environment: str
        ) -> FreshProcess:
            process = FreshProcess(
                f"trial_handlers:{name}",
                environment={"PYTHONPATH": PATH, **environment},
                memory_limit_bytes=memory_limit_bytes,
            )
            return stack.enter_context(process)

        yield started


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Polls until it holds; fails after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for yet has, too."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def ends_with(process: FreshProcess, method: str, *, timeout_s: float = TIMEOUT_S, **arguments: object) -> TrialError:
    with pytest.raises(TrialError) as caught:
        process.call(method, timeout_s=timeout_s, **arguments)
    return caught.value


def test_a_call_is_answered_and_the_object_stays(start: Start) -> None:
    process = start()
    assert process.call("add", timeout_s=TIMEOUT_S, a=1.5, b=2) == 3.5
    assert process.call("add", timeout_s=TIMEOUT_S, a=1, b=2) == 3
    assert process.call("num_calls", timeout_s=TIMEOUT_S) == 2
    assert process.alive
    assert process.pid == os.getpgid(process.pid) != os.getpgid(0)


def test_variables_are_set_and_removed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    with FreshProcess(
        "trial_handlers:Handler", environment={"PYTHONPATH": PATH, "ADDED": "2", "REMOVED": None}
    ) as process:
        seen = [process.call("variable", timeout_s=TIMEOUT_S, name=name) for name in ("KEPT", "ADDED", "REMOVED")]
    assert seen == ["1", "2", None]


def test_a_raised_error_is_an_answer_and_the_process_goes_on(start: Start) -> None:
    process = start()
    error = ends_with(process, "fail")
    assert (error.kind, str(error)) == ("failed", "ValueError: first line")
    assert (
        str(ends_with(process, "fail_with_a_list")) == "ValueError: a constraint was violated - the batch is always 2"
    )
    assert str(ends_with(process, "fail_silently")) == "KeyError"
    assert process.call("add", timeout_s=TIMEOUT_S, a=1, b=1) == 2


def test_what_is_no_json_is_an_error_of_the_handler(start: Start) -> None:
    process = start()
    assert ends_with(process, "no_json").kind == "failed"
    assert process.call("add", timeout_s=TIMEOUT_S, a=1, b=1) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", "RuntimeError: can't be made"),
        ("Missing", "AttributeError: module 'trial_handlers' has no attribute 'Missing'"),
    ],
)
def test_a_handler_that_cannot_be_made_fails_every_call(start: Start, name: str, message: str) -> None:
    process = start(name)
    for _ in range(2):
        error = ends_with(process, "add", a=1, b=1)
        assert (error.kind, str(error)) == ("failed", message)


def test_our_errors_come_back_as_they_were(start: Start) -> None:
    process = start()
    with pytest.raises(TargetError, match="the target is wrong") as target:
        process.call("refuse_target", timeout_s=TIMEOUT_S)
    assert target.value.help == "write another"
    with pytest.raises(LimitsError, match="nothing met") as limits:
        process.call("refuse_limits", timeout_s=TIMEOUT_S)
    assert (limits.value.help, limits.value.exit_code) == ("loosen", 3)
    with pytest.raises(UserCodeError) as user:
        process.call("user_code", timeout_s=TIMEOUT_S)
    assert user.value.doing == "load() raised ValueError"
    assert user.value.trace.endswith("ValueError: no")


def test_a_subclass_of_ours_comes_back_as_the_class_above_it(start: Start) -> None:
    with pytest.raises(TargetError, match="the request is wrong") as caught:
        start().call("refuse_request", timeout_s=TIMEOUT_S)
    assert caught.value.help == "send another"


def test_a_namesake_of_ours_is_an_ordinary_error(start: Start) -> None:
    error = ends_with(start(), "raise_namesake")
    assert (error.kind, str(error)) == ("failed", "UsageError: not torchproof's")


def test_a_segfault_names_the_signal_and_the_last_words(start: Start) -> None:
    process = start()
    error = ends_with(process, "segfault")
    assert error.kind == "crashed"
    assert str(error) == "killed by SIGSEGV: about to read address 0"
    assert not process.alive
    assert ends_with(process, "add", a=1, b=1).kind == "crashed", "a later call says the same"


def test_an_exit_names_the_code(start: Start) -> None:
    error = ends_with(start(), "end", code=3)
    assert error.kind == "crashed"
    assert str(error).startswith("exited with code 3")


def test_a_signal_without_a_name_gives_its_number(start: Start) -> None:
    number = signal.SIGRTMIN + 2
    assert str(ends_with(start(), "end_by", number=number)).startswith(f"killed by signal {number}")


def test_a_process_that_closes_its_pipes_and_stays_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchproof.measure.process.GRACE_S", 0.2)
    process = start()
    assert ends_with(process, "stop_talking").kind == "crashed"
    assert not process.alive


def test_a_kill_from_outside_in_the_middle_of_a_call(start: Start, tmp_path: Path) -> None:
    process = start()
    ready = tmp_path / "ready"

    def kill() -> None:
        wait_for(lambda: ready.exists() and ready.read_text(), "the call never started")
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = ends_with(process, "hang", ready=str(ready))
    killer.join()
    assert error.kind == "crashed"
    assert str(error).startswith("killed by SIGKILL")
    wait_for(lambda: gone(int(ready.read_text())), "its grandchild survived")


def test_a_hang_is_ended_with_everything_it_started(start: Start, tmp_path: Path) -> None:
    process = start()
    process.call("add", timeout_s=TIMEOUT_S, a=1, b=1)  # the interpreter is up: the short timeout is the call's
    error = ends_with(process, "hang", timeout_s=1.0, ready=str(tmp_path / "ready"))
    assert (error.kind, str(error)) == ("timed out", "no answer in 1 s")
    assert not process.alive
    wait_for(lambda: gone(int((tmp_path / "ready").read_text())), "its grandchild survived")


def test_a_crash_is_seen_although_a_fork_holds_the_pipe_open(start: Start) -> None:
    """Without the watcher the call would wait for its whole timeout, and the fork would stay for ever."""
    process = start()
    error = ends_with(process, "crash_beside_a_fork")
    assert error.kind == "crashed"
    assert str(error).startswith("exited with code 7")


@pytest.mark.parametrize("method", ["eat", "eat_below"])
def test_memory_over_the_limit_ends_it(start: Start, method: str) -> None:
    """Its own memory and its children's."""
    process = start(memory_limit_bytes=150 * MIB)
    error = ends_with(process, method, num_bytes=300 * MIB)
    assert error.kind == "out of memory"
    assert str(error).endswith("limit 150 MiB")
    assert process.peak_bytes > 150 * MIB


def test_memory_below_the_limit_is_left_alone(start: Start) -> None:
    process = start(memory_limit_bytes=1024 * MIB)
    assert process.call("big", timeout_s=TIMEOUT_S, size=20 * MIB) == "x" * (20 * MIB)
    wait_for(lambda: process.peak_bytes > 0, "memory was never looked at")


def test_what_it_prints_is_no_answer(start: Start) -> None:
    process = start()
    assert process.call("chat", timeout_s=TIMEOUT_S) == "the truth"
    assert process.call("add", timeout_s=TIMEOUT_S, a=1, b=1) == 2
    assert "a third" in process.log_tail()


@pytest.mark.parametrize("size", [100_000, 8 * MIB])
def test_big_answers_and_big_calls(start: Start, size: int) -> None:
    """Beyond a pipe's 64 KiB."""
    process = start()
    assert len(process.call("big", timeout_s=TIMEOUT_S, size=size)) == size
    assert process.call("length", timeout_s=TIMEOUT_S, text="x" * size) == size


def test_close_and_kill_may_come_twice(start: Start) -> None:
    process = start()
    process.kill()
    process.kill()
    process.close()
    process.close()
    assert not process.alive


def test_close_ends_a_process_in_the_middle_of_work(start: Start) -> None:
    """As when an exception leaves the with block."""
    process = start()
    pid = process.call("grandchild", timeout_s=TIMEOUT_S)
    with contextlib.suppress(RuntimeError), process:
        raise RuntimeError("by the way")
    assert not process.alive
    wait_for(lambda: gone(pid), "its grandchild survived")


def test_the_parents_death_ends_it(tmp_path: Path) -> None:
    """Even by a kill -9, even in the middle of a call."""
    script = (
        "import sys\n"
        "from torchproof.measure.process import FreshProcess\n"
        "process = FreshProcess('trial_handlers:Handler')\n"
        "print(process.pid, flush=True)\n"
        "process.call('hang', timeout_s=1000, ready=sys.argv[1])\n"
    )
    ready = tmp_path / "ready"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(ready)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)},
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: ready.exists() and ready.read_text(), "the call never started")
        assert not gone(pid)
        parent.kill()
        wait_for(lambda: gone(pid), "the child survived its parent")
    finally:
        parent.kill()
        parent.communicate()
        with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
            os.kill(int(ready.read_text()), signal.SIGKILL)  # its grandchild is nobody's any more


def test_what_it_leaves_in_its_temporary_folder_is_removed(start: Start) -> None:
    """And no other process finds it there."""
    first, second = start(), start()
    folders = [Path(process.call("leave_behind", timeout_s=TIMEOUT_S)) for process in (first, second)]
    assert all(folder.is_dir() for folder in folders)
    assert folders[0].parent != folders[1].parent
    first.close()
    assert [folder.parent.exists() for folder in folders] == [False, True]


def test_no_descriptor_stays_open_here() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for method in ("num_calls", "fail"):
        process = FreshProcess("trial_handlers:Handler", environment={"PYTHONPATH": PATH})
        with contextlib.suppress(TrialError), process:
            process.call(method, timeout_s=TIMEOUT_S)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_of_one_process_is_in_another(start: Start) -> None:
    """Else the first would not see its caller's pipe close: each has two pipes, /dev/null, and its log twice."""
    first = start()
    first.call("add", timeout_s=TIMEOUT_S, a=1, b=1)
    links = start().call("descriptors", timeout_s=TIMEOUT_S)
    assert len([link for link in links if link.startswith("pipe:")]) == 2
