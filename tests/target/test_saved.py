"""Saved models are audited end to end: torch.export archives, TorchScript and ONNX.

Shape legend: B batch, L length.
"""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchproof.bundle.code import user_files
from torchproof.check import Audit, audit
from torchproof.errors import TargetError, TrafficError
from torchproof.target.resolve import resolve
from torchproof.types import Signature


class Net(nn.Module):
    """(B, L, 3) and (B, L) -> (B, L, 2), and (B, 2) that a mask keeps free of padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x).mT).mT
        kept = mask.unsqueeze(-1)
        return y, (y * kept).sum(1) / kept.sum(1)


class Tokens(nn.Module):
    """(B, L) int64 -> (B, 64): in float32 whatever it is cast to, once it is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 256)
        self.linear = nn.Linear(256, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids)).sum(1)


X, MASK = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2, 4)
DYNAMIC = torch.export.Dim.DYNAMIC


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    net, tokens = Net().eval(), Tokens().eval()
    shapes = ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC, 1: DYNAMIC})
    dynamic = torch.export.export(net, (X, MASK), dynamic_shapes=shapes)
    torch.export.save(dynamic, folder / "dynamic.pt2")
    torch.export.save(torch.export.export(net, (X[:1], MASK[:1])), folder / "static.pt2")
    by_name = torch.export.export(net, (X,), {"mask": MASK}, dynamic_shapes={"x": shapes[0], "mask": shapes[1]})
    torch.export.save(by_name, folder / "by_name.pt2")
    dynamic_tokens = ({0: DYNAMIC, 1: DYNAMIC},)
    ids = torch.ones(2, 4, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(net), folder / "script.pt")
        torch.jit.save(torch.jit.freeze(torch.jit.script(tokens)), folder / "frozen.pt")
        torch.jit.save(torch.jit.script(Net()), folder / "train.pt")
        torch.onnx.export(dynamic, f=str(folder / "dynamic.onnx"), verbose=False)
        exported = torch.export.export(tokens, (ids,), dynamic_shapes=dynamic_tokens)
        torch.onnx.export(exported, f=str(folder / "tokens.onnx"), verbose=False)
        torch.onnx.export(net, (X[:1], MASK[:1]), f=str(folder / "static.onnx"), verbose=False)
    (folder / "net.jsonl").write_text(
        "".join(
            f'{{"mask": {[1.0] * n}, "x": {torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).tolist()}}}\n'
            for n in (3, 5, 5, 8)
        )
    )
    (folder / "one.jsonl").write_text(f'{{"x": {X[:1].tolist()}, "mask": {MASK[:1].tolist()}}}\n')
    (folder / "tokens.jsonl").write_text("".join(f'{{"ids": {list(range(n))}}}\n' for n in (3, 7, 7, 7, 30)))
    return folder


def audited(saved: Path, name: str, traffic: str | None = None) -> Audit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated and people still have such files
        return audit(resolve(str(saved / name)), saved / traffic if traffic else None)


def shapes(signature: Signature) -> list[tuple[int | str, ...]]:
    return [spec.shape for spec in (*signature.inputs, *signature.outputs)]


@pytest.mark.parametrize("name", ["dynamic.pt2", "by_name.pt2"])
def test_an_export_with_a_dynamic_batch(saved: Path, name: str) -> None:
    """Its own example is the sample; its rows may share a batch. Inputs that were exported by name are passed so."""
    report = audited(saved, name).report
    assert (report.findings, report.batching, report.precision) == ((), True, "float64")
    assert report.traffic.num_requests == 2
    assert [spec.name for spec in report.signature.inputs] == ["x", "mask"]
    assert shapes(report.signature) == [(4, 3), (4,), (4, 2), (2,)]


@pytest.mark.parametrize("name", ["dynamic.pt2", "by_name.pt2", "script.pt", "dynamic.onnx"])
def test_traffic_shows_which_dims_vary(saved: Path, name: str) -> None:
    """Nobody can declare them for a saved model. Padding is tried along them, and the mask keeps it out."""
    report = audited(saved, name, "net.jsonl").report
    assert report.findings == ()
    assert report.batching
    assert report.padding
    assert [spec.name for spec in report.signature.inputs] == ["x", "mask"]
    assert shapes(report.signature) == [("dim0", 3), ("dim0",), ("dim0", 2), (2,)]


