"""Faults of replicas and of requests, in a real server: every client gets its own right answer, or is told why not."""

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest
import uvloop

from torchproof.machine.cores import core_ids
from torchproof.serve import supervisor
from torchproof.serve.processes import Replica
from torchproof.serve.wire import Check, Started, pack

GUARD_S = 90  # for what takes seconds: only a test that fails waits so long
# As ``python -m torchproof``, but that golden rows are replayed 50 times as often, and a load may stand still for 4 s.
MAIN = """
from torchproof.cli.main import main
from torchproof.serve import processes, supervisor
supervisor.CHECK_S = 0.2
processes.LOOK_S, processes.NUM_STILL = 0.2, 20
main()
"""

# A model that adds up, and has the fault of which a flag file is there: the process that takes the file has it.
# 13 ends the process; 14 hangs; 15 leaves a child behind; 77 waits for the file "open"; 18 tells the number of threads,
# 19 that of the objects that no garbage collection looks at.
APP = """
import gc, os, pathlib, signal, time
from dataclasses import dataclass
import torch
import torchproof as tp

HERE = pathlib.Path(__file__).parent

@dataclass
class Numbers:
    values: list[float]

@dataclass
class Total:
    total: float

def took(name):
    try:
        os.rename(HERE / name, HERE / f"{name}.taken")
    except FileNotFoundError:
        return False
    return True

class Net(torch.nn.Module):
    factor = 1.0
    def forward(self, x):
        if took("hang"):
            time.sleep(10**6)
        if took("nan"):
            self.factor = float("nan")
        if took("wrong"):
            self.factor = 2.0
        if bool((x == 13).any()):
            os._exit(13)
        if bool((x == 14).any()):
            time.sleep(10**6)
        if bool((x == 15).any()) and not os.fork():
            signal.alarm(300)
            while True:
                signal.pause()
        while bool((x == 77).any()) and not (HERE / "open").exists():
            time.sleep(0.001)
        if bool((x == 18).any()):
            return torch.full((len(x),), torch.get_num_threads())
        if bool((x == 19).any()):
            return torch.full((len(x),), gc.get_freeze_count())
        return x.sum(1) * self.factor

class Sum(tp.Service):
    variable_dims = {"x": {0: "length"}}
    def load(self):
        while (HERE / "hang in load").exists():
            time.sleep(10**6)
        return Net()
    def encode(self, request: Numbers):
        return {"x": torch.tensor(request.values)}
    def decode(self, outputs, request: Numbers) -> Total:
        return Total(float(outputs))
    def samples(self):
        return [Numbers([1.0, 2.0]), Numbers([3.0, 4.0, 5.0])]
"""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def total(self) -> float:
        """Of a right answer."""
        assert self.status == 200, self
        total: float = json.loads(self.body)["total"]
        return total


