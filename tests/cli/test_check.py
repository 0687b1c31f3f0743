"""``torchproof check``: the result is on stdout and nothing else is; the exit code says whether there are findings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from torchproof.cli.main import main
from torchproof.types import CheckReport, decode

Write = Callable[..., Path]

SERVICE = """
print("imported")

class Net(tp.Service):
    variable_dims = {"x": {0: "length"}}

    def load(self):
        print("loaded")
        torch.manual_seed(0)
        return Model().eval()

    def encode(self, request: list[float]):
        return torch.tensor(request)

    def decode(self, outputs, request):
        return outputs.tolist()

    def samples(self):
        return [[1.0, 2.0], [3.0, 4.0, 5.0]]

class Model(nn.Module):
    def forward(self, x):
        return FORWARD
"""


def net(forward: str) -> str:
    return SERVICE.replace("FORWARD", forward)


GOOD = net("x.sum(-1)")
PADDED = net("x.mean(-1)")
NOT_FINITE = net("x.sum(-1) / 0")
ONE_ROW = net("x.sum(-1).view(1)")


@pytest.mark.parametrize(
    ("code", "exit_code", "shown"),
    [
        (GOOD, 0, "no findings"),
        (PADDED, 1, "TP702"),
        (NOT_FINITE, 1, "TP601"),
        (ONE_ROW, 0, "TP703"),  # to know, not to mend
    ],
)
def test_the_exit_code_says_whether_there_is_something_to_mend(
    write: Write, capsys: pytest.CaptureFixture[str], code: str, exit_code: int, shown: str
) -> None:
    path = write(code)
    assert main(["check", str(path)]) == exit_code
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: 2 requests from samples() (length 2 to 3)\n")
    assert shown in out
    assert "error" not in err


def test_what_holds_is_said(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(write(GOOD))])
    out = capsys.readouterr().out
    assert "  batching  safe: a row's answer is independent of its batch (float64)\n" in out
    assert "  padding   safe: padded and unpadded answers agree (float64)\n" in out
    main(["check", str(write(PADDED, "padded.py"))])
    out = capsys.readouterr().out
    assert "  batching  safe" in out
    assert "  padding   not used: padded and unpadded answers are not proven to agree" in out
    main(["check", str(write(ONE_ROW, "one.py"))])
    assert "  batching  not used: a row's answer is not proven" in capsys.readouterr().out


@pytest.mark.parametrize("code", [GOOD, PADDED, NOT_FINITE])
def test_json_is_one_strict_document(write: Write, capsys: pytest.CaptureFixture[str], code: str) -> None:
    """It decodes to the stored report, has no NaN, and what the user's code prints is on stderr."""
    path = write(code)
    main(["check", str(path), "--format", "json"])
    out, err = capsys.readouterr()
    report = decode(out, CheckReport, what="stdout")
    assert report.target.reference == str(path)
    assert report.traffic.sizes == {"length": (2, 3)}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(out, parse_constant=refuse)
    assert "imported\n" in err
    assert "loaded\n" in err


def test_progress_is_on_stderr(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD)
    main(["check", str(path)])
    assert f"checking {path}\n" in capsys.readouterr().err


def test_traffic_takes_the_place_of_samples(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of samples that raise."""
    traffic = tmp_path / "requests.jsonl"
    traffic.write_text("[1.0]\n\n[1, 2, 3, 4]\n")
    path = write(GOOD.replace("return [[1.0, 2.0], [3.0, 4.0, 5.0]]", "return 1 / 0"))
    assert main(["check", str(path), "--traffic", str(traffic)]) == 0
    assert ": 2 requests from requests.jsonl (length 1 to 4)\n" in capsys.readouterr().out


def test_a_dotted_module_in_the_current_folder(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(GOOD, "checked_package/app.py")
    monkeypatch.chdir(path.parent.parent)
    assert main(["check", "checked_package.app:Net"]) == 0
    assert capsys.readouterr().out.startswith("checked_package.app:Net: 2 requests")


def test_a_bare_module_with_examples(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing varies, so there is nothing to say about padding."""
    path = write("def net():\n    return nn.Linear(3, 2), torch.ones(4, 3)\n")
    assert main(["check", f"{path}:net"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}:net: 4 requests from samples()\n")
    assert "padding" not in out


def test_a_decode_that_fails_is_found_before_it_is_served(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """With the user's own traceback; and a response that JSON has no form for is named."""
    path = write(GOOD.replace("outputs.tolist()", "outputs.tolits()"))
    assert main(["check", str(path)]) == 2
    assert "outputs.tolits()" in capsys.readouterr().err
    path = write(GOOD.replace("outputs.tolist()", "object()"), "other.py")
    assert main(["check", str(path)]) == 2
    assert "decode() returned a object, which JSON has no form for" in capsys.readouterr().err
