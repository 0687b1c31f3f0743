"""A run ends with the right rows and a bundle, whatever its candidates do."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchproof.bundle.read import open_bundle
from torchproof.errors import LimitsError, RefusedError
from torchproof.tune import TuneRequest, tune
from torchproof.tune.building import Built
from torchproof.tune.candidates import Variant
from torchproof.tune.measuring import Measuring
from torchproof.tune.search import Search
from torchproof.types import Limits, Outcome, Proof, Trial

Ask = Callable[..., TuneRequest]
GIB = 1 << 30


def rows(proof: Proof) -> dict[str, tuple[Outcome, str]]:
    """Outcome and reason by runtime, the baseline left out."""
    return {t.candidate.runtime: (t.outcome, t.reason) for t in proof.trials if t.candidate.num_threads}


def trials_running() -> list[int]:
    """Process ids of the trials under this process, the oldest (the reference) first."""
    found = [p for p in psutil.Process().children() if "torchproof.tune.jobs:Trial" in p.cmdline()]
    return [p.pid for p in sorted(found, key=lambda p: p.create_time())]


def test_a_run_with_every_kind_of_broken_candidate(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each becomes a row with what happened to it, and the one that is right and fast wins."""
    request = ask(
        "crash_load=CrashInLoad",
        "crash_run=CrashInRun",
        "crash_build=CrashInBuild",
        "hang_load=HangInLoad",
        "hang_run=HangInRun",
        "export=ExportFails",
        "refuses=ExportRefuses",
        "load_refuses=LoadRefuses",
        "scaled=Scaled",
        "infinite=NotFinite",
        "noisy=Noisy",
        "eater=Eater",
        "fast=Fast",
        "hang_build=HangInBuild",
        budget_s=150.0,
        trial_timeout_s=8.0,
    )
    monkeypatch.setattr("torchproof.tune.search.BUILD_SHARE", 0.1)
    monkeypatch.setattr("torchproof.tune.search.MEMORY_SHARE", 0.75 * GIB / psutil.virtual_memory().total)
    proof = tune(request)
    found = rows(proof)
    said = {name: reason for name, (_, reason) in found.items()}
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "eager": "measured",
        "crash_load": "crashed",
        "crash_run": "crashed",
        "crash_build": "crashed",
        "hang_load": "timed out",
        "hang_run": "timed out",
        "export": "not built",
        "refuses": "not built",
        "load_refuses": "failed",
        "scaled": "measured",
        "infinite": "measured",
        "noisy": "measured",
        "eater": "out of memory",
        "fast": "measured",
        "hang_build": "not built",
    }
    assert all(said[name].startswith("killed by SIGSEGV") for name in ("crash_load", "crash_run", "crash_build"))
    assert said["hang_load"] == "no answer in 8 s"
    assert said["hang_run"].startswith("no answer in ")  # how long it may take depends on how fast the reference is
    assert said["export"] == "RuntimeError: unsupported operator aten::magic"
    assert said["refuses"] == said["load_refuses"] == "the exporter saw a list where eager saw a tensor"
    assert said["eater"].startswith("ended at")
    assert "a larger --budget" in said["hang_build"]

    golden = {t.candidate.runtime: t.golden for t in proof.trials if t.golden is not None}
    assert golden["eager"].cos == pytest.approx(1.0)
    assert golden["scaled"].cos == pytest.approx(0.5)
    assert golden["infinite"].cos is None
    assert 0 < (golden["noisy"].cos or 0) < 0.999

    assert proof.plan.chosen.candidate.runtime == "fast"
    assert [c.candidate.label for c in proof.plan.runners_up] == ["eager, 1 thread"]
    assert proof.speedup is not None
    assert proof.speedup.verdict == "better"
    lost = {r.value.partition(",")[0]: r.reason for r in proof.plan.decisions[0].rejected}
    assert set(lost) == set(found) - {"fast"}
    assert "cos 0.5 < 0.999 on output" in lost["scaled"]
    assert "not finite" in lost["infinite"]
    assert lost["export"] == "not built: RuntimeError: unsupported operator aten::magic"

    assert open_bundle(request.output).proof.trials == proof.trials
    assert os.listdir(request.output.parent) == ["app.tp"]
    assert not list((request.output / "artifacts").rglob("half")), "what is left of a broken artifact is not shipped"
    assert trials_running() == []