def test_an_export_with_a_fixed_batch(saved: Path) -> None:
    """Its example is one request as a whole, so nothing shares a batch."""
    report = audited(saved, "static.pt2").report
    assert (report.signature.batched, report.batching, report.traffic.num_requests) == (False, False, 1)
    assert shapes(report.signature) == [(1, 4, 3), (1, 4), (1, 4, 2), (1, 2)]
    assert report.findings == ()


def test_an_onnx_file_with_a_fixed_batch(saved: Path) -> None:
    report = audited(saved, "static.onnx", "one.jsonl").report
    assert (report.signature.batched, report.batching, report.findings) == (False, False, ())


@pytest.mark.parametrize("name", ["tokens.onnx", "frozen.pt"])
def test_what_cannot_run_in_float64_is_not_held_to_it(saved: Path, name: str) -> None:
    """Token ids are never cast, so it runs without an error; still its sums round as float32 does. No false alarm."""
    report = audited(saved, name, "tokens.jsonl").report
    assert report.precision == "float32"
    assert [f.code for f in report.findings] == ["TP702"]  # the sum has no mask
    assert report.batching


def test_a_script_saved_in_train_mode(saved: Path) -> None:
    """The flag and the buffers are put back after the audit."""
    done = audited(saved, "train.pt", "net.jsonl")
    assert [f.code for f in done.report.findings] == ["TP101"]
    assert done.module.training
    buffers = dict(done.module.named_buffers())
    assert int(buffers["norm.num_batches_tracked"]) == 0
    assert torch.equal(buffers["norm.running_mean"], torch.zeros(2))


@pytest.mark.parametrize("name", ["script.pt", "dynamic.onnx"])
def test_a_format_without_examples_asks_for_traffic(saved: Path, name: str) -> None:
    with pytest.raises(TargetError, match="there are no example inputs") as caught:
        audited(saved, name)
    assert "--traffic" in caught.value.help


@pytest.mark.parametrize("name", ["script.pt", "dynamic.onnx", "dynamic.pt2"])
def test_traffic_that_lacks_an_input(saved: Path, tmp_path: Path, name: str) -> None:
    traffic = tmp_path / "requests.jsonl"
    traffic.write_text('{"x": [[1.0, 2.0, 3.0]]}\n')
    with pytest.raises(TargetError, match="the request lacks mask"):
        audit(resolve(str(saved / name)), traffic)
    traffic.write_text("[1.0]\n")
    with pytest.raises(TrafficError, match="line 1: Expected `object`, got `array`"):
        audit(resolve(str(saved / name)), traffic)


@pytest.mark.parametrize("name", ["dynamic.pt2", "script.pt", "dynamic.onnx"])
def test_a_broken_file(saved: Path, tmp_path: Path, name: str) -> None:
    """Cut in half or with its middle overwritten: one line, not a parser's traceback."""
    content = (saved / name).read_bytes()
    broken = tmp_path / name
    for damaged in (content[: len(content) // 2], content[:200] + b"\0" * 300 + content[500:]):
        broken.write_bytes(damaged)
        with pytest.raises(TargetError):
            audit(resolve(str(broken)), saved / "net.jsonl")


def test_an_onnx_file_with_its_tensors_beside_it(tmp_path: Path) -> None:
    """Exporters move large tensors out of the file: they go along, and a missing one is named."""
    wide = nn.Linear(600, 600).eval()
    exported = torch.export.export(wide, (torch.ones(2, 600),), dynamic_shapes=({0: DYNAMIC},))
    path = tmp_path / "wide.onnx"
    torch.onnx.export(exported, f=str(path), verbose=False, external_data=True)
    (beside,) = [file for file in tmp_path.iterdir() if file != path]
    assert user_files(resolve(str(path)), []) == [path, beside]
    beside.rename(tmp_path / "elsewhere")
    with pytest.raises(TargetError, match=f"keeps tensors in {beside.name}"):
        user_files(resolve(str(path)), [])


def test_whole_numbers_in_traffic_may_be_floats(saved: Path, tmp_path: Path) -> None:
    """One line of a JavaScript client that writes 1 for 1.0 doesn't make an input int64."""
    traffic = tmp_path / "mixed.jsonl"
    traffic.write_text("""{"x": [[1, 0, 2]], "mask": [1]}\n{"x": [[0.5, 0, 2]], "mask": [1.0]}\n""")
    report = audited(saved, "script.pt", str(traffic)).report
    assert {spec.dtype for spec in report.signature.inputs} == {"float32"}
