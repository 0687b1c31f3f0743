"""The server as a process: what it prints, how it stops, and what it says where it can't start."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from torchproof.bundle.read import GOLDEN, PROOF, Bundle
from torchproof.cli.main import main
from torchproof.cli.serve import _name
from torchproof.errors import UsageError
from torchproof.serve.server import Listening, listen
from torchproof.target import golden

BundleMaker = Callable[..., Bundle]
Start = Callable[..., Any]

# encode() says by a file that it was reached, then waits for another one. It reads while it waits: a replica that uses
# no CPU for seconds is taken for one that hangs.
GATED = """
import os
import torch
import torchproof as tp

class Gated(tp.Service):
    idempotent = False
    def load(self):
        return torch.nn.Identity()
    def encode(self, request):
        if isinstance(request, dict):
            open(request["reached"], "w").close()
            while not os.path.exists(request["go"]):
                pass
            request = [1.0]
        return torch.tensor(request)
    def decode(self, outputs, request):
        print("decoded")
        return outputs
    def samples(self):
        return [[1.0]]
"""


@pytest.fixture
def gate(tmp_path: Path) -> dict[str, str]:
    """``reached`` is a pipe, which can be waited for; ``go`` a file."""
    os.mkfifo(tmp_path / "reached")
    return {"reached": str(tmp_path / "reached"), "go": str(tmp_path / "go")}


@contextmanager
def posted(url: str, body: Any) -> Iterator[list[httpx.Response]]:
    """A request in flight; answered at the end."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
    thread.start()
    yield answers
    thread.join(60)


def test_a_busy_replica_holds_nothing_up_and_sigterm_answers_what_is_in_flight(
    make_bundle: BundleMaker, start: Start, gate: dict[str, str]
) -> None:
    """Also: the thread variables are in force when libgomp is loaded, and stdout is the result's alone."""
    bundle = make_bundle("eager", code=GATED)
    with start(str(bundle.path), "--replicas", "1", OMP_DISPLAY_ENV="verbose") as server:
        ready = server.ready()
        assert ready["choice"]["candidate"] == {"runtime": "eager", "precision": "float32", "num_threads": 1}
        assert [seen["within"] for seen in ready["golden"]] == [True, True]
        assert (ready["bundle"], ready["findings"]) == (str(bundle.path), [])
        assert (ready["num_replicas"], ready["num_threads"], len(ready["memory"])) == (1, 1, 1)
        url = ready["url"]
        with posted(f"{url}/predict", gate) as first:
            Path(gate["reached"]).open().close()
            assert httpx.get(f"{url}/healthz").status_code == 200
            assert httpx.get(f"{url}/readyz").status_code == 200
            late = httpx.post(f"{url}/predict", json=[2.0], headers={"x-deadline": "0.1"})
            assert (late.status_code, late.json()["status"]) == (504, 504)
            metrics = httpx.get(f"{url}/metrics").text
            assert 'torchproof_requests_total{outcome="deadline_exceeded",route="/predict"} 1.0' in metrics
            server.signal(signal.SIGTERM)
            Path(gate["go"]).touch()
        code, out, err = server.end()
        assert (first[0].status_code, first[0].json()) == (200, [1.0])
        assert (code, out) == (0, "")
        assert "decoded" in err
        assert "Traceback" not in err
        assert "GOMP_SPINCOUNT = '0'" in err  # passive; libgomp prints OMP_WAIT_POLICY as PASSIVE when not set, too
        assert "OMP_NUM_THREADS = '1'" in err


@pytest.mark.parametrize("num_replicas", [None, 0, 2])
def test_sigint_ends_a_bare_target_with_0(num_replicas: int | None, tmp_path: Path, start: Start) -> None:
    """With replicas or without, by the user's choice or by measurement: it is one server."""
    (tmp_path / "app.py").write_text(GATED)
    options = () if num_replicas is None else ("--replicas", str(num_replicas))
    with start(f"{tmp_path}/app.py:Gated", *options) as server:
        ready = server.ready()
        assert httpx.post(f"{ready['url']}/predict", json=[3.0]).json() == [3.0]
        assert httpx.get(f"{ready['url']}/readyz").status_code == 200
        assert httpx.get(f"{ready['url']}/v2/models/Gated").json()["name"] == "Gated"
        assert (ready["golden"], ready["bundle"]) == ([], None)
        assert len(ready["memory"]) == ready["num_replicas"]
        assert num_replicas in (None, ready["num_replicas"])
        assert ready["choice"]["candidate"]["num_threads"] == 1
        server.signal(signal.SIGINT)
        code, out, err = server.end()
        assert (code, out) == (0, "")  # what the user's code prints is no result
        assert err.count("decoded") >= 2
        assert "nothing was measured" in err
        assert "torchproof tune" in err
        assert "Traceback" not in err


