"""Runs as Ray Train jobs, on a cluster that Ray starts on this machine."""

import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from torchproof.machine.cores import num_cores

# Not imported here: it changes the log records of the whole process.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

ON_RAY = ("--launcher", "ray", "--nproc", "2")
LOSS = "        x, y = batch\n        return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train_data"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def test_a_rank_that_is_killed_leaves_the_curve_as_torchrun_has_it(
    train: Any, undisturbed: Any, recipe: str, tmp_path: Path
) -> None:
    assert LOSS in recipe
    deadly = """        self.calls = getattr(self, "calls", 0) + 1
        died = os.path.join(os.path.dirname(__file__), "died")
        if self.calls == 5 and os.environ["RANK"] == "1" and not os.path.exists(died):
            open(died, "w").close()
            os.kill(os.getpid(), 9)
"""
    whole = undisturbed("--nproc", "2")
    killed = train(*ON_RAY, "--save-every", "1ms", code=recipe.replace(LOSS, deadly + LOSS), run="ray")
    assert killed.code == 0, killed.err
    assert (tmp_path / "died").exists()
    assert killed.lines == whole.lines
    assert killed.report["world_size"] == 2


def test_more_processes_than_cores_would_wait_for_ever(
    train: Any, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = train("--launcher", "ray", "--nproc", str(num_cores() + 1), code=recipe.replace("= 16\n", "= 1024\n", 1))
    assert done.code == 2
    assert "would wait for ever" in " ".join(done.err.split())
    assert not done.run.exists()


def test_what_is_wrong_with_a_recipe_is_said_once(train: Any, recipe: str) -> None:
    done = train(*ON_RAY, code=recipe.replace("mse_loss(model(x).squeeze(1), y)", "mse_loss(model(x[:, :2]), y)"))
    assert done.code == 2
    assert done.err.count("error: loss() raised RuntimeError") == 1, done.err


def test_ctrl_c_says_how_to_go_on(train: Any, start: Any, recipe: str, tmp_path: Path) -> None:
    whole = train("--nproc", "2", "--epochs", "4")
    wait = "        time.sleep(0.05)\n"
    slow = "import time\n" + recipe.replace(LOSS, wait + LOSS)
    process = start(*ON_RAY, "--epochs", "4", "--save-every", "1ms", code=slow, run="ray")
    while not list(tmp_path.glob("ray/checkpoints/step-*[0-9]")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the same command goes on from the last checkpoint" in err
    assert "Traceback" not in err
    again = train("--nproc", "2", "--epochs", "4", code=recipe, run="ray")
    assert again.code == 0, again.err
    assert again.lines == whole.lines
