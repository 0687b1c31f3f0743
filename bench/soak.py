"""Mixed load with random faults: is every request answered, and rightly? Does memory stay flat?

    python -m bench.soak [--minutes 10] [--seed 0] [REFERENCE]

Clients ask all-MiniLM-L6-v2, one request or a list of them; each answer is checked against the model called by itself.
Beside them replicas are killed and stopped, the bundle is reloaded, and other clients send what is too large, what is
malformed, and hang up. A refusal with Retry-After (429, 503) is tried again; anything else but the right answer counts.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from bench.load import _ask, _Connection, post
from bench.serve_requests import MIN_COS, Asked, _cos

HOST = "127.0.0.1"
NUM_CLIENTS = 12
FAULT_EVERY_S = (2.0, 6.0)
RECOVERY_S = 60.0  # after which a replica that is not back is itself a finding
FAULTS = ("kill", "stop", "reload", "oversized", "malformed", "disconnect")
ROOT = Path(__file__).parents[1]


class Soak:
    """One run against one server."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, seed: int) -> None:
        self.server = psutil.Process(process.pid)
        self.port = port
        self.rng = random.Random(seed)
        self.asked = Asked("minilm")
        self.seen: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.memory: list[tuple[float, int]] = []
        self.end = 0.0

    async def run(self, duration_s: float) -> None:
        self.end = time.monotonic() + duration_s
        clients = [self.client(random.Random(number)) for number in range(NUM_CLIENTS)]
        await asyncio.gather(self.faults(), self.watch(), *clients)

    async def client(self, rng: random.Random) -> None:
        pool: list[_Connection] = []
        while time.monotonic() < self.end:
            indices = [rng.randrange(len(self.asked.values)) for _ in range(rng.choice((1, 1, 1, 4)))]
            values = [self.asked.values[i] for i in indices]
            body = json.dumps(values if len(values) > 1 else values[0]).encode()
            start = time.monotonic()
            status, answer, error = await _ask(pool, HOST, self.port, post("/predict", body), 30.0)
            self.latencies.append(time.monotonic() - start)
            if status in (429, 503):
                self.seen[f"refused with {status}"] += 1
                await asyncio.sleep(0.2)
                continue
            if error or status != 200:
                self.seen[f"LOST: {error or status}"] += 1
                print("lost", status, error, answer[:300], file=sys.stderr)
                continue
            rows = json.loads(answer)
            rows = rows if isinstance(rows, list) else [rows]
            right = len(rows) == len(indices) and all(
                _cos(row["embedding"], self.asked.expected[i]) >= MIN_COS for row, i in zip(rows, indices, strict=True)
            )
            self.seen["right" if right else "WRONG"] += 1

    async def faults(self) -> None:
        while time.monotonic() < self.end - RECOVERY_S / 2:
            await asyncio.sleep(self.rng.uniform(*FAULT_EVERY_S))
            fault = self.rng.choice(FAULTS)
            await getattr(self, fault)()
            self.seen[f"fault: {fault}"] += 1
            if fault in ("kill", "stop", "reload"):
                await self.recovered()

    async def kill(self) -> None:
        if replicas := self.replicas():
            self.rng.choice(replicas).kill()

    async def stop(self) -> None:
        if replicas := self.replicas():
            self.rng.choice(replicas).suspend()

    async def reload(self) -> None:
        """Until it has passed: what ends a replica that still loads is another fault than these."""
        before = await self.metric('reloads_total{result="passed"}')
        os.kill(self.server.pid, signal.SIGHUP)
        deadline = time.monotonic() + RECOVERY_S
        while await self.metric('reloads_total{result="passed"}') == before:
            if time.monotonic() > deadline:
                self.seen["NOT RELOADED"] += 1
                return
            await asyncio.sleep(0.5)

    async def oversized(self) -> None:
        body = json.dumps({"text": "word " * 1_000_000}).encode()
        await self.expect(post("/predict", body), 413)

    async def malformed(self) -> None:
        bodies = (b"{", b"\xff\xfe", b"[]", b'{"text": 1}', b'{"other": "x"}', b"[" * 5000, b'{"text": null}')
        await self.expect(post("/predict", self.rng.choice(bodies)), 400, 422)

    async def expect(self, request: bytes, *statuses: int) -> None:
        status, answer, error = await _ask([], HOST, self.port, request, 30.0)
        if status not in (*statuses, 429, 503):
            self.seen[f"WRONG: {status or error} where {statuses} was due"] += 1
            print("not expected", status, error, answer[:300], file=sys.stderr)

    async def disconnect(self) -> None:
        for _ in range(5):
            _, writer = await asyncio.open_connection(HOST, self.port)
            request = post("/predict", json.dumps(self.rng.choice(self.asked.values)).encode())
            writer.write(request[: self.rng.randrange(len(request) + 1)])
            await writer.drain()
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def replicas(self) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.Error):
            for zygote in self.server.children():
                found += zygote.children()
        return found

    async def recovered(self) -> None:
        """Waits until as many replicas are ready as at the start."""
        deadline = time.monotonic() + RECOVERY_S
        await asyncio.sleep(0.5)  # until it is noticed
        while await self.metric('replicas{state="ready"}') != 2 or await self.metric("replicas{") != 2:
            if time.monotonic() > deadline:
                self.seen["NOT RECOVERED"] += 1
                return
            await asyncio.sleep(0.5)

    async def metric(self, name: str) -> float:
        """Sum of the series that begin so."""
        request = f"GET /metrics HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        _, answer, _ = await _ask([], HOST, self.port, request, 10.0)
        lines = answer.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"torchproof_{name}"))

    async def watch(self) -> None:
        while time.monotonic() < self.end:
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self.server, *self.server.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
            self.memory.append((time.monotonic(), total))
            await asyncio.sleep(2)

    def report(self) -> str:
        # Each quarter's median: a reload holds two models for a while.
        quarter = max(1, len(self.memory) // 4)
        sizes = [size / 2**20 for _, size in self.memory]
        memory = [f"{statistics.median(sizes[i : i + quarter]):.0f}" for i in range(0, quarter * 4, quarter)]
        latencies = sorted(self.latencies)
        lines = [f"{count:8,} {what}" for what, count in sorted(self.seen.items())]
        lines.append(f"latency s: median {statistics.median(latencies):.3f}, largest {latencies[-1]:.2f}")
        lines.append(f"memory MiB (PSS of all processes), medians of the quarters: {', '.join(memory)}")
        return "\n".join(lines)

    @property
    def failed(self) -> bool:
        return any(what.isupper() or what.startswith(("LOST", "WRONG", "NOT")) for what in self.seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reference", nargs="?", default=str(ROOT / "examples/minilm.py"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "torchproof", "serve", options.reference, "--port", "0", "--format", "json"]
    with subprocess.Popen([*command, "--replicas", "2"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            soak = Soak(process, int(url.rpartition(":")[2]), options.seed)
            asyncio.run(soak.run(60 * options.minutes))
        finally:
            process.terminate()
    print(soak.report())
    return int(soak.failed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    sys.exit(main())
