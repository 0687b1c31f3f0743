"""Twenty-line models: in bundles written by the code that writes the real ones, behind the app, in a real server."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

import httpx
import pytest

from torchproof.bundle.code import user_files
from torchproof.bundle.read import SUMS, Bundle, open_bundle
from torchproof.bundle.write import write_bundle, write_sums
from torchproof.machine.environment import plan_facts, read_environment
from torchproof.runtimes import RUNTIMES, Source, open_runtime
from torchproof.serve import logs
from torchproof.serve.app import INFER, PREDICT, App, Settings
from torchproof.serve.dispatch import Dispatcher
from torchproof.serve.load import Prepared
from torchproof.serve.metrics import Metrics
from torchproof.serve.supervisor import Supervisor
from torchproof.serve.wanted import Wanted
from torchproof.target import golden
from torchproof.target.resolve import resolve
from torchproof.target.service import Service
from torchproof.target.signature import read_signature
from torchproof.target.subject import load_module, make_subject, open_service, sample_requests, save_weights
from torchproof.types import (
    SCHEMA,
    Candidate,
    Choice,
    Finding,
    GoldenSummary,
    Limits,
    Plan,
    Proof,
    Target,
    Tolerance,
)
from torchproof.types.serving import CapsAsked

SRC = Path(__file__).parents[2] / "src"
DEADLINE_S = 60

APP = """
from dataclasses import dataclass
import torch
import torchproof as tp

@dataclass
class Numbers:
    values: list[float]

@dataclass
class Total:
    total: float

class Sum(tp.Service):
    '''Adds numbers up, after a fashion.'''

    variable_dims = {"x": {0: "length"}}

    def load(self):
        torch.manual_seed(0)
        net = torch.nn.Linear(1, 1)
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = net
            def forward(self, x):
                return self.linear(x.unsqueeze(-1)).sum((1, 2)).unsqueeze(-1)
        return Net()

    def encode(self, request: Numbers):
        return {"x": torch.tensor(request.values)}

    def decode(self, outputs, request: Numbers) -> Total:
        return Total(float(outputs))

    def samples(self):
        return [Numbers([1.0, 2.0]), Numbers([3.0, 4.0, 5.0]), Numbers([0.5] * 6)]
"""


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Whatever a test sets in the environment and for the log is undone."""
    loggers = [logging.getLogger(), logging.getLogger("torchproof")]
    before = [(logger.handlers.copy(), logger.level) for logger in loggers]
    with mock.patch.dict(os.environ):
        yield
    logging.captureWarnings(False)
    logs.current_request.set("")
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


BundleMaker = Callable[..., Bundle]


@pytest.fixture
def make_bundle(tmp_path: Path) -> BundleMaker:
    """Writes ``app.py`` and a bundle of its service with one choice for each runtime named, the first one chosen."""

    def make(
        *runtimes: str,
        code: str = APP,
        cpu_flags: dict[str, tuple[str, ...]] | None = None,
        findings: tuple[Finding, ...] = (),
        holds_while: dict[str, str] | None = None,
    ) -> Bundle:
        folder = tmp_path / "src"
        folder.mkdir()
        (folder / "app.py").write_text(textwrap.dedent(code))
        target = resolve(str(folder / "app.py"))
        service = open_service(target)
        module = load_module(service).eval()
        subject = make_subject(target, service, module, *sample_requests(service, None))
        signature = read_signature(module, subject.rows, service, batched=subject.batched)
        references, precision = golden.reference(module, subject.rows, signature)
        golden.save(tmp_path / "golden.safetensors", subject.rows, references)
        weights = tmp_path / "weights.safetensors"
        has_weights = save_weights(module, weights)
        artifacts, choices = {}, []
        for name in runtimes or ("eager",):
            artifact = f"artifacts/{name}"
            artifacts[artifact] = tmp_path / artifact
            artifacts[artifact].mkdir(parents=True)
            source = Source(lambda: module, signature, subject.rows, True, False, 2)
            if name in RUNTIMES:
                open_runtime(RUNTIMES[name]).build(source, "float32", artifacts[artifact], {})
            choices.append(
                Choice(
                    candidate=Candidate(runtime=name),
                    max_batch_size=2,
                    padding=False,
                    artifact=artifact,
                    cpu_flags=(cpu_flags or {}).get(name, ()),
                )
            )
        environment = read_environment()
        facts = plan_facts(environment) | {"largest length": "6"}
        proof = Proof(
            schema=SCHEMA,
            torchproof="0.1.0",
            created="2030-01-01T00:00:00Z",
            target=target,
            signature=signature,
            traffic=subject.traffic(signature),
            environment=environment,
            limits=Limits(),
            tolerance=Tolerance(),
            golden=GoldenSummary(num_rows=len(subject.rows), precision=precision),
            batching=True,
            padding=False,
            baseline="eager, default threads",
            reference="eager, 1 thread",
            speedup=None,
            plan=Plan(
                chosen=choices[0],
                runners_up=tuple(choices[1:]),
                decisions=(),
                holds_while=facts if holds_while is None else holds_while,
            ),
            trials=(),
            findings=findings,
            search_s=1.0,
        )
        write_bundle(
            tmp_path / "app.tp",
            proof,
            golden=tmp_path / "golden.safetensors",
            weights=weights if has_weights else None,
            artifacts=artifacts,
            code=user_files(target, service.files),
        )
        return open_bundle(tmp_path / "app.tp")

    return make


