"""What the fresh processes of a search do: prepare, build, trial, verify. Each class answers ``FreshProcess.call``."""

import gc
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchproof.bundle.code import user_files
from torchproof.bundle.read import open_bundle
from torchproof.bundle.replay import ascending, load_choice, replay, run_batched
from torchproof.bundle.write import disk_errors
from torchproof.check import audit
from torchproof.errors import TargetError, UserCodeError
from torchproof.runtimes import Source, open_runtime
from torchproof.runtimes.eager import Eager
from torchproof.target import golden
from torchproof.target.respond import respond
from torchproof.target.rows import Run, batches, run_rows
from torchproof.target.service import Service
from torchproof.target.subject import (
    encode_without_load,
    load_module,
    open_service,
    sample_requests,
    save_weights,
)
from torchproof.target.usercode import user_code
from torchproof.types import Choice, Precision, Signature, Target

NUM_TIMED_ROWS = 64  # spread over the traffic's sizes; every trial times the same ones
# Between two processes' turns: a default OpenMP runtime spins for some ms after its last parallel region.
SETTLE_S = 0.01
WARM_UP_S = 2.0


class Prepare:
    """Checks the target and writes what every other process works from."""

    def run(self, target: dict[str, Any], traffic: str | None, folder: str) -> dict[str, Any]:
        """Audits the target; writes ``golden.safetensors``, ``rows.safetensors`` and ``weights.safetensors``.

        Returns:
            the check's report, the golden set's precision, the user's files, whether there are weights, and whether
            ``encode`` works only after ``load()``.
        """
        out = Path(folder)
        done = audit(msgspec.convert(target, Target), Path(traffic) if traffic else None)
        module = done.module.eval()
        rows = done.subject.rows
        picked = [rows[i] for i in golden.spread(rows, done.signature)]
        references, precision = golden.reference(module, picked, done.signature)
        timed = [rows[i] for i in golden.spread(rows, done.signature, NUM_TIMED_ROWS)]
        with disk_errors(out):
            golden.save(out / "golden.safetensors", picked, references)
            golden.save(out / "rows.safetensors", timed, [])
            has_weights = save_weights(module, out / "weights.safetensors")
        service = done.subject.service
        return {
            "report": msgspec.to_builtins(done.report),
            "precision": precision,
            "num_golden_rows": len(picked),
            "weights": has_weights,
            "code": [str(path) for path in user_files(done.report.target, service.files)],
            "encode_needs_load": done.encode_needs_load,
            "num_timed_rows": len(timed),
        }


class Model:
    """A target in a fresh process, with what a runtime builds and loads from. Base of ``Build`` and ``Trial``."""

    def open(self, spec: dict[str, Any]) -> None:
        """Args: spec, see ``search.Workspace.spec``."""
        self.target = msgspec.convert(spec["target"], Target)
        self.signature = msgspec.convert(spec["signature"], Signature)
        self.folder = Path(spec["folder"])
        weights = self.folder / "weights.safetensors" if spec["weights"] else None
        self.service: Service = open_service(self.target)
        self.rows = golden.load(self.folder / "rows.safetensors")[0]
        onnx = Path(self.target.path or "") if self.target.kind == "onnx" else None
        self.source = Source(
            module=lambda: load_module(self.service, weights).eval(),
            signature=self.signature,
            rows=ascending(self.rows, self.signature),
            batching=spec["batching"],
            padding=spec["padding"],
            max_batch_size=spec["max_batch_size"],
            onnx_path=onnx,
        )


