"""Whole runs in real processes: the same curve on one process and on two, and after any number of deaths."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

GUARD_S = 240
Train = Callable[..., Any]


SMALL_LOSS = "return nn.functional.mse_loss(model(x).squeeze(1), y) * 0.01\n    def train"  # fits the first scale


def noisy(code: str) -> str:
    """With random augmentation and dropout, so that random numbers matter."""
    return code.replace("noise = 0.0", "noise = 1.0").replace("dropout = 0.0", "dropout = 0.3")


def test_a_run_leaves_curve_weights_and_proof(train: Train) -> None:
    done = train()
    assert done.code == 0, done.err
    steps = [line for line in done.lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert [line["step"] for line in done.lines if "metrics" in line] == [7, 14]
    assert steps[-1]["loss"] < steps[0]["loss"]
    report = done.report
    assert (report["strategy"], report["world_size"], report["eval_precision"]) == ("single", 1, "32-true")
    assert report["metrics"] == done.lines[-1]["metrics"]
    assert (done.run / "model.safetensors").exists()
    assert "mse" in done.out


@pytest.mark.parametrize(
    "options",
    [
        ("--nproc", "2"),
        ("--nproc", "2", "--strategy", "fsdp", "--activation-checkpointing"),
        ("--nproc", "2", "--micro-batch-size", "3"),
        ("--nproc", "2", "--num-workers", "2"),
        ("--micro-batch-size", "5"),
    ],
)
def test_the_same_effective_batch_gives_the_same_curve(
    train: Train, undisturbed: Train, options: tuple[str, ...]
) -> None:
    """Two processes, sharded weights and accumulation change rounding only: 107 samples are no multiple of anything."""
    alone = undisturbed()
    other = train(*options, run="other")
    assert other.code == 0, other.err
    assert other.losses == pytest.approx(alone.losses, rel=1e-4)
    assert other.report["metrics"]["mse"] == pytest.approx(alone.report["metrics"]["mse"], rel=1e-3)


MARKS = sorted(random.Random(0).sample(range(2, 6), 3))  # calls of loss() after which a process dies


def dying(code: str, whom: str, where: str = "True") -> str:
    """Three times; then it lives."""
    loss = "        x, y = batch\n        return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train_data"
    assert loss in code
    deadly = f"""        self.calls = getattr(self, "calls", 0) + 1
        here = os.path.dirname(__file__)
        deaths = len([name for name in os.listdir(here) if name.startswith("died")])
        if {where} and deaths < 3 and self.calls == {MARKS}[deaths]:
            open(os.path.join(here, f"died-{{deaths}}"), "w").close()
            for pid in ({whom}):
                os.kill(pid, 9)
"""
    return code.replace(loss, deadly + loss)


def test_a_rank_that_is_killed_at_random_steps_leaves_the_curve_bit_for_bit_as_it_is(
    train: Train, undisturbed: Train, recipe: str, tmp_path: Path
) -> None:
    """Its agent starts it again, and it goes on in the middle of the epoch; noise and dropout go on, too."""
    whole = undisturbed(code=noisy(recipe))
    killed = train("--save-every", "1ms", code=dying(noisy(recipe), "os.getpid(),"), run="killed")
    assert killed.code == 0, killed.err
    assert len(list(tmp_path.glob("died-*"))) == 3
    assert killed.lines == whole.lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_loses_another_one_waits_for_it_and_is_no_error_of_the_recipe(
    train: Train, undisturbed: Train, recipe: str, strategy: str
) -> None:
    """It sees "Connection reset by peer" in the middle of the user's loss or of backward."""
    options = ("--nproc", "2", "--strategy", strategy)
    whole = undisturbed(*options)
    killed = train(
        *options, "--save-every", "1ms", code=dying(recipe, "os.getpid(),", 'os.environ["RANK"] == "1"'), run="killed"
    )
    assert killed.code == 0, killed.err
    assert killed.losses == whole.losses


def test_the_same_command_goes_on_after_everything_was_killed(
    train: Train, undisturbed: Train, recipe: str, tmp_path: Path
) -> None:
    """On two ranks that hold half of the weights each, and in the end on one."""
    sharded = ("--nproc", "2", "--strategy", "fsdp")
    whole = undisturbed(*sharded)
    for _ in range(3):
        killed = train(*sharded, "--save-every", "1ms", code=dying(recipe, "os.getppid(), os.getpid()"), run="killed")
        assert killed.code == -signal.SIGKILL
    assert len(list(tmp_path.glob("died-*"))) == 3
    done = train("--save-every", "1ms", code=recipe, run="killed")
    assert done.code == 0, done.err
    assert done.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("call", [2, 7])  # the seventh is the epoch's last