def reseal(folder: Path) -> None:
    """Makes the checksums fit again after a test changed a file on purpose."""
    (folder / SUMS).unlink()
    write_sums(folder)


@pytest.fixture
def sealed() -> Callable[[Path], None]:
    return reseal


T = TypeVar("T")
TARGET = Target(reference="app.py:Net", kind="python")


class Client:
    """The server's app with a model in this process, asked on an event loop of its own.

    Attributes:
        service: what is loaded at a start or a reload.
    """

    def __init__(self, service: Service, *, asked: CapsAsked, max_queue: int, deadline_s: float, keys: Path | None):
        self.service = service
        self.dispatcher = Dispatcher(max_queue)
        self.supervisor: Supervisor
        metrics = Metrics(
            (PREDICT, INFER), lambda: self.dispatcher.depth, lambda: self.supervisor.replicas(), lambda: {}
        )
        self.supervisor = Supervisor(self.dispatcher, metrics)
        self.app = App(self.dispatcher, self.supervisor, metrics, Settings("net", deadline_s, keys))
        self.wanted = Wanted(
            bundle=None,
            target=TARGET,
            num_replicas=0,
            cores=((0,),),
            num_threads=1,
            name="net",
            asked=asked,
            lone_cores=(),
            environment={},
            log_format="text",
        )
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    def prepared(self, wanted: Wanted) -> Prepared:
        return Prepared(TARGET, self.service, load_module(self.service).eval(), b"", read_environment())

    def start(self) -> None:
        self.run(self.supervisor.start(self.wanted))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.get(path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.http.post(path, **options))

    def count(self, outcome: str, route: str = PREDICT) -> float:
        """How many requests the metrics say ended so."""
        sample = f'torchproof_requests_total{{outcome="{outcome}",route="{route}"}} '
        (line,) = [line for line in self.get("/metrics").text.splitlines() if line.startswith(sample)]
        return float(line.removeprefix(sample))

    def close(self) -> None:
        self.run(self.http.aclose())
        self.run(self.supervisor.close())
        self._runner.close()


@pytest.fixture
def client_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """The app with a service of the test's own, run eagerly; without ``start`` the model is not loaded yet."""
    clients: list[Client] = []

    def made(
        service: Service,
        *,
        asked: CapsAsked | None = None,
        max_queue: int = 8,
        deadline_s: float = DEADLINE_S,
        keys: Path | None = None,
        start: bool = True,
    ) -> Client:
        client = Client(service, asked=asked or CapsAsked(), max_queue=max_queue, deadline_s=deadline_s, keys=keys)
        clients.append(client)
        monkeypatch.setattr("torchproof.serve.inprocess._prepare", client.prepared)
        if start:
            client.start()
        return client

    yield made
    for client in clients:
        client.close()


class ServerProcess:
    """``torchproof serve`` in a process of its own, killed at the end of the block.

    Args:
        main: Python that takes the place of ``python -m torchproof``.
    """

    def __init__(self, *arguments: str, cwd: Path | None = None, main: str | None = None, **environ: str) -> None:
        self._log = tempfile.TemporaryFile("a+")  # appended to, so that to read moves no writer  # noqa: SIM115
        program = ["-m", "torchproof"] if main is None else ["-c", main]
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *arguments, "--port", "0", "--format", "json"],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(SRC), **environ},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._log.close()

    def ready(self) -> dict[str, Any]:
        """The line that it prints when it is ready; fails with its log when it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(DEADLINE_S)
            pytest.fail(self.log())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log(self) -> str:
        """What it has written to stderr until now."""
        self._log.seek(0)
        return self._log.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, and stderr."""
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, self.log()


@pytest.fixture(scope="session")
def start() -> type[ServerProcess]:
    return ServerProcess
