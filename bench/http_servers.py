"""HTTP servers side by side, in front of the same tiny model: what each one costs, and how it refuses a large body.

The servers run in processes of their own, with torch on one thread; the rounds are interleaved and their order is
turned every second time. It needs ``uvicorn httptools uvloop hypercorn granian aiohttp`` besides torchproof and torch:
``python -m bench.http_servers``. Written to bench/results/. The row named "again" is the same server as the one that
all are compared with: it says how much of a difference is noise.
"""

import asyncio
import functools
import http.client
import importlib
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from bench.load import Sample, closed_loop, post, throughput
from torch import nn

from torchproof.machine.environment import read_environment
from torchproof.render import units
from torchproof.stats import compare_paired, quantile
from torchproof.types import Comparison, Environment, Record, encode

RESULTS = Path(__file__).parent / "results"
BASE = "uvicorn, httptools, uvloop"
CLIENTS = (1, 32)
NUM_ROUNDS = 8  # the fewest pairs that give an interval
ROUND_S = 1.5
WARMUP_S = 0.1
NUM_INPUTS = 64
MAX_BATCH_SIZE = 32
# The sums of a larger batch are taken in another order; float32 carries 1e-7, and the outputs are of the order 0.1.
TOLERANCE = 1e-5
LARGE = b"0" * 5_000_000  # more than the socket buffers of a loopback connection hold
NUM_REFUSALS = 10
REFUSED_BYTES = 1_000_000

# ----------------------------------------------------------------------------------------------------- one server


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).eval()