class Server:
    """``torchproof serve`` in a process of its own, of which nothing is left at the end."""

    def __init__(self, launched: Any) -> None:
        self._launched = launched
        self.process: subprocess.Popen[str] = launched.process
        self.context: ssl.SSLContext | None = None
        self._children: set[psutil.Process] = set()

    def __enter__(self) -> "Server":
        self._launched.__enter__()
        self.url = urlsplit(self._launched.ready()["url"])
        self.tree()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.tree()
        self._launched.__exit__(kind, exc, tb)
        until(lambda: not self.left())

    def tree(self) -> list[psutil.Process]:
        """All of its processes."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self._children.update(found)
        return found

    def left(self) -> list[psutil.Process]:
        """Of its processes those that live, though it has ended."""
        return [child for child in self._children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def replicas(self) -> set[int]:
        """Pids of the children of its zygotes."""
        zygotes = psutil.Process(self.process.pid).children()
        self._children.update(zygotes)
        found = set()
        for zygote in zygotes:
            try:
                children = zygote.children()
            except psutil.NoSuchProcess:
                continue
            self._children.update(children)
            found |= {child.pid for child in children if child.is_running() and child.status() != "zombie"}
        return found

    def log(self) -> str:
        log: str = self._launched.log()
        return log

    def connect(self) -> http.client.HTTPConnection:
        assert self.url.hostname is not None
        if self.context is not None:
            return http.client.HTTPSConnection(self.url.hostname, self.url.port, timeout=GUARD_S, context=self.context)
        return http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=GUARD_S)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = self.connect()
        try:
            return ask(connection, method, path, body, {name.replace("_", "-"): v for name, v in headers.items()})
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def predict(self, *values: float, **headers: str) -> Reply:
        return self.ask("POST", "/predict", json.dumps({"values": values}).encode(), **headers)

    def metric(self, sample: str) -> float:
        """``torchproof_queue_depth``; 0 where there is no such series."""
        lines = self.get("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))

    def replaced(self, before: set[int], reason: str) -> None:
        """Waits until one replica was replaced, for this reason, and both answer."""
        until(lambda: self.metric(f'torchproof_replica_restarts_total{{reason="{reason}"}}') >= 1)
        until(lambda: self.metric('torchproof_replicas{state="ready"}') == len(before))
        assert len(self.replicas()) == len(before)
        assert len(self.replicas() - before) == 1


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Reply:
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return Reply(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())


class Clients:
    """Clients that ask one thing after the other, each for sums of its own, until the block ends.

    Attributes:
        wrong: what was no answer of 200 with the right sum.
    """

    def __init__(self, server: Server, num_clients: int = 16, newer: float = 0.0) -> None:
        self.wrong: list[str] = []
        self.num_answered = 0
        self._server = server
        self._newer = newer  # what another version of the model adds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(GUARD_S)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        connection = self._server.connect()
        count = 0
        while not self._stop.is_set():
            count += 1
            values = [1000.0 + number, float(count % 1000 + 100)]
            try:
                reply = ask(connection, "POST", "/predict", json.dumps({"values": values}).encode(), {})
                wrong = "" if reply.status == 200 and reply.total - sum(values) in (0, self._newer) else repr(reply)
            except (OSError, http.client.HTTPException) as exc:
                wrong = repr(exc)
                connection.close()
            with self._lock:
                self.num_answered += 1
                if wrong:
                    self.wrong.append(wrong)
            self._stop.wait(0.002)  # the cores are for the server
        connection.close()

    def go_on(self, number: int = 64) -> None:
        """Waits until so many more were answered."""
        enough = self.num_answered + number
        until(lambda: self.num_answered >= enough)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while not true():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def in_thread(call: Callable[[], Reply]) -> Callable[[], Reply]:
    """Calls in the background; the result gives what it returned."""
    results: list[Reply] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def join() -> Reply:
        thread.join(GUARD_S)
        return results[0]

    return join


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def serve(folder: Path, start: Callable[..., Any]) -> "Serve":
    """A server with so many replicas, whose deadline no slow machine will meet."""

    def served(*arguments: str, replicas: int = 2, deadline: str = "100s", reference: str | None = None) -> Server:
        options = ("--replicas", str(replicas), "--deadline", deadline, *arguments)
        return Server(start(reference or f"{folder / 'app.py'}:Sum", *options, main=MAIN))

    return served


Serve = Callable[..., Server]


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "hung")])
def test_a_replica_that_ends_or_stops_costs_no_client_its_answer(
    serve: Serve, number: signal.Signals, reason: str
) -> None:
    with serve() as server, Clients(server) as clients:
        clients.go_on()
        before = server.replicas()
        os.kill(min(before), number)
        server.replaced(before, reason)
        clients.go_on()
    assert clients.wrong == []


@pytest.mark.parametrize(("flag", "reason"), [("hang", "hung"), ("nan", "wrong")])
def test_a_replica_whose_model_hangs_or_gives_nan_costs_no_client_its_answer(
    serve: Serve, folder: Path, flag: str, reason: str
) -> None:
    with serve() as server, Clients(server) as clients:
        clients.go_on()
        before = server.replicas()
        (folder / flag).touch()
        server.replaced(before, reason)
        clients.go_on()
    assert (folder / f"{flag}.taken").exists()
    assert clients.wrong == []


def test_the_log_says_where_a_replica_hung(serve: Serve, folder: Path) -> None:
    with serve() as server:
        before = server.replicas()
        assert server.predict(14).status == 500
        until(lambda: not server.replicas() & before)
        until(lambda: len(re.findall(r'app.py", line \d+ in forward', server.log())) == 2)  # tried twice


def test_a_replica_is_replaced_though_what_it_started_holds_its_socket(serve: Serve, folder: Path) -> None:
    with serve(replicas=1) as server:
        (pid,) = server.replicas()
        assert server.predict(15).total == 15
        (child,) = psutil.Process(pid).children()
        try:
            os.kill(pid, signal.SIGKILL)
            until(lambda: server.metric('torchproof_replica_restarts_total{reason="ended"}') == 1)
            until(lambda: server.get("/readyz").status == 200)
            assert server.predict(1, 2).total == 3
        finally:
            child.kill()


def test_a_reload_that_hangs_is_given_up_and_the_log_says_where(serve: Serve, folder: Path) -> None:
    """What was served before goes on, and the next reload is not held up."""
    with serve(replicas=1) as server:
        before = server.replicas()
        (folder / "hang in load").touch()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="failed"}') == 1)
        until(lambda: "in load" in server.log())
        assert server.replicas() == before
        assert server.predict(1, 2).total == 3
        (folder / "hang in load").unlink()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="passed"}') == 1)
        assert server.predict(1, 2).total == 3


def test_every_replica_and_the_zygote_may_end_at_once(serve: Serve) -> None:
    """Requests that wait are answered by the new ones; none is accepted in between."""
    with serve() as server:
        before = server.tree()
        assert len(before) == 3
        for process in before:
            process.kill()
        until(lambda: server.metric('torchproof_replica_restarts_total{reason="ended"}') == 2)
        until(lambda: server.get("/readyz").status == 200)
        assert server.predict(1, 2).total == 3
        until(lambda: len(server.replicas()) == 2)


@pytest.mark.parametrize(("value", "reason"), [(13, "ended"), (14, "hung")])
def test_a_request_that_ends_its_replica_is_tried_once_more_alone(serve: Serve, value: float, reason: str) -> None:
    """It is answered with 500 in the end, and all others with 200, those beside it in a forward too.

    Of three replicas one is left when it has ended two.
    """
    with serve(replicas=3) as server, Clients(server) as clients:
        clients.go_on()
        reply = server.predict(value)
        clients.go_on()
        assert server.metric(f'torchproof_replica_restarts_total{{reason="{reason}"}}') == 2
    assert reply.status == 500
    assert "twice" in json.loads(reply.body)["detail"]
    assert clients.wrong == []


def test_what_must_not_be_done_twice_is_not_retried(serve: Serve, folder: Path) -> None:
    (folder / "app.py").write_text(APP + "    idempotent = False\n")
    with serve() as server:
        asked = in_thread(lambda: server.predict(77))
        until(lambda: server.metric("torchproof_queue_depth") == 1)
        before = server.replicas()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        reply = asked()
        assert reply.status == 500
        assert "may have been carried out" in json.loads(reply.body)["detail"]
        until(lambda: server.metric("torchproof_replica_restarts_total") == len(before))
        until(lambda: server.get("/readyz").status == 200)
        assert server.predict(1).total == 1
        assert server.metric("torchproof_retries_total") == 0


def test_clients_that_hang_up_leave_nothing_behind(serve: Serve, folder: Path) -> None:
    """Their requests are forgotten while the model is still at the first of them."""
    with serve(replicas=1) as server:
        connections = [server.connect() for _ in range(8)]
        for connection in connections:
            connection.request("POST", "/predict", b'{"values": [77]}')
        until(lambda: server.metric("torchproof_queue_depth") == 8)
        for connection in connections:
            connection.close()
        until(lambda: server.metric("torchproof_queue_depth") == 0)
        (folder / "open").touch()
        assert server.predict(1).total == 1
        assert server.metric('torchproof_requests_total{outcome="disconnected",route="/predict"}') == 8


def test_a_replica_that_answers_wrongly_but_finitely_is_found_by_the_golden_rows(serve: Serve, folder: Path) -> None:
    """Until the next check its answers are wrong; then it is replaced."""
    with serve() as server:
        before = server.replicas()
        (folder / "wrong").touch()
        server.replaced(before, "wrong")
        assert {server.predict(1, 2).total for _ in range(20)} == {3}
        assert server.metric('torchproof_golden_checks_total{result="failed"}') == 1


def test_a_large_body_is_refused_readably_while_small_requests_go_on(serve: Serve) -> None:
    """The whole body is taken off the wire, so that the client gets to read the answer; twice on one connection."""
    body = json.dumps({"values": "x" * 5_000_000}).encode()
    with serve() as server, Clients(server, 4) as clients:
        connection = server.connect()
        for _ in range(2):
            reply = ask(connection, "POST", "/predict", body, {"Content-Type": "text/plain"})
            assert reply.status == 413
            assert reply.headers["content-type"] == "application/problem+json"
        in_chunks = ask(connection, "POST", "/predict", iter([body[: 1 << 20]] * 5), {})  # type: ignore[arg-type]
        assert in_chunks.status == 413
        connection.close()
        clients.go_on()
    assert clients.wrong == []


def test_a_lone_request_is_tried_with_all_cores_unless_the_user_has_said_how_many(serve: Serve) -> None:
    with serve(replicas=1) as server:
        assert server.predict(18).total == len(core_ids())
    with serve("--threads", "1", replicas=1) as server:
        assert server.predict(18).total == 1


def test_what_replicas_share_is_not_copied_by_their_garbage_collection(serve: Serve) -> None:
    """It would write to each object; torch alone has more than so many."""
    with serve() as server:
        assert server.predict(19).total > 10_000


def test_deadlines(serve: Serve, folder: Path) -> None:
    """504 while the model is still at it, by the server's deadline or a shorter X-Deadline; a longer one changes
    nothing; 408 for a body that does not come. The server answers right afterwards."""
    with serve(deadline="2s") as server:
        for headers in ({}, {"X_Deadline": "0.5"}, {"X_Deadline": "1000"}):
            reply = server.predict(77, **headers)
            assert reply.status == 504
            (folder / "open").touch()
            assert server.predict(1, 2).status in (200, 503)  # the costs now say that this may be late
            until(lambda: server.metric("torchproof_queue_depth") == 0)
            until(lambda: server.predict(1, 2).status == 200)
            (folder / "open").unlink()
        connection = server.connect()
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", "9")
        connection.putheader("X-Deadline", "0.2")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()
        for text in ("0", "-1", "nan", "soon"):
            assert server.predict(1, X_Deadline=text).status == 400


def test_a_full_queue_refuses_at_once(serve: Serve, folder: Path) -> None:
    """429 with Retry-After; what was accepted is answered."""
    with serve("--max-queue", "2", replicas=1) as server:
        accepted = [in_thread(lambda: server.predict(77)) for _ in range(2)]
        until(lambda: server.metric("torchproof_queue_depth") == 2)
        reply = server.predict(1)
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert server.get("/readyz").status == 200
        (folder / "open").touch()
        assert [join().total for join in accepted] == [77, 77]
        assert server.predict(1).total == 1


def test_ids_keys_and_health(serve: Serve, folder: Path) -> None:
    """Without a key: 401, but for health. An id that came is given back; else there is a new one."""
    key = "0123456789abcdef"
    keys = folder / "keys"
    keys.write_text(f"{key}\n")
    keys.chmod(0o600)
    with serve("--api-key-file", str(keys), replicas=1) as server:
        for path in ("/predict", "/v2/models/Sum/infer"):
            reply = server.ask("POST", path, b"{}")
            assert reply.status == 401
            assert reply.headers["www-authenticate"] == "Bearer"
        assert server.predict(1, X_API_Key="0123456789abcdeF").status == 401
        assert server.get("/metrics").status == server.get("/openapi.json").status == 401
        for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
            assert server.get(path).status == 200
        reply = server.predict(1, X_API_Key=key, X_Request_ID="mine-1")
        assert (reply.total, reply.headers["x-request-id"]) == (1, "mine-1")
        one, other = (server.predict(1, Authorization=f"Bearer {key}") for _ in range(2))
        assert one.total == other.total == 1
        assert one.headers["x-request-id"] != other.headers["x-request-id"]
        keys.write_text("another-key-of-16-characters\n")
        assert server.ask("POST", "/admin/reload", X_API_Key=key).status == 200
        assert server.predict(1, X_API_Key=key).status == 401
        assert server.predict(1, X_API_Key="another-key-of-16-characters").total == 1


@pytest.mark.skipif(not shutil.which("openssl"), reason="nothing makes a certificate")
def test_tls(serve: Serve, folder: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True, capture_output=True
    )
    files = ("--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem"))
    with serve(*files, replicas=1) as server:
        assert server.url.scheme == "https"
        server.context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        assert server.predict(1, 2).total == 3


def test_a_reload_switches_without_a_wrong_answer_and_a_bad_bundle_keeps_the_old(
    serve: Serve, folder: Path, make_bundle: Callable[..., Any], sealed: Callable[[Path], None]
) -> None:
    """SIGHUP: a damaged bundle changes nothing, not even where the golden rows of the running replicas came from. Of a
    newer one each answer is the old one's or the new one's, and the new one's in the end."""
    bundle = make_bundle(code=APP).path
    newer = folder / "newer.tp"
    shutil.copytree(bundle, newer)
    code = newer / "code" / "app.py"
    code.write_text(code.read_text().replace("Total(float(outputs))", "Total(float(outputs) + 1_000_000)"))
    sealed(newer)
    with serve(reference=str(bundle)) as server, Clients(server, newer=1_000_000) as clients:
        clients.go_on()
        before = server.replicas()
        golden = bundle / "golden.safetensors"
        data = golden.read_bytes()
        golden.write_bytes(data[:-8] + bytes(8))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="failed"}') == 1)
        checks = server.metric("torchproof_golden_checks_total")
        until(lambda: server.metric("torchproof_golden_checks_total") >= checks + 4)
        assert server.replicas() == before
        assert server.predict(1, 2).total == 3
        bundle.rename(folder / "bad.tp")
        newer.rename(bundle)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="passed"}') == 1)
        until(lambda: len(server.replicas()) == 2 and not server.replicas() & before)
        clients.go_on()
        assert {server.predict(1, 2).total for _ in range(10)} == {1_000_003}
    assert clients.wrong == []


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_reload_of_a_bare_target_serves_its_file_as_it_is_now(serve: Serve, folder: Path, replicas: int) -> None:
    """In the server's own process too, which has imported the old one; a broken file changes nothing."""
    with serve(replicas=replicas) as server:
        assert server.predict(1, 2).total == 3
        (folder / "app.py").write_text("def")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="failed"}') == 1)
        assert server.predict(1, 2).total == 3
        (folder / "app.py").write_text(APP.replace("Total(float(outputs))", "Total(float(outputs) + 10)"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.metric('torchproof_reloads_total{result="passed"}') == 1)
        assert server.predict(1, 2).total == 13


def test_a_bundle_that_was_damaged_below_its_replicas_is_served_again_once_it_is_whole(
    serve: Serve, folder: Path, make_bundle: Callable[..., Any]
) -> None:
    """A replica ends while the bundle on the disk is another one; nobody sends SIGHUP."""
    bundle = make_bundle(code=APP).path
    with serve(reference=str(bundle), replicas=1) as server:
        (pid,) = server.replicas()
        (bundle / "SHA256SUMS").rename(folder / "sums")
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.metric('torchproof_reloads_total{result="failed"}') >= 1)
        assert server.predict(1, 2).status == 503
        (folder / "sums").rename(bundle / "SHA256SUMS")
        until(lambda: server.get("/readyz").status == 200)
        assert server.predict(1, 2).total == 3


