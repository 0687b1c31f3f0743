"""The server as a process: what it prints, how it stops, and what it says where it can't start."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from torchproof.bundle.read import GOLDEN, PROOF, Bundle
from torchproof.cli.main import main
from torchproof.errors import UsageError
from torchproof.render import serving as render
from torchproof.serve.server import listen, url_of
from torchproof.serve.threads import set_thread_variables
from torchproof.target import golden
from torchproof.types import Candidate, Choice, GoldenSeen
from torchproof.types.serving import Serving

BundleMaker = Callable[..., Bundle]
Start = Callable[..., Any]

# encode() tells a named pipe that it was reached, then waits for another one.
GATED = """
import torch
import torchproof as tp

class Gated(tp.Service):
    def load(self):
        return torch.nn.Identity()
    def encode(self, request):
        if isinstance(request, dict):
            open(request["reached"], "w").close()
            open(request["go"]).close()
            request = [1.0]
        return torch.tensor(request)
    def decode(self, outputs, request):
        return outputs
    def samples(self):
        return [[1.0]]
"""


@pytest.fixture
def pipes(tmp_path: Path) -> dict[str, str]:
    paths = {name: str(tmp_path / name) for name in ("reached", "go")}
    for path in paths.values():
        os.mkfifo(path)
    return paths


def test_sigterm_answers_what_is_in_flight_and_exits_with_0(
    make_bundle: BundleMaker, start: Start, pipes: dict[str, str]
) -> None:
    """Also: the thread variables are in force when libgomp is loaded."""
    bundle = make_bundle("eager", code=GATED)
    with start(str(bundle.path), OMP_DISPLAY_ENV="verbose") as server:
        ready = server.ready()
        assert ready["choice"]["candidate"] == {"runtime": "eager", "precision": "float32", "num_threads": 1}
        assert [seen["within"] for seen in ready["golden"]] == [True, True]
        assert (ready["bundle"], ready["findings"]) == (str(bundle.path), [])
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{ready['url']}/predict", json=pipes)))
        thread.start()
        Path(pipes["reached"]).open().close()
        server.signal(signal.SIGTERM)
        Path(pipes["go"]).open("w").close()
        thread.join(30)
        code, out, err = server.end()
        assert (answers[0].status_code, answers[0].json()) == (200, [1.0])
        assert (code, out) == (0, "")
        assert "Traceback" not in err
        assert (
            "GOMP_SPINCOUNT = '0'" in err
        )  # passive; libgomp prints OMP_WAIT_POLICY as PASSIVE when it is not set, too
        assert "OMP_NUM_THREADS = '1'" in err


def test_sigint_ends_a_bare_target_with_0(tmp_path: Path, start: Start) -> None:
    (tmp_path / "app.py").write_text(GATED)
    with start(f"{tmp_path}/app.py:Gated", "--threads", "2") as server:
        ready = server.ready()
        assert httpx.post(f"{ready['url']}/predict", json=[3.0]).json() == [3.0]
        assert httpx.get(f"{ready['url']}/readyz").status_code == 200
        assert (ready["golden"], ready["bundle"]) == ([], None)
        assert ready["choice"]["candidate"]["num_threads"] == 2
        server.signal(signal.SIGINT)
        code, _, err = server.end()
        assert code == 0
        assert "nothing was measured" in err
        assert "torchproof tune" in err
        assert "Traceback" not in err


def test_a_signal_while_the_model_loads_ends_at_once_with_0(
    tmp_path: Path, start: Start, pipes: dict[str, str]
) -> None:
    hang = f"open({pipes['reached']!r}, 'w').close()\nopen({pipes['go']!r}).close()\n"
    (tmp_path / "app.py").write_text(GATED + hang)
    with start(f"{tmp_path}/app.py:Gated") as server:
        Path(pipes["reached"]).open().close()
        server.signal(signal.SIGTERM)  # nobody opens the other pipe: the load hangs for ever
        code, out, err = server.end()
        assert (code, out) == (0, "")
        assert "Traceback" not in err


def test_a_refusal_ends_the_server_with_1(
    make_bundle: BundleMaker, start: Start, sealed: Callable[[Path], None]
) -> None:
    bundle = make_bundle("eager")
    inputs, outputs = golden.load(bundle.path / GOLDEN)
    golden.save(bundle.path / GOLDEN, inputs, [{"output": -row["output"]} for row in outputs])
    sealed(bundle.path)
    with start(str(bundle.path)) as server:
        code, out, err = server.end()
    assert (code, out) == (1, "")
    assert err.startswith("error: TP704:")
    assert "Traceback" not in err
    assert "torchproof explain TP704" in err


def test_the_users_wait_policy_stays() -> None:
    environ = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "8"}
    set_thread_variables(2, environ)
    assert environ == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    environ = {}
    set_thread_variables(0, environ)
    assert environ == {"OMP_WAIT_POLICY": "passive"}


def test_reading_the_plan_needs_no_torch() -> None:
    code = (
        "import sys, torchproof.cli.serve, torchproof.serve.server; "
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["serve", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_a_changed_file_is_named(make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle("eager")
    (bundle.path / "code/app.py").write_text("# changed")
    code, err = run(capsys, str(bundle.path))
    assert code == 2
    assert "code/app.py was changed" in err


@pytest.mark.parametrize("name", [GOLDEN, "weights.safetensors", "SHA256SUMS", PROOF])
def test_a_missing_file_is_named(name: str, make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle("eager")
    (bundle.path / name).unlink()
    code, err = run(capsys, str(bundle.path))
    assert code == 2
    assert name in err


def test_a_newer_schema_says_upgrade(make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle("eager")
    proof = json.loads((bundle.path / PROOF).read_text())
    (bundle.path / PROOF).write_text(json.dumps(proof | {"schema": 99, "torchproof": "9.0"}))
    code, err = run(capsys, str(bundle.path))
    assert code == 2
    assert "schema 99" in err
    assert "--upgrade" in err


def test_threads_are_not_offered_for_a_bundle(make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(capsys, str(make_bundle("eager").path), "--threads", "2")
    assert code == 2
    assert "--threads would change" in err


def test_a_port_in_use_is_said_with_its_cure(make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = run(capsys, str(make_bundle("eager").path), "--port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in err
    assert "--port 0" in err


def test_a_host_of_another_machine_is_said() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is no address of this machine"):
        listen("192.0.2.1", 0)  # a block reserved for documentation


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "swagger_ui_bundle", "torch"])
def test_a_missing_package_is_said_with_the_install_line(
    missing: str, make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle("eager")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find(name))
    code, err = run(capsys, str(bundle.path))
    assert code == 2
    assert missing in err
    assert "pip install 'torchproof[" in err


def test_the_block_says_what_is_served() -> None:
    seen = GoldenSeen(
        target="app.py:Net",
        candidate="onnxruntime int8, 2 threads",
        output="output",
        metric="cos",
        error=0.99991,
        bound=0.999,
        within=True,
        num_rows=32,
        batch_size=1,
    )
    candidate = Candidate(runtime="onnxruntime", precision="int8", num_threads=2)
    serving = Serving(
        target="app.py:Net",
        bundle="/srv/app.tp",
        choice=Choice(candidate=candidate, max_batch_size=8, padding=False, artifact="artifacts/onnxruntime"),
        golden=(seen,),
        findings=(),
        url="http://127.0.0.1:8000",
    )
    assert render.text(serving) == (
        "serving:    app.py:Net from /srv/app.tp\n"
        "candidate:  onnxruntime int8, 2 threads\n"
        "golden set: 32 of 32 rows within cos>=0.999, worst 0.99991, at batch size 1\n"
        "serving at http://127.0.0.1:8000   docs at /docs\n"
    )
    assert render.json(serving).count("\n") == 1