class Model:
    """One thread with the model; what came in during a forward goes into the next one."""

    def __init__(self) -> None:
        self._network = network()
        self._waiting: queue.SimpleQueue[tuple[asyncio.Future[bytes], bytes]] = queue.SimpleQueue()
        self._decode = msgspec.json.Decoder(list[float]).decode
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, body: bytes) -> asyncio.Future[bytes]:
        """The answer to a list of numbers; both are JSON."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.put((future, body))
        return future

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < MAX_BATCH_SIZE and not self._waiting.empty():
                batch.append(self._waiting.get())
            outputs = self._network(torch.tensor([self._decode(body) for _, body in batch])).tolist()
            answers = [msgspec.json.encode(row) for row in outputs]
            batch[0][0].get_loop().call_soon_threadsafe(_answer, [future for future, _ in batch], answers)


def _answer(futures: Sequence[asyncio.Future[bytes]], answers: Sequence[bytes]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def asgi(model: Model) -> Callable[..., Awaitable[None]]:
    """Without a framework. ``/refuse`` and ``/refuse-close`` answer 413 before they read the body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (kind := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{kind}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        headers = [(b"content-type", b"application/json")]
        if scope["path"].startswith("/refuse") and int(dict(scope["headers"])[b"content-length"]) > REFUSED_BYTES:
            status, answer = 413, b"{}"
            if scope["path"].endswith("close"):
                headers.append((b"connection", b"close"))
        else:
            message = await receive()
            body = message["body"]
            while message.get("more_body"):
                message = await receive()
                body += message["body"]
            status, answer = 200, await model.ask(body)
        headers.append((b"content-length", b"%d" % len(answer)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


async def uvicorn(listener: socket.socket, model: Model, http: str) -> None:
    module: Any = importlib.import_module("uvicorn")
    config = module.Config(
        asgi(model),
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    await module.Server(config).serve(sockets=[listener])


async def hypercorn(listener: socket.socket, model: Model) -> None:
    config = importlib.import_module("hypercorn.config").Config()
    config.bind = [f"fd://{os.dup(listener.fileno())}"]
    config.accesslog = config.errorlog = None
    serve: Any = importlib.import_module("hypercorn.asyncio").serve
    await serve(asgi(model), config)


async def granian(listener: socket.socket, model: Model, interface: str) -> None:
    host, port = listener.getsockname()
    listener.close()  # it takes no socket of ours
    app: Any = asgi(model)
    if interface == "rsgi":

        async def app(scope: Any, protocol: Any) -> None:
            if scope.path.startswith("/refuse") and int(scope.headers["content-length"]) > REFUSED_BYTES:
                headers = [("content-type", "application/json")]
                if scope.path.endswith("close"):
                    headers.append(("connection", "close"))
                protocol.response_bytes(413, headers, b"{}")
            else:
                answer = await model.ask(await protocol())
                protocol.response_bytes(200, [("content-type", "application/json")], answer)

    server: Any = importlib.import_module("granian.server.embed").Server
    constants: Any = importlib.import_module("granian.constants")
    await server(
        app,
        address=host,
        port=port,
        interface=constants.Interfaces(interface),
        http=constants.HTTPModes.http1,
        websockets=False,
        log_enabled=False,
    ).serve()


async def aiohttp(listener: socket.socket, model: Model) -> None:
    web: Any = importlib.import_module("aiohttp.web")

    async def predict(request: Any) -> Any:
        return web.Response(body=await model.ask(await request.read()), content_type="application/json")

    async def refuse(request: Any) -> Any:
        if request.content_length <= REFUSED_BYTES:
            return await predict(request)
        response = web.Response(status=413, body=b"{}", content_type="application/json")
        if request.path.endswith("close"):
            response.force_close()
        return response

    app = web.Application()
    app.add_routes([web.post("/predict", predict), web.post("/refuse", refuse), web.post("/refuse-close", refuse)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


async def floor(listener: socket.socket, model: Model) -> None:
    """What is left of a server when only the parser is: no limits, time-outs, pipelining, or Date header."""
    parser: Any = importlib.import_module("httptools").HttpRequestParser

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport
            self._parser = parser(self)
            self._body = b""

        def data_received(self, data: bytes) -> None:
            self._parser.feed_data(data)

        def on_body(self, body: bytes) -> None:
            self._body += body

        def on_message_complete(self) -> None:
            body, self._body = self._body, b""
            model.ask(body).add_done_callback(self._answer)

        def _answer(self, future: asyncio.Future[bytes]) -> None:
            answer = future.result()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            self._transport.write(head + answer)

    await (await asyncio.get_running_loop().create_server(Protocol, sock=listener)).serve_forever()


Server = Callable[[socket.socket, Model], Awaitable[None]]
FLOOR = "(floor: httptools, uvloop)"
AIOHTTP = "aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl idna typing_extensions uvloop"
fast, pure = functools.partial(uvicorn, http="httptools"), functools.partial(uvicorn, http="h11")
# Name -> (what serves, the event loop, the packages that it brings).
SERVERS: dict[str, tuple[Server, str, str]] = {
    BASE: (fast, "uvloop", "uvicorn h11 httptools uvloop"),
    f"{BASE} again": (fast, "uvloop", "uvicorn h11 httptools uvloop"),
    "uvicorn, httptools, asyncio": (fast, "asyncio", "uvicorn h11 httptools"),
    "uvicorn, h11, asyncio": (pure, "asyncio", "uvicorn h11"),
    "hypercorn, uvloop": (hypercorn, "uvloop", "Hypercorn h11 h2 hpack hyperframe priority wsproto uvloop"),
    "granian ASGI, uvloop": (functools.partial(granian, interface="asginl"), "uvloop", "granian uvloop"),
    "granian RSGI, uvloop": (functools.partial(granian, interface="rsgi"), "uvloop", "granian uvloop"),
    "aiohttp, uvloop": (aiohttp, "uvloop", AIOHTTP),
    FLOOR: (floor, "uvloop", "httptools uvloop"),
}


def serve(name: str) -> None:
    """In the server's process."""
    torch.set_num_threads(1)
    serve_on, loop, _ = SERVERS[name]
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    # asyncio does this itself for listeners that it opened, and not for one whose `proto` is 0 like this one's. Without
    # it the second of two writes waits for the client's delayed acknowledgement: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(listener.getsockname()[1], flush=True)
    factory = importlib.import_module("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop

    async def main() -> None:
        await serve_on(listener, Model())

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


# --------------------------------------------------------------------------------------------------- the measurement


class Refusals(Record):
    """How many of NUM_REFUSALS clients that sent 5 MB could read the 413.

    Attributes:
        closing: the answer carried "connection: close".
    """

    closing: bool
    http_client: int
    curl: int
    curl_no_expect: int


class Round(Record):
    """One server under load once.

    Attributes:
        cpu_s: of the server's process.
        client_cpu: share of one core that the load took; near 1 the client is what is measured.
    """

    server: str
    clients: int
    throughput_rps: float
    p50_s: float
    p99_s: float
    num_requests: int
    num_bad: int
    cpu_s: float
    client_cpu: float


class Row(Record):
    """A server at a number of clients against the base; above 1 it is better."""

    server: str
    clients: int
    throughput: Comparison
    p50: Comparison
    p99: Comparison
    cpu: Comparison


class Results(Record):
    """What a run of this file stores."""

    created: str
    environment: Environment
    versions: dict[str, str]
    install_bytes: dict[str, int]
    refusals: dict[str, tuple[Refusals, ...]]
    rows: tuple[Row, ...]
    rounds: tuple[Round, ...]


class Running:
    """A server in its process."""

    def __init__(self, name: str) -> None:
        self.name = name
        environment = os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.http_servers", "serve", name]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._usage = psutil.Process(self._process.pid)

    def wait_ready(self, request: bytes) -> None:
        """Until it answers."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            samples = asyncio.run(closed_loop("127.0.0.1", self.port, [request], clients=1, duration_s=0.05))
            if samples[-1].status == 200:
                return
        raise TimeoutError(f"{self.name} does not answer")

    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        times = self._usage.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(server: Running, clients: int, bodies: Sequence[bytes], expected: Sequence[Sequence[float]]) -> Round:
    """One round; every answer is checked."""
    requests = [post("/predict", body) for body in bodies]

    def load(duration_s: float) -> list[Sample]:
        with asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop) as runner:
            return runner.run(closed_loop("127.0.0.1", server.port, requests, clients=clients, duration_s=duration_s))

    load(WARMUP_S)
    own, theirs, start = _own_cpu_s(), server.cpu_s(), time.monotonic()
    samples = load(ROUND_S)
    own, theirs, wall = _own_cpu_s() - own, server.cpu_s() - theirs, time.monotonic() - start
    latencies = [sample.latency_s for sample in samples]
    return Round(
        server=server.name,
        clients=clients,
        throughput_rps=throughput(samples, ROUND_S),
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        num_requests=len(samples),
        num_bad=sum(not _right(sample, expected) for sample in samples),
        cpu_s=theirs,
        client_cpu=own / wall,
    )


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _right(sample: Sample, expected: Sequence[Sequence[float]]) -> bool:
    if sample.status != 200:
        return False
    row = msgspec.json.decode(sample.body, type=list[float])
    wanted = expected[sample.request_index]
    return len(row) == len(wanted) and all(abs(a - b) < TOLERANCE for a, b in zip(row, wanted, strict=True))


def refusals(port: int, closing: bool) -> Refusals:
    """Who can read a 413 that is sent before the body was read."""
    path = "/refuse-close" if closing else "/refuse"
    with tempfile.NamedTemporaryFile() as file:
        file.write(LARGE)
        file.flush()
        curl = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "-m", "10", "--data-binary", f"@{file.name}"]
        curl += [f"http://127.0.0.1:{port}{path}"]
        return Refusals(
            closing=closing,
            http_client=sum(_http_client(port, path) for _ in range(NUM_REFUSALS)),
            curl=sum(_output(curl) == "413" for _ in range(NUM_REFUSALS)),
            curl_no_expect=sum(_output([*curl, "-H", "Expect:"]) == "413" for _ in range(NUM_REFUSALS)),
        )


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _http_client(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, LARGE)
        return connection.getresponse().status == 413
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def compare(rounds: Sequence[Round]) -> tuple[Row, ...]:
    """Each server's rounds against the base's of the same turn."""
    rows = []
    for clients in CLIENTS:
        by_server = {name: [r for r in rounds if (r.server, r.clients) == (name, clients)] for name in SERVERS}
        base = by_server.pop(BASE)
        for name, own in by_server.items():

            def against(seconds: Callable[[Round], float], own: list[Round] = own, name: str = name) -> Comparison:
                return compare_paired([seconds(r) for r in base], [seconds(r) for r in own], names=(BASE, name))  # noqa: B023

            rows.append(
                Row(
                    server=name,
                    clients=clients,
                    throughput=against(lambda r: 1 / r.throughput_rps),
                    p50=against(lambda r: r.p50_s),
                    p99=against(lambda r: r.p99_s),
                    cpu=against(lambda r: r.cpu_s / r.num_requests),
                )
            )
    return tuple(rows)


def install_bytes(packages: Sequence[str]) -> int:
    """What the packages take on the disk, without what Python compiles of them."""
    listed = [file for package in packages for file in distribution(package).files or () if file.suffix != ".pyc"]
    files = [Path(str(file.locate())) for file in listed]
    return sum(file.stat().st_size for file in files if file.is_file())


def table(results: Results) -> str:
    e = results.environment
    lines = [
        "# HTTP servers in front of a tiny model",
        "",
        f"Written by `python -m bench.http_servers` on {results.created}: {e.cpu_model}, {e.num_cores} cores, Python "
        f"{e.python}, {', '.join(f'{name} {number}' for name, number in results.versions.items())}.",
        "",
        f"Against {BASE}: {NUM_ROUNDS} interleaved rounds of {ROUND_S} s, the load on the same machine; above 1 is "
        "better (more requests, a shorter latency, less CPU per request). Intervals are the median's, at 98.75%. "
        "`client` is the largest share of a core that the load took: near 1, throughput is the client's.",
        "",
        "| server | clients | throughput | p50 | p99 | CPU per request | client | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        own = [r for r in results.rounds if (r.server, r.clients) == (row.server, row.clients)]
        cells = [units.ratio(c.ratio, c.low, c.high) for c in (row.throughput, row.p50, row.p99, row.cpu)]
        cells += [f"{max(r.client_cpu for r in own):.2f}", str(sum(r.num_bad for r in own))]
        lines.append(f"| {row.server} | {row.clients} | {' | '.join(cells)} |")
    lines += [
        "",
        f"How many of {NUM_REFUSALS} clients that sent 5 MB could read a 413 that was answered before the body was "
        "read, and what the server and its packages take on the disk:",
        "",
        "| server | connection | http.client | curl | curl, no Expect | install |",
        "|---|---|---|---|---|---|",
    ]
    for name, seen in results.refusals.items():
        for r in seen:
            connection = "close" if r.closing else "kept"
            size = units.size(results.install_bytes[name])
            lines.append(f"| {name} | {connection} | {r.http_client} | {r.curl} | {r.curl_no_expect} | {size} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    torch.set_num_threads(1)
    inputs = torch.randn(64, NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    bodies = [json.dumps(row).encode() for row in inputs.tolist()]
    with torch.inference_mode():
        expected = network()(inputs).tolist()
    servers = [Running(name) for name in SERVERS]
    try:
        for server in servers:
            server.wait_ready(post("/predict", bodies[0]))
        refused = {
            s.name: tuple(refusals(s.port, closing) for closing in (False, True)) for s in servers if s.name != FLOOR
        }
        rounds = []
        for number in range(NUM_ROUNDS):
            for server in servers if number % 2 else reversed(servers):
                rounds += [measure(server, clients, bodies, expected) for clients in CLIENTS]
            print(f"round {number + 1} of {NUM_ROUNDS}", file=sys.stderr)
    finally:
        for server in servers:
            server.stop()
    packages = {name: packages.split() for name, (_, _, packages) in SERVERS.items()}
    shown = sorted({own[0] for own in packages.values()} | {"uvloop", "h11"}, key=str.lower)
    results = Results(
        created=time.strftime("%Y-%m-%d"),
        environment=read_environment(),
        versions={package: version(package) for package in shown},
        install_bytes={name: install_bytes(own) for name, own in packages.items()},
        refusals=refused,
        rows=compare(rounds),
        rounds=tuple(rounds),
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "http_servers.json").write_text(encode(results))
    (RESULTS / "http_servers.md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        raise SystemExit(main())