def test_killed_trials_and_a_killed_reference(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., None]
) -> None:
    """A trial killed in the middle is a crashed row; the reference, killed twice between and within, comes back."""
    ready = tmp_path / "victim"
    monkeypatch.setenv("TORCHPROOF_TEST_VICTIM", str(ready))
    killed: list[str] = []

    def kill_victim() -> None:
        wait_for(ready.exists, "the victim never ran")
        pid = int(ready.read_text())
        assert pid in trials_running()[1:]
        killed.append("victim")
        os.kill(pid, signal.SIGKILL)

    def progress(text: str, share: float) -> None:
        if text == "measuring fast":
            (reference,) = trials_running()
            killed.append("reference")
            os.kill(reference, signal.SIGKILL)

    open_baseline = Measuring.open_baseline

    def open_and_kill(self: Measuring) -> Any:
        opened = open_baseline(self)
        if "beside the baseline" not in killed:
            killed.append("beside the baseline")
            os.kill(self.reference.process.pid, signal.SIGKILL)
        return opened

    monkeypatch.setattr(Measuring, "open_baseline", open_and_kill)
    killer = threading.Thread(target=kill_victim)
    killer.start()
    request = ask("victim=Victim", "fast=Fast", budget_s=60.0, trial_timeout_s=30.0)
    proof = tune(request, progress)
    killer.join()
    assert killed == ["beside the baseline", "victim", "reference"]
    outcome, reason = rows(proof)["victim"]
    assert outcome == "crashed"
    assert reason.startswith("killed by SIGKILL")
    assert [t.outcome for t in proof.trials] == ["measured", "measured", "crashed", "measured"]
    assert proof.plan.chosen.candidate.runtime == "fast"
    assert open_bundle(request.output).proof.plan == proof.plan
    assert trials_running() == []


def test_a_reference_that_is_killed_again_and_again_ends_the_run(ask: Ask) -> None:
    """With a reason, and without a bundle."""

    class KillReference(Measuring):
        def trials(self, *arguments: Any, **options: Any) -> Any:
            os.kill(self.reference.process.pid, signal.SIGKILL)
            return super().trials(*arguments, **options)

    request = ask("fast=Fast", budget_s=20.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torchproof.tune.search.Measuring", KillReference)
        with pytest.raises(RefusedError, match="ended twice"):
            tune(request)
    assert os.listdir(request.output.parent) == []
    assert trials_running() == []


def test_a_budget_that_reaches_nothing_gives_a_bundle_and_a_failed_search_leaves_it(ask: Ask) -> None:
    """Plain eager is always measured, the rest says what it would have taken; then limits that nothing meets."""
    request = ask("hangs=HangInBuild", "fast=Fast", budget_s=0.5)
    proof = tune(request)
    found = rows(proof)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "eager": "measured",
        "hangs": "not built",
        "fast": "not reached",
    }
    assert all("a larger --budget" in found[name][1] for name in ("hangs", "fast"))
    assert proof.plan.chosen.candidate.label == "eager, 1 thread"
    assert open_bundle(request.output).proof.trials == proof.trials

    before = (request.output / "proof.json").read_bytes()
    with pytest.raises(LimitsError) as caught:
        tune(ask("scaled=Scaled", budget_s=30.0, limits=Limits(max_memory_bytes=1 << 20)))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "nothing met the limits",
        "eager, 1 thread",
        "scaled, 1 thread",
    ]
    assert all("MiB > 1 MiB" in line for line in lines[1:])
    assert "cos 0.5 < 0.999 on output" in lines[2]
    assert (request.output / "proof.json").read_bytes() == before
    assert os.listdir(request.output.parent) == ["app.tp"]
    open_bundle(request.output)


@pytest.mark.parametrize(("limits", "groups"), [(Limits(), [[1, 2]]), (Limits(max_cold_start_s=9.0), [[1], [2]])])
def test_a_limited_cold_start_is_measured_at_every_thread_count(
    ask: Ask, tmp_path: Path, limits: Limits, groups: list[list[int]]
) -> None:
    """A row whose threads were only switched has none, and would slip past the limit."""
    seen: list[list[int]] = []

    class Stub:
        def trials(self, variant: Variant, built: Built, threads: list[int], *, budget_s: float) -> list[Trial]:
            seen.append(threads)
            return []

    search = Search(ask(limits=limits), tmp_path, lambda text, share: None)
    variant = Variant("torchscript", "", "float32")
    search.built[variant] = Built(tmp_path)
    search.measuring = Stub()  # type: ignore[assignment]
    search.try_one(variant, [1, 2], budget_s=1.0)
    assert seen == groups
