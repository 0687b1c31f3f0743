"""``tune`` of a recipe, and ``train --plan``: what was found is what is run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).parents[2] / "src"
GUARD_S = 240
Command = Callable[..., "subprocess.CompletedProcess[str]"]

# Two optimizer steps with a metric that no precision moves by 100, so that the first look decides.
MARGIN = ("--margin", "mse=100", "--steps", "2")


@pytest.fixture
def command(tmp_path: Path, recipe: str) -> Command:
    """Runs torchproof in the test's folder, where recipe.py is."""
    (tmp_path / "recipe.py").write_text(recipe)

    def run(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "torchproof", *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=GUARD_S,
        )

    return run


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def plan(command: Command, tmp_path: Path) -> dict[str, Any]:
    done = command("tune", "recipe.py", "-o", "plan.json", "--budget", "5s")
    assert done.returncode == 0, done.stderr
    assert "no other was compared" in done.stdout
    assert "train --plan plan.json" in done.stdout
    return read(tmp_path / "plan.json")


def test_a_run_takes_what_the_plan_has(command: Command, plan: dict[str, Any], tmp_path: Path) -> None:
    plan["loading"]["chosen"] |= {"num_workers": 1, "prefetch_factor": 3, "num_threads": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = command("train", "--plan", "plan.json", "-o", "run")
    assert done.returncode == 0, done.stderr
    assert "measured elsewhere" not in done.stderr
    assert read(tmp_path / "run" / "run.json")["loading"] == plan["loading"]["chosen"]
    other = command("train", "--plan", "plan.json", "--num-workers", "0", "--precision", "bf16-mixed", "-o", "other")
    assert other.returncode == 0, other.stderr
    request = read(tmp_path / "other" / "run.json")
    assert (request["loading"]["num_workers"], request["precision"]) == (0, "bf16-mixed")


def test_precisions_are_compared_within_a_margin_and_the_run_takes_the_chosen_one(
    command: Command, tmp_path: Path
) -> None:
    done = command("tune", "recipe.py", "-o", "plan.json", "--budget", "45s", *MARGIN)
    assert done.returncode == 0, done.stderr
    plan = read(tmp_path / "plan.json")
    precision = plan["precision"]
    assert precision["margins"] == {"mse": 100}
    assert {candidate["precision"] for candidate in precision["candidates"]} == {"bf16-mixed", "16-mixed"}
    precision |= {"precision": "bf16-mixed", "fp32_modules": ["0"]}  # which is faster depends on the machine
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert command("train", "--plan", "plan.json", "-o", "run", "--steps", "2").returncode == 0
    request = read(tmp_path / "run" / "run.json")
    assert (request["precision"], request["fp32_modules"]) == ("bf16-mixed", ["0"])


def test_a_plan_of_another_machine_or_recipe_is_said_to_be_so(
    command: Command, plan: dict[str, Any], tmp_path: Path
) -> None:
    plan["holds_while"]["cpu_model"] = "another one"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = command("train", "--plan", "plan.json", "-o", "run", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "another one" in done.stderr
    (tmp_path / "second.py").write_text((tmp_path / "recipe.py").read_text())
    done = command("train", "second.py", "--plan", "plan.json", "-o", "second")
    assert done.returncode == 2
    assert "the plan is of recipe.py" in done.stderr
    (tmp_path / "plan.json").write_text("{}")
    done = command("train", "--plan", "plan.json", "-o", "run")
    assert done.returncode == 2
    assert "plan.json: " in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tune", "recipe.py", "-o", "p", "--p99", "1s"), "--p99 is of a model that is served"),
        (("tune", "recipe.py", "-o", "p", "--steps", "3"), "--steps is of the precisions"),
        (("tune", "recipe.py", "-o", "p", "--margin", "mse"), "is not a margin"),
        (("tune", "recipe.py", "-o", "p", "--margin", "mse=0"), "above 0"),
        (("tune", "recipe.py", "-o", "."), ". exists and is no bundle"),
        (("tune", "recipe.py", "-o", "recipe.py"), "recipe.py exists and is no bundle"),
        (("tune", "net.py", "-o", "p", "--margin", "mse=1"), "--margin is of a recipe"),
        (("train", "-o", "run"), "the recipe is missing"),
        (("train", "--plan", "p", "-o", "run"), "p can't be read"),
    ],
)
def test_wrong_use_is_said_at_once(command: Command, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef Net():\n    return nn.Linear(2, 2)\n")
    done = command(*args)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["net.py", "recipe.py"]


def test_a_margin_of_no_metric_is_refused(command: Command) -> None:
    done = command("tune", "recipe.py", "-o", "p", "--budget", "60s", "--margin", "acc=0.1")
    assert done.returncode == 2
    assert "metrics() returns mse" in " ".join(done.stderr.split())


def test_ctrl_c_leaves_no_plan(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(recipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "torchproof", "tune", "recipe.py", "-o", "plan.json", "--budget", "60s", *MARGIN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline()  # it has begun
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("*plan.json*"))