def test_sigint_saves_and_the_same_command_goes_on(
    train: Train,
    undisturbed: Train,
    recipe: str,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    call: int,
) -> None:
    whole = undisturbed(code=noisy(recipe))
    slow = noisy(recipe).replace(
        "        return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train_data",
        f"""        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == {call}:
            open(os.path.join(os.path.dirname(__file__), "reached"), "w").close()
            while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
                pass
        return nn.functional.mse_loss(model(x).squeeze(1), y)
    def train_data""",
    )
    assert slow != noisy(recipe)
    process = start(code=slow, run="stopped")
    end = time.monotonic() + GUARD_S
    while not (tmp_path / "reached").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, err
    assert "goes on" in err
    assert "Traceback" not in err
    done = train(code=noisy(recipe), run="stopped")
    assert done.lines == whole.lines


def test_sigint_before_the_first_step(recipe: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    reached = tmp_path / "reached"
    head = "    def model(self):\n"
    process = start(
        code=recipe.replace(head, f"{head}        open({str(reached)!r}, 'w').close()\n        while True: pass\n")
    )
    end = time.monotonic() + GUARD_S
    while not reached.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    _, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, err
    assert "the same command goes on" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("options", [(), ("--nproc", "2")])
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_effective_one(
    train: Train, undisturbed: Train, recipe: str, options: tuple[str, ...]
) -> None:
    whole = undisturbed()
    hungry = recipe.replace(
        "        x, y = batch\n        return nn",
        """        x, y = batch
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn""",
        1,
    )
    assert hungry != recipe
    done = train(*options, code=hungry, run="hungry")
    assert done.code == 0, done.err
    assert done.report["micro_batch_size"] in (2, 3)
    assert [finding["code"] for finding in done.report["findings"]] == ["TP202"]
    assert "did not fit in memory" in done.out
    assert done.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    def optimizer(self, model):", "    def optimiser(self, model):", "no optimizer()"),
        (
            "mse_loss(model(x).squeeze(1), y)\n    def train",
            "l1_loss(model(x).squeeze(1), y, reduction='none')\n    def train",
            "no scalar",
        ),
        (
            "return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train",
            "return 1.0\n    def train",
            "a float",
        ),
        ("return Points(107)", "return []", "train_data() is empty"),
        ("return Points(31)", "return iter([1])", "no length"),
        ('return {"mse": nn', 'return {"mse": torch.ones(3), "n": nn', "shape (3,)"),
        ("        x, y = batch\n        return nn", "        1 / 0\n        return nn", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_once(train: Train, recipe: str, old: str, new: str, message: str) -> None:
    assert old in recipe
    done = train("--nproc", "2", code=recipe.replace(old, new, 1))
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.count("error:") == 1
    assert not (done.run / "proof.json").exists()


def test_a_checkpoint_of_another_model_names_the_first_difference(train: Train, recipe: str) -> None:
    assert train().code == 0
    done = train("--epochs", "3", code=recipe.replace("16)", "17)").replace("(16,", "(17,"))
    assert done.code == 1
    assert "0.weight is [16, 6] there and [17, 6] here" in " ".join(done.err.split())


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_checkpoint_that_is_cut_off_is_named_and_the_one_before_it_still_does(train: Train, name: str) -> None:
    whole = train("--save-every", "1ms")
    losses = whole.losses
    newest = max((whole.run / "checkpoints").iterdir())
    os.truncate(newest / name, 100)
    done = train("--save-every", "1ms", "--epochs", "3")
    assert done.code == 1
    assert f"{newest.name} can't be read" in " ".join(done.err.split())
    assert "Traceback" not in done.err
    shutil.rmtree(newest)
    assert train("--epochs", "3").losses[:14] == losses


def test_checkpoints_without_what_the_run_was_are_left_alone(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-0000000001").mkdir(parents=True)
    done = train()
    assert done.code == 2
    assert "run.json can't be read" in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert not (done.run / "run.json").exists()


def test_a_metric_that_is_nan_is_found_and_the_weights_are_there(train: Train, recipe: str) -> None:
    done = train(code=recipe.replace('return {"mse": ', 'return {"nan": float("nan"), "mse": '))
    assert done.code == 1
    assert done.report["metrics"]["nan"] is None
    assert [finding["code"] for finding in done.report["findings"]] == ["TP610"]
    assert "nan not finite" in done.out
    assert (done.run / "model.safetensors").exists()


def test_a_loss_that_is_nan_is_found(train: Train, recipe: str) -> None:
    bad = recipe.replace("lr=1e-2", "lr=1e-2 * float('inf')")
    assert bad != recipe
    done = train("--nproc", "2", "--steps", "3", code=bad)
    assert done.code == 1
    assert "the loss was not finite in 2 of 3 steps, first in step 2" in " ".join(done.out.split())


def test_a_rank_without_a_sample_waits_for_the_others(train: Train, recipe: str) -> None:
    """One sample for two ranks, in training and in evaluation: the one without goes through it without effect."""
    one = recipe.replace("Points(107)", "Points(1)").replace("Points(31)", "Points(1)")
    alone = train("--steps", "3", code=one)
    two = train("--steps", "3", "--nproc", "2", code=one, run="two")
    assert two.code == 0, two.err
    assert two.losses == pytest.approx(alone.losses, rel=1e-4)
    assert two.report["metrics"] == pytest.approx(alone.report["metrics"], rel=1e-4)


FULL = """        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 10:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
"""


@pytest.mark.parametrize("options", [(), ("--nproc", "2")])
def test_on_a_full_disk_the_last_good_checkpoint_stays_and_the_run_goes_on_from_it(
    train: Train, undisturbed: Train, recipe: str, options: tuple[str, ...]
) -> None:
    """No file may grow any more from the tenth step on, which to a writer is a full disk."""
    whole = undisturbed(*options, code=noisy(recipe))
    loss = "        x, y = batch\n        return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train_data"
    full = noisy(recipe).replace(loss, FULL + loss)
    assert full != noisy(recipe)
    done = train("--save-every", "1ms", *options, code=full, run="full")
    assert done.code == 1
    assert "could not be written" in " ".join(done.err.split()) or "can't be written" in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert done.err.count("error:") == 1
    kept = sorted(path.name for path in (done.run / "checkpoints").iterdir())
    assert kept[-1].startswith("step-000000000")
    assert not (done.run / "proof.json").exists()
    after = train(*options, code=noisy(recipe), run="full")
    assert after.code == 0, after.err
    assert after.lines == whole.lines


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def test_two_nodes_meet_and_give_the_same_curve(
    undisturbed: Train, recipe: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """The same command on each, with the folder shared; here both are this machine."""
    alone = undisturbed()
    options = ("--nodes", "2", "--nproc", "1", "--rdzv", f"localhost:{free_port()}")
    nodes = [start(*options, code=recipe, run="nodes") for _ in range(2)]
    ended = [node.communicate(timeout=GUARD_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    report = json.loads((tmp_path / "nodes" / "proof.json").read_text())
    assert (report["strategy"], report["world_size"]) == ("ddp", 2)
    assert report["loss"] == pytest.approx(alone.report["loss"], rel=1e-4)


def test_auto_says_its_sums(train: Train) -> None:
    done = train("--nproc", "2", "--steps", "1")
    assert done.code == 0, done.err
    assert "strategy:   ddp on 2 processes: a whole step fits on each device" in done.err
    assert "weights 516 B + gradients 516 B" in done.err


@pytest.mark.parametrize(("precision", "rel"), [("bf16-mixed", 0.05), ("16-mixed", 0.01)])
def test_mixed_precision_follows_the_curve(
    train: Train, undisturbed: Train, recipe: str, precision: str, rel: float
) -> None:
    """The gradient is unscaled before it is clipped: else it would be scaled away, and nothing would be learnt."""
    code = recipe.replace("return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train", SMALL_LOSS)
    code = code.replace("AdamW(model.parameters(), lr=1e-2)", "SGD(model.parameters(), lr=1.0)").replace(
        "= 1.0", "= 0.03"
    )
    full = undisturbed(code=code)
    assert full.losses[-1] < 0.8 * full.losses[0]
    mixed = train("--precision", precision, code=code, run="mixed")
    assert mixed.code == 0, mixed.err
    assert mixed.losses == pytest.approx(full.losses, rel=rel)
    assert mixed.losses != full.losses
    assert mixed.report["eval_precision"] == precision
    scales = [line.get("scale") for line in mixed.lines if "loss" in line]
    assert all(scales) if precision == "16-mixed" else not any(scales)


def test_a_step_that_overflows_in_one_shard_is_skipped_on_all_ranks(train: Train, recipe: str) -> None:
    """With FSDP each rank has one row of the last layer, and only the second one's gradient overflows."""
    code = recipe.replace("nn.Linear(16, 1)", "nn.Linear(16, 2)").replace(
        "return nn.functional.mse_loss(model(x).squeeze(1), y)\n    def train",
        "h = model(x).float()\n        return ((h[:, 0] - y) ** 2).mean() * 1e-3 + h[:, 1].mean() * 30\n    def train",
    )
    code = code.replace("model(x).squeeze(1)", "model(x)[:, 0]")
    ddp, fsdp = (
        train("--precision", "16-mixed", "--nproc", "2", "--strategy", strategy, code=code, run=strategy)
        for strategy in ("ddp", "fsdp")
    )
    assert (ddp.code, fsdp.code) == (0, 0), ddp.err + fsdp.err
    scales = [[line["scale"] for line in done.lines if "loss" in line] for done in (ddp, fsdp)]
    assert scales[0][0] > scales[0][-1]
    assert scales[0] == scales[1]
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-2)


@pytest.mark.parametrize("options", [("--nproc", "1"), ("--nproc", "2", "--strategy", "fsdp")])
def test_a_run_that_ended_before_a_step_was_taken_goes_on(train: Train, recipe: str, options: tuple[str, ...]) -> None:
    """The scaler skips the first ones, so that the optimizer has no state yet."""
    loss = "return nn.functional.mse_loss(model(x).squeeze(1), y)"
    code = recipe.replace(loss, f"{loss} * 1e3")
    whole = train("--precision", "16-mixed", "--steps", "20", *options, code=code)
    train("--precision", "16-mixed", "--steps", "5", *options, code=code, run="other")
    other = train("--precision", "16-mixed", "--steps", "20", *options, code=code, run="other")
    assert other.code == 0, other.err
    assert other.lines == whole.lines


def test_a_parameter_that_never_had_a_gradient_doesnt_keep_a_run_from_going_on(train: Train, recipe: str) -> None:
    unused = "class Unused(nn.Identity):\n    def __init__(self):\n        super().__init__()\n"
    unused += "        self.weight = nn.Parameter(torch.zeros(1))\n\nclass Fit"
    code = noisy(recipe).replace("class Fit", unused).replace("nn.GELU()", "nn.GELU(), Unused()")
    whole = train(code=code)
    train("--steps", "3", code=code, run="other")
    other = train(code=code, run="other")
    assert other.code == 0, other.err
    assert other.lines == whole.lines


def test_a_module_that_stays_in_float32_is_named_rightly(train: Train, undisturbed: Train) -> None:
    full = undisturbed()
    island = train("--precision", "bf16-mixed", "--fp32-module", "0", "--fp32-module", "3", run="islands")
    assert island.code == 0, island.err
    assert island.losses == pytest.approx(full.losses, rel=1e-2)
    done = train("--precision", "bf16-mixed", "--fp32-module", "head", run="none")
    assert done.code == 2
    assert "the model has no module of that name" in done.err


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_curves_for_tensorboard(train: Train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = train("--tensorboard")
    assert done.code == 0, done.err
    events = EventAccumulator(str(done.run / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(done.losses, rel=1e-6)
    assert [event.step for event in events.Scalars("mse")] == [7, 14]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "1", "--epochs", "1"), "exclude each other"),
        (("--nodes", "2"), "--nodes and --rdzv need each other"),
        (("--nproc", "2", "--strategy", "single"), "is one process, not 2"),
        (("--nproc", "17"), "batch_size is 16 for 17 processes"),
        (("--rehearse",), "-o is of a run, and --rehearse trains nothing"),
    ],
)
def test_wrong_use_is_said_before_anything_is_written(train: Train, options: tuple[str, ...], message: str) -> None:
    done = train(*options)
    assert done.code == 2
    assert message in done.err
    assert not done.run.exists()


def test_a_run_goes_on_for_more_epochs(train: Train) -> None:
    whole = train("--epochs", "3")
    assert train(run="longer").code == 0
    assert train("--epochs", "3", run="longer").lines == whole.lines


def test_a_scheduler_goes_as_far_as_the_epochs_that_are_asked_for(train: Train, recipe: str) -> None:
    code = recipe.replace(
        "CosineAnnealingLR(optimizer, 20)", "OneCycleLR(optimizer, 1e-2, total_steps=7 * self.num_epochs)"
    )
    assert code != recipe
    done = train("--epochs", "3", code=code)
    assert done.code == 0, done.err
    assert done.lines[-2]["lr"] < 1e-4
