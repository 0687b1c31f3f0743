"""The first choice that runs here is served, after its golden set; whatever isn't right is refused."""

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch

from torchproof.bundle.read import GOLDEN, PROOF, Bundle, open_bundle
from torchproof.errors import BundleError, RefusedError, UserCodeError
from torchproof.runtimes import RUNTIMES
from torchproof.serve.load import Loaded, load, prepare
from torchproof.target import golden
from torchproof.target.resolve import resolve
from torchproof.types import Choice, Finding

BundleMaker = Callable[..., Bundle]
ELSEWHERE = ("sve", "amx_int8")  # no CPU has both


def first(bundle: Bundle, num_threads: int = 0) -> Loaded:
    """As the first replica loads it."""
    return load(prepare(bundle), num_threads, None)


def test_the_chosen_one_is_served_and_replayed_at_both_batch_sizes(make_bundle: BundleMaker) -> None:
    loaded = first(make_bundle("torchscript", "eager"))
    assert loaded.choice.candidate.label == "torchscript, 1 thread"
    assert [(seen.batch_size, seen.num_rows, seen.within) for seen in loaded.golden] == [(1, 3, True), (2, 3, True)]
    assert loaded.findings == ()
    assert len(loaded.requests) == len(loaded.rows) == 3
    assert [len(row["x"]) for row in loaded.rows] == [2, 3, 6]
    assert loaded.finite


def test_missing_cpu_flags_fall_back_before_anything_is_loaded(make_bundle: BundleMaker) -> None:
    bundle = make_bundle("torchscript", "eager", cpu_flags={"torchscript": ELSEWHERE})
    (bundle.path / "artifacts/torchscript/model.ts").write_bytes(b"loading this would raise")
    loaded = first(bundle)
    assert loaded.choice.candidate.runtime == "eager"
    (finding,) = loaded.findings
    assert (finding.code, finding.severity) == ("TP705", "warning")
    assert finding.evidence["fallback"] == "eager, 1 thread"
    assert finding.evidence["error"] == ""
    assert "sve" in str(finding.evidence["missing_cpu_flags"])


def test_a_load_that_raises_falls_back(make_bundle: BundleMaker) -> None:
    bundle = make_bundle("torchscript", "eager")
    (bundle.path / "artifacts/torchscript/model.ts").write_bytes(b"no archive")
    loaded = first(bundle)
    assert loaded.choice.candidate.runtime == "eager"
    (finding,) = loaded.findings
    assert finding.code == "TP705"
    assert str(finding.evidence["error"]).startswith("RuntimeError: ")