def test_a_signal_while_the_model_loads_ends_at_once_with_0(tmp_path: Path, start: Start, gate: dict[str, str]) -> None:
    hang = f"import time\nopen({gate['reached']!r}, 'w').close()\ntime.sleep(600)\n"
    (tmp_path / "app.py").write_text(GATED + hang)
    with start(f"{tmp_path}/app.py:Gated") as server:
        Path(gate["reached"]).open().close()
        server.signal(signal.SIGTERM)
        code, out, err = server.end()
        assert (code, out) == (0, "")
        assert "Traceback" not in err


def test_what_the_users_code_raises_is_said_once_with_its_line(tmp_path: Path, start: Start) -> None:
    """It is raised in another process, and ends the server all the same."""
    (tmp_path / "app.py").write_text(GATED.replace("return torch.nn.Identity()", "return 1 / 0"))
    with start(f"{tmp_path}/app.py:Gated") as server:
        code, out, err = server.end()
    assert (code, out) == (2, "")
    assert "return 1 / 0" in err
    assert err.count("Traceback") == 1


def test_a_replica_that_dies_at_its_start_ends_the_server_with_1(tmp_path: Path, start: Start) -> None:
    (tmp_path / "app.py").write_text(GATED.replace("return torch.nn.Identity()", "os._exit(3)"))
    with start(f"{tmp_path}/app.py:Gated") as server:
        code, out, err = server.end()
    assert (code, out) == (1, "")
    assert "can't be served" in err
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


def test_the_servers_process_holds_no_torch() -> None:
    """Replicas do; what it took here would be taken from them."""
    code = (
        "import sys, torchproof.cli.serve, torchproof.serve.server, torchproof.serve.pages; "
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and what is said in one line."""
    code = main(["serve", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    return code, " ".join(err.split())


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
        port = listener.getsockname()[1]
        assert port
        assert Listening(listener, 1, 1.0).url == f"http://127.0.0.1:{port}"
        assert Listening(listener, 1, 1.0, certfile=Path("a.pem")).url == f"https://127.0.0.1:{port}"


@pytest.mark.parametrize(
    "missing", ["starlette", "uvicorn", "httptools", "prometheus_client", "swagger_ui_bundle", "torch"]
)
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


def test_https(tmp_path: Path, start: Start) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*request, *files], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "app.py").write_text(GATED)
    options = ("--ssl-certfile", f"{tmp_path}/cert.pem", "--ssl-keyfile", f"{tmp_path}/key.pem", "--replicas", "0")
    with start(f"{tmp_path}/app.py:Gated", *options) as server:
        url = server.ready()["url"]
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        assert httpx.post(f"{url}/predict", json=[3.0], verify=trusting).json() == [3.0]
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http") + "/healthz")


def test_a_certificate_needs_its_key(
    make_bundle: BundleMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And both have to be what they are said to be, before anything is loaded."""
    bundle = make_bundle("eager")
    pem = tmp_path / "a.pem"
    pem.write_text("no certificate")
    code, err = run(capsys, str(bundle.path), "--ssl-certfile", str(pem))
    assert code == 2
    assert "--ssl-certfile and --ssl-keyfile need each other" in err
    code, err = run(capsys, str(bundle.path), "--port", "0", "--ssl-certfile", str(pem), "--ssl-keyfile", str(pem))
    assert code == 2
    assert "the TLS certificate or key can't be used" in err


def test_a_key_file_without_a_key_is_said(
    make_bundle: BundleMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would let nobody in, or everybody: either is not what was asked for."""
    (tmp_path / "keys.txt").write_text("# none yet\n")
    code, err = run(capsys, str(make_bundle("eager").path), "--port", "0", "--api-key-file", str(tmp_path / "keys.txt"))
    assert code == 2
    assert "keys.txt" in err


@pytest.mark.parametrize("value", ["length", "length=", "=3", "length=0", "length=x"])
def test_a_largest_size_names_its_dim(value: str, make_bundle: BundleMaker, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(capsys, str(make_bundle("eager").path), "--max-size", value)
    assert code == 2
    assert "write length=256" in err


def test_a_bundle_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(capsys, "nowhere.tp")
    assert code == 2
    assert "nowhere.tp: no such file or folder" in err


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("bundles/minilm.tp", "minilm"),
        ("bundles/minilm.tp/", "minilm"),
        ("a b/app.py:Net", "Net"),
        ("sätze.tp", "s-tze"),
    ],
)
def test_the_models_name_fits_into_a_url(reference: str, name: str) -> None:
    assert _name(reference) == name