def test_sigterm_finishes_what_was_accepted_and_leaves_no_process(serve: Serve, folder: Path) -> None:
    """A new request is not taken any more; exit code 0."""
    with serve() as server:
        kept = server.connect()
        assert ask(kept, "POST", "/predict", b'{"values": [1]}', {}).total == 1
        accepted = [in_thread(lambda: server.predict(77)) for _ in range(4)]
        until(lambda: server.metric("torchproof_queue_depth") == 4)
        server.tree()
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                return server.get("/healthz").status != 200
            except OSError:
                return True

        until(refused)
        (folder / "open").touch()
        assert [join().total for join in accepted] == [77] * 4
        assert server.process.wait(GUARD_S) == 0
        until(lambda: not server.left())
        kept.close()


def test_a_server_that_is_killed_leaves_no_process(serve: Serve) -> None:
    with serve() as server:
        assert len(server.tree()) == 3
        server.process.kill()
        server.process.wait(GUARD_S)
        until(lambda: not server.left())


def test_a_write_to_a_replica_that_has_just_ended_does_not_lose_its_last_words() -> None:
    """They say which request it was at, so that no other one is blamed; on both event loops."""

    async def heard() -> list[Any]:
        replies: list[Any] = []
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        replica = Replica(0, os.getpid(), ours, lambda replica, reply: replies.append(reply))
        await asyncio.get_running_loop().create_unix_connection(lambda: replica, sock=ours)
        theirs.sendall(pack(Started(ids=(1,), expected_s=1.0)))
        theirs.close()
        replica.send(Check())  # before the loop has read
        await asyncio.wait_for(replica.ended, GUARD_S)
        return replies

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(heard()) == [Started(ids=(1,), expected_s=1.0)]


def test_the_pause_between_two_tries_grows_to_a_limit_and_no_further() -> None:
    """Also after so many failures that the power of two has no float any more."""
    pauses = [supervisor._pause_s(failures) for failures in range(1, 12)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 1.0
    assert pauses[-1] == supervisor._pause_s(10_000) == supervisor.MAX_PAUSE_S