def test_missing_modules_and_unknown_runtimes_fall_back(
    make_bundle: BundleMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle("of the future", "torchscript", "eager")
    reasons = {"torchscript": "needs onnx: pip install 'torchproof[onnx]'"}
    monkeypatch.setattr("torchproof.serve.load.skip_reason", lambda runtime, *_, **__: reasons.get(runtime.name, ""))
    loaded = first(bundle)
    assert [finding.evidence["error"] for finding in loaded.findings] == [
        "this torchproof has no runtime 'of the future'",
        "needs onnx: pip install 'torchproof[onnx]'",
    ]


def test_nothing_that_loads_is_refused_with_every_reason(make_bundle: BundleMaker) -> None:
    bundle = make_bundle("torchscript", "eager", cpu_flags={"torchscript": ELSEWHERE, "eager": ("sve", "amx_int8")})
    with pytest.raises(RefusedError) as caught:
        first(bundle)
    head, *reasons = str(caught.value).splitlines()
    assert head == "TP705: no choice of the plan runs on this machine:"
    assert [reason.partition(":")[0] for reason in reasons] == ["torchscript, 1 thread", "eager, 1 thread"]
    assert all("this CPU lacks" in reason for reason in reasons)


def test_a_different_golden_set_is_refused(make_bundle: BundleMaker, sealed: Callable[[Path], None]) -> None:
    bundle = make_bundle("eager", "torchscript")
    inputs, outputs = golden.load(bundle.path / GOLDEN)
    outputs[1]["output"] = outputs[1]["output"] * 1.5
    golden.save(bundle.path / GOLDEN, inputs, outputs)
    sealed(bundle.path)
    with pytest.raises(RefusedError) as caught:
        first(open_bundle(bundle.path))
    message = str(caught.value)
    assert "TP704" in message
    for part in ("(eager, 1 thread)", "output differs", "cos is", "at least 0.999", "batch size 1", "batch size 2"):
        assert part in message


def test_a_golden_set_that_cannot_be_replayed_is_refused(
    make_bundle: BundleMaker, sealed: Callable[[Path], None]
) -> None:
    bundle = make_bundle("eager")
    inputs, outputs = golden.load(bundle.path / GOLDEN)
    golden.save(bundle.path / GOLDEN, inputs, [{"another": row["output"]} for row in outputs])
    sealed(bundle.path)
    with pytest.raises(RefusedError, match="the golden set could not be replayed: KeyError"):
        first(open_bundle(bundle.path))


def test_a_plan_made_elsewhere_is_served_with_a_finding(make_bundle: BundleMaker) -> None:
    loaded = first(make_bundle("eager", holds_while={"torch": "2.0.0", "num_cores": "4096"}))
    (finding,) = loaded.findings
    assert (finding.code, finding.severity, finding.where) == ("TP707", "warning", loaded.target)
    assert f"torch 2.0.0 -> {version('torch')}" in finding.message
    assert "num_cores 4096 -> " in finding.message


@pytest.mark.parametrize("holds_while", [None, {}, {"largest length": "1"}, {"openvino": "2030.1"}])
def test_a_plan_made_here_gives_no_finding(holds_while: dict[str, str] | None, make_bundle: BundleMaker) -> None:
    """None: every fact, as tune stores them here. What can't be compared at the start is no difference."""
    assert first(make_bundle("eager", holds_while=holds_while)).findings == ()


NEEDS_LOAD = """
import torch
import torchproof as tp

class Sum(tp.Service):
    variable_dims = {"input": {0: "length"}}
    def load(self):
        self.scale = 2.0
        return torch.nn.Softmax(-1)
    def encode(self, request):
        return SAMPLE_CODE
    def decode(self, outputs, request):
        return DECODE_CODE
    def samples(self):
        return SAMPLES
"""


def needing(encode: str, decode: str, samples: str = "[[1.0, 2.0], [1.0, 2.0, 3.0]]") -> str:
    return NEEDS_LOAD.replace("SAMPLE_CODE", encode).replace("DECODE_CODE", decode).replace("SAMPLES", samples)


@pytest.mark.parametrize(
    ("encode", "decode"),
    [("torch.tensor(request) * self.scale", "outputs"), ("torch.tensor(request)", "outputs * self.scale")],
)
def test_what_needs_load_gets_it_and_a_finding(encode: str, decode: str, make_bundle: BundleMaker) -> None:
    loaded = first(make_bundle("torchscript", code=needing(encode, decode)))
    (finding,) = loaded.findings
    assert finding.code == "TP706"
    assert finding.evidence["error"] == "AttributeError: 'Sum' object has no attribute 'scale'"
    assert loaded.service.scale == 2.0  # type: ignore[attr-defined]


def test_a_runtime_that_calls_load_anyway_gives_no_finding(make_bundle: BundleMaker) -> None:
    code = needing("torch.tensor(request) * self.scale", "outputs")
    assert first(make_bundle("eager", code=code)).findings == ()


def test_without_samples_the_plan_knows_whether_load_is_needed(make_bundle: BundleMaker) -> None:
    code = needing(
        "torch.tensor(request) * self.scale", "outputs", "[[1.0], [2.0, 1.0]] if 'src' in __file__ else open('gone')"
    )
    known = Finding(
        code="TP706",
        name="encode-needs-load",
        severity="warning",
        where="app.py",
        message="",
        evidence={"error": "AttributeError: seen by check"},
        fix="",
    )
    loaded = first(make_bundle("torchscript", code=code, findings=(known,)))
    assert loaded.requests == ()
    assert [finding.evidence["error"] for finding in loaded.findings] == ["AttributeError: seen by check"]


def test_a_service_that_cannot_answer_its_own_sample_is_not_served(make_bundle: BundleMaker) -> None:
    code = needing("torch.tensor(request)", "1 / 0")
    with pytest.raises(UserCodeError, match=r"answering the first of samples\(\) raised ZeroDivisionError") as caught:
        first(make_bundle("torchscript", code=code))
    assert "return 1 / 0" in caught.value.trace


def test_a_bare_target_runs_eagerly_in_eval_mode(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn, ones\n"
        "def net():\n    return nn.Sequential(nn.Linear(3, 1), nn.Dropout(1.0)).train(), [ones(4, 3)]\n"
    )
    before = torch.get_num_threads()
    loaded = load(prepare(resolve(f"{tmp_path}/net.py:net")), 1, None)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert loaded.choice.candidate.label == "eager, 1 thread"
    assert loaded.golden == ()
    (output,) = loaded.run({"input": torch.ones(1, 3)}).values()
    assert output.item() != 0  # a dropout of everything drops nothing
    assert output.is_inference()


@pytest.mark.parametrize("runtime", sorted(RUNTIMES.keys() - {"inductor", "aotinductor"}))
def test_starting_changes_no_file_of_the_bundle(runtime: str, make_bundle: BundleMaker) -> None:
    bundle = make_bundle(runtime)
    proof = (bundle.path / PROOF).read_bytes()
    assert first(bundle).choice.candidate.runtime == runtime
    assert msgspec.json.decode(proof)["plan"]["chosen"]["candidate"]["runtime"] == runtime
    open_bundle(bundle.path)  # its checksums still fit


def test_the_other_replicas_take_the_first_ones_choice_and_prove_the_canary_only(make_bundle: BundleMaker) -> None:
    bundle = make_bundle("torchscript", "eager", holds_while={"torch": "2.0.0"})
    (bundle.path / "artifacts/torchscript/model.ts").write_bytes(b"no archive")
    prepared = prepare(bundle)
    loaded = load(prepared, 0, None)
    assert [finding.code for finding in loaded.findings] == ["TP705", "TP707"]
    again = load(prepared, 0, loaded.choice)
    assert again.choice == loaded.choice
    assert (again.findings, again.golden) == ((), ())  # said once
    assert again.canary.look() == ""


def test_a_replica_that_answers_wrongly_never_joins(make_bundle: BundleMaker) -> None:
    """Its canary: a row of the golden set, though the set is not replayed for any but the first one."""
    prepared = prepare(make_bundle("eager"))
    loaded = load(prepared, 0, None)
    assert prepared.module is not None
    with torch.no_grad():
        for parameter in prepared.module.parameters():
            parameter.neg_()
    with pytest.raises(RefusedError, match="output 'output' of a row whose answer is known has cos"):
        load(prepared, 0, loaded.choice)


def test_a_bundle_that_was_replaced_is_not_mixed_with_the_old_one(
    make_bundle: BundleMaker, sealed: Callable[[Path], None]
) -> None:
    bundle = make_bundle("eager")
    prepared = prepare(bundle)
    choice = load(prepared, 0, None).choice
    (bundle.path / "code/app.py").write_text((bundle.path / "code/app.py").read_text() + "# newer")
    sealed(bundle.path)
    with pytest.raises(BundleError, match="was replaced by another bundle"):
        load(prepared, 0, choice)


@pytest.mark.parametrize(("planned", "most"), [(1, 4), (2, 1), (0, 1)])
def test_threads_are_never_more_than_planned_nor_than_the_cores(
    planned: int, most: int, make_bundle: BundleMaker
) -> None:
    """More would be what nobody measured, or more than a replica has room for."""
    bundle = make_bundle("eager")
    chosen = bundle.proof.plan.chosen
    candidate = msgspec.structs.replace(chosen.candidate, num_threads=planned)
    plan = msgspec.structs.replace(
        bundle.proof.plan, chosen=msgspec.structs.replace(chosen, candidate=candidate), runners_up=()
    )
    planning = dataclasses.replace(bundle, proof=msgspec.structs.replace(bundle.proof, plan=plan))
    assert first(planning, most).choice.candidate.num_threads == 1


MIXES = """
from torch import nn, rand
class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)
class Row(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)
def mean():
    return Mean(), [rand(1, 3) for _ in range(4)]
def row():
    return Row(), [rand(1, n) for n in (3, 3, 5)]
"""


def test_a_bare_targets_requests_share_forwards_only_where_rows_stay_apart(tmp_path: Path) -> None:
    """By check's probes: a mean over the batch would mix them; one over the row changes with padding only."""
    (tmp_path / "net.py").write_text(MIXES)

    def choice(name: str) -> Choice:
        return load(prepare(resolve(f"{tmp_path}/net.py:{name}")), 1, None).choice

    assert (choice("mean").max_batch_size, choice("mean").padding) == (1, False)
    assert (choice("row").max_batch_size, choice("row").padding) == (32, False)
