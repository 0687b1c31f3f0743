"""The chosen plan against the baseline, on four models: ratios of interleaved runs, with the cost of the search.

Each model is tuned with the default budget. Then the finished bundle and the eager model as people serve it (default
threads, `eval()`, `torch.no_grad()`) run in two processes, block by block in turns, one request at a time. Written to
bench/results/. With names as arguments only those models run: `python bench/tune.py mlp cnn`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchproof.bundle.read import GOLDEN, open_bundle
from torchproof.bundle.replay import load_choice
from torchproof.machine.threads import thread_environment
from torchproof.measure.process import FreshProcess
from torchproof.render import units
from torchproof.stats import compare_paired, quantile
from torchproof.target import golden
from torchproof.target.resolve import resolve
from torchproof.target.rows import FlatModule, Run, run_rows
from torchproof.target.subject import load_module, open_service
from torchproof.tune import TuneRequest, tune
from torchproof.types import Comparison, Environment, Proof, Record, encode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / "build" / "bench"
MODELS = {
    "minilm": "examples/minilm.py:MiniLM",
    "cnn": "examples/cnn.py:cnn",
    "lstm": "examples/lstm.py:LSTM",
    "mlp": "examples/mlp.py:mlp",
}
NUM_PAIRS = 64
BLOCK_S = 0.1
TIMEOUT_S = 120.0


class Row(Record):
    """One model's result.

    Attributes:
        load: the machine's 1-minute load average when the pairs were taken.
        p50_ratio: median call of the baseline over that of the plan, from the same pairs.
    """

    model: str
    chosen: str
    error_cos: float | None
    comparison: Comparison
    p50_ratio: float
    p99_ratio: float
    load: float
    search_s: float


class Results(Record):
    """What a run of this file stores."""

    created: str
    environment: Environment
    rows: tuple[Row, ...]


class Timed:
    """Runs in a fresh process: the plan from its bundle, or the baseline."""

    run: Run

    def plan(self, bundle: str) -> int:
        """Loads the chosen plan; the number of rows there are to time."""
        opened = open_bundle(Path(bundle))
        self.run = load_choice(opened, open_service(opened.target), opened.proof.plan.chosen)
        return self._rows(bundle)

    def baseline(self, bundle: str) -> int:
        """Loads the eager model as people serve it; the number of rows there are to time."""
        opened = open_bundle(Path(bundle))
        flat = FlatModule(load_module(open_service(opened.target), opened.weights), opened.proof.signature).eval()

        def run(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                return dict(zip(flat.output_names, flat(*batch.values()), strict=True))

        self.run = run
        return self._rows(bundle)

    def _rows(self, bundle: str) -> int:
        self.signature = open_bundle(Path(bundle)).proof.signature
        self.rows = golden.load(Path(bundle) / GOLDEN)[0]
        return len(self.rows)

    def time(self, rows: list[int], repeats: int) -> list[float]:
        """Seconds of each call, after one untimed one."""
        run_rows(self.run, [self.rows[rows[0]]], self.signature)
        seconds = []
        for i in rows * repeats:
            start = time.perf_counter()
            run_rows(self.run, [self.rows[i]], self.signature)
            seconds.append(time.perf_counter() - start)
        return seconds


def measure(name: str, bundle: Path, proof: Proof) -> Row:
    chosen = proof.plan.chosen.candidate
    path = {"PYTHONPATH": str(ROOT / "bench")}
    with (
        FreshProcess("tune:Timed", environment=path) as plain,
        FreshProcess("tune:Timed", environment=path | thread_environment(chosen.num_threads)) as served,
    ):
        plain.call("baseline", timeout_s=TIMEOUT_S, bundle=str(bundle))
        num_rows = served.call("plan", timeout_s=TIMEOUT_S, bundle=str(bundle))
        pilot = sum(served.call("time", timeout_s=TIMEOUT_S, rows=list(range(num_rows)), repeats=1)) / num_rows
        per_block = min(num_rows, max(1, round(BLOCK_S / pilot)))
        repeats = max(1, round(BLOCK_S / (pilot * per_block)))
        strata = -(-num_rows // per_block)
        calls: dict[str, list[list[float]]] = {"plain": [], "served": []}
        for number in range(NUM_PAIRS):
            turn = [("plain", plain), ("served", served)]
            for key, process in turn if number % 2 else reversed(turn):
                rows = list(range(number % strata, num_rows, strata))
                calls[key].append(process.call("time", timeout_s=TIMEOUT_S, rows=rows, repeats=repeats))
    comparison = compare_paired(
        [sum(block) for block in calls["plain"]],
        [sum(block) for block in calls["served"]],
        names=(proof.baseline, chosen.label),
    )
    trial = next(t for t in proof.trials if t.candidate == chosen)
    flat = {key: [second for block in blocks for second in block] for key, blocks in calls.items()}
    return Row(
        model=name,
        chosen=chosen.label,
        error_cos=trial.golden.cos if trial.golden else None,
        comparison=comparison,
        p50_ratio=_ratio(flat, 0.5),
        p99_ratio=_ratio(flat, 0.99),
        load=os.getloadavg()[0],
        search_s=proof.search_s,
    )


def _ratio(calls: dict[str, list[float]], q: float) -> float:
    return quantile(calls["plain"], q) / quantile(calls["served"], q)


def table(results: Results) -> str:
    e = results.environment
    lines = [
        "# The chosen plan against the eager baseline",
        "",
        f"Written by `make bench` on {results.created}: {e.cpu_model}, {e.num_cores} cores, torch "
        f"{e.versions.get('torch')}, Python {e.python}. Ratios of {NUM_PAIRS} interleaved blocks, one request "
        "at a time; above 1 the plan is faster. The interval is the median's, at 98.75%. Machines differ: run yours.",
        "",
        "| model | plan | speed-up | p50 ratio | p99 ratio | cosine | load | search |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        c = row.comparison
        cos = f"{row.error_cos:.6f}" if row.error_cos is not None else ""
        lines.append(
            f"| {row.model} | {row.chosen} | {units.ratio(c.ratio, c.low, c.high)} {c.verdict} | {row.p50_ratio:.2f} | "
            f"{row.p99_ratio:.2f} | {cos} | {row.load:.1f} | {units.seconds(row.search_s)} |"
        )
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    rows = []
    environment: Any = None
    for name in names or MODELS:
        bundle = WORK / f"{name}.tp"
        print(f"tuning {name}", flush=True)
        proof = tune(TuneRequest(target=resolve(MODELS[name]), output=bundle))
        environment = proof.environment
        row = measure(name, bundle, proof)
        rows.append(row)
        c = row.comparison
        print(f"  {row.chosen}: {units.ratio(c.ratio, c.low, c.high)} ({c.verdict})", flush=True)
    results = Results(created=time.strftime("%Y-%m-%d"), environment=environment, rows=tuple(rows))
    if not names:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tune.json").write_text(encode(results))
        (RESULTS / "tune.md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