class Build(Model):
    """Builds one runtime's artifacts."""

    def run(
        self, spec: dict[str, Any], runtime: str, precision: Precision, folder: str, built: dict[Precision, str],
        num_threads: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Writes one artifact into ``folder``; what is left of a broken one is removed."""
        if not hasattr(self, "source"):
            self.open(spec)
        torch.set_num_threads(num_threads)
        out = Path(folder)
        out.mkdir(parents=True)
        start = time.perf_counter()
        try:
            compiled = open_runtime(runtime).build(
                self.source, precision, out, {name: Path(path) for name, path in built.items()}
            )
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
        return {
            "build_s": time.perf_counter() - start,
            "compiled": msgspec.to_builtins(compiled),
            "artifact_bytes": sum(p.stat().st_size for p in out.rglob("*") if p.is_file()),
        }


class Trial(Model):
    """One candidate: loads it the way ``serve`` does, then answers questions about it."""

    run: Run

    def load(
        self, spec: dict[str, Any], runtime: str, precision: Precision, folder: str, num_threads: int
    ) -> list[str]:
        """Loads the artifact and answers one request; the caller's clock runs from the start of the process.

        Returns:
            the names of the outputs.
        """
        self.open(spec)
        self.runtime = open_runtime(runtime)
        self.precision, self.artifact = precision, Path(folder)
        if spec["encode_needs_load"] and not self.runtime.needs_module:
            load_module(self.service)
            gc.collect()
        self.run = self.runtime.load(self.source, precision, self.artifact, num_threads)
        (row,) = run_rows(self.run, self.rows[:1], self.signature)
        return list(row)

    def load_baseline(self, spec: dict[str, Any]) -> list[str]:
        """The eager model as people serve it: default threads, ``eval()`` and ``torch.no_grad()``."""
        self.open(spec)
        self.runtime, self.precision, self.artifact = Eager(), "float32", Path()
        flat = self.source.flat()

        def run(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                return dict(zip(flat.output_names, flat(*batch.values()), strict=True))

        self.run = run
        (row,) = run_rows(self.run, self.rows[:1], self.signature)
        return list(row)

    def set_threads(self, num_threads: int) -> None:
        """The same artifact with another number of intra-op threads."""
        self.run = self.runtime.with_threads(self.run, self.source, self.precision, self.artifact, num_threads)

    def golden(self, batch_size: int, padding: bool) -> dict[str, Any]:
        """The golden set through the candidate; its worst error."""
        inputs, references = golden.load(self.folder / "golden.safetensors")
        outputs = run_batched(self.run, inputs, self.signature, batch_size, padding=padding)
        names = [spec.name for spec in self.signature.outputs]
        return msgspec.to_builtins(golden.compare(outputs, references, names))  # type: ignore[no-any-return]

    def time(self, rows: Sequence[int], repeats: int) -> list[float]:
        """Seconds of each call, one row at a time, after a pause and as much untimed work: threads have to wake up."""
        time.sleep(SETTLE_S)
        awake = time.perf_counter() + SETTLE_S
        run_rows(self.run, [self.rows[rows[0]]], self.signature)
        while time.perf_counter() < awake:
            run_rows(self.run, [self.rows[rows[0]]], self.signature)
        seconds = []
        for _ in range(repeats):
            for i in rows:
                start = time.perf_counter()
                run_rows(self.run, [self.rows[i]], self.signature)
                seconds.append(time.perf_counter() - start)
        return seconds

    def throughput(self, batch_size: int, padding: bool, seconds: float, max_rates: int) -> list[float]:
        """Requests per second with rows sharing forwards, over all timed rows: once, and again for so long.

        Untimed before: each batch once, as a runtime prepares itself for each shape that it meets; of a slow model as
        many as ``WARM_UP_S`` allows.
        """
        groups = [
            [self.rows[i] for i in group] for group in batches(self.rows, self.signature, batch_size, padding=padding)
        ]
        end = time.perf_counter() + WARM_UP_S
        for group in reversed(groups):  # the largest first
            run_rows(self.run, group, self.signature)
            if time.perf_counter() > end:
                break
        rates: list[float] = []
        end = time.perf_counter() + seconds
        while not rates or (time.perf_counter() < end and len(rates) < max_rates):
            start = time.perf_counter()
            for group in groups:
                run_rows(self.run, group, self.signature)
            rates.append(len(self.rows) / (time.perf_counter() - start))
        return rates

    def peak_memory_bytes(self) -> int:
        """The largest resident memory that this process has had.

        From the kernel's own mark: ``ru_maxrss`` starts at what the parent had when it forked.
        """
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024  # KiB


class Verify:
    """The first thing that ``serve`` does, done by ``tune`` on the bundle that it is about to hand over."""

    def run(self, bundle: str) -> list[dict[str, Any]]:
        """Replays the golden set through the bundle's chosen plan, from the bundle's own code and artifacts."""
        opened = open_bundle(Path(bundle))
        choice: Choice = opened.proof.plan.chosen
        service = open_service(opened.target)
        run = load_choice(opened, service, choice)
        self._answer_a_sample(service, opened.proof.signature, run)
        return [msgspec.to_builtins(seen) for seen in replay(opened, run, choice)]

    def _answer_a_sample(self, service: Service, signature: Signature, run: Run) -> None:
        """The first sample through ``encode``, the artifact and ``decode``, which may miss files that they read."""
        try:
            _, ((what, request), *_) = sample_requests(service, None)
        except (TargetError, UserCodeError):
            return  # the requests came from a traffic file, or from data that stays where it is: not needed to serve
        if encode_without_load(service, request):
            load_module(service)
        with user_code(f"answering {what}"):
            respond(service, signature, run, request)
