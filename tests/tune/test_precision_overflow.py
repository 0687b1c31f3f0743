"""What float16 can't hold is found by operation, module and line; what only looks like it is not."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchproof.target.resolve import resolve
from torchproof.tune.precision.overflow import OverflowFinder
from torchproof.tune.precision.processes import Processes, dry_run
from torchproof.types.precision import DryRun, Overflow
from torchproof.types.training import TrainRequest

Act = Callable[[Tensor], Tensor]
GUARD_S = 120.0


class Block(nn.Module):
    """Linear layers with something between them."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(4, 8), nn.Linear(8, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-4 * self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(torch.relu), Block(act)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(act: Act, *, find: bool = True, precision: bool = True, loss: Any = None) -> tuple[Tensor, Net, list[Overflow]]:
    """One step under autocast to bfloat16: its loss, the model with its gradients, and what was found."""
    model = Net(act)
    finder = OverflowFinder(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with finder if find else contextlib.nullcontext():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision):
            value = (loss or (lambda y: y.float().pow(2).mean()))(model(x))
        finder.phase = "backward"
        value.backward()
    return value.detach(), model, list(finder.found.values())


def found(act: Act, **options: Any) -> list[tuple[str, str, str]]:
    return [(o.phase, o.module, o.op) for o in run(act, **options)[2]]


def scaled_to(largest: float, h: Tensor) -> Tensor:
    """Reaches this absolute value in the lower precision."""
    return h * (largest / h.detach().abs().max().item())


def test_an_operation_between_modules_is_found_with_its_line() -> None:
    """The outputs of the modules are small: hooks on modules miss it."""
    (overflow,) = run(lambda h: scaled_to(1e5, h) * 1e-6)[2]
    assert (overflow.phase, overflow.module, overflow.op) == ("forward", "blocks.1", "aten.mul.Tensor")
    assert overflow.largest == pytest.approx(1e5, rel=0.01)
    file, line = overflow.line.split(":")
    assert file == Path(__file__).name
    assert "largest / h.detach()" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_the_cast_of_a_large_float32_value_is_found_at_the_module_that_takes_it() -> None:
    (overflow,) = run(lambda h: scaled_to(1e5, h.float()))[2]
    assert (overflow.module, overflow.op) == ("blocks.1.down", "aten._to_copy.default")


def test_what_carries_a_large_value_on_is_no_second_overflow() -> None:
    def act(h: Tensor) -> Tensor:
        return (scaled_to(1e5, h).view(8, 3).t().contiguous() * 0.9).reshape(3, 8) * 1e-6

    assert [op for _, _, op in found(act)] == ["aten.mul.Tensor"]


def test_a_change_in_place_is_found() -> None:
    def act(h: Tensor) -> Tensor:
        return h.clone().mul_(1e5 / h.detach().abs().max().item()) * 1e-6

    assert found(act) == [("forward", "blocks.1", "aten.mul_.Tensor")]


def test_a_gradient_that_no_scale_above_one_can_hold_is_found_in_its_module() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 1e12

    assert found(lambda h: Steep.apply(h))[0] == ("backward", "blocks.1", "aten.mul.Tensor")  # type: ignore[no-untyped-call]


def masked(h: Tensor) -> Tensor:
    return h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1)


def infinite(h: Tensor) -> Tensor:
    return h.masked_fill(h < 0, -torch.inf).relu()


NEAR_MISSES: dict[str, Act] = {
    "60000 in the lower precision": lambda h: scaled_to(6e4, h) * 1e-5,
    "60000 in float32": lambda h: scaled_to(6e4, h.float()) * 1e-5,
    "a million in float32": lambda h: scaled_to(1e6, h.float()) * 1e-6,
    "within rounding above the limit": lambda h: scaled_to(65600.0, h) * 1e-5,
    "an operation that autocast leaves in float32": lambda h: F.mse_loss(h * 1e4, h * -1e4) * 1e-9 + h,
    "a mask with the smallest number": masked,
    "a mask with infinity": infinite,
    "whole numbers": lambda h: h + torch.arange(99990, 99998).clamp(max=1),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_not_found(name: str) -> None:
    assert found(NEAR_MISSES[name]) == []


def test_memory_that_nothing_was_written_to_is_not_found() -> None:
    """torch.empty_like() returns what was just freed there: large numbers that nobody computed."""
    freed = [torch.full((3, 8), 3e38, dtype=torch.bfloat16) for _ in range(200)]
    largest = 0.0

    def act(h: Tensor) -> Tensor:
        nonlocal largest
        while freed:
            freed.pop()
            largest = max(largest, torch.empty_like(h).float().abs().nan_to_num().max().item())
        return h

    assert found(act) == []
    assert largest > 1e38, "no memory was used again, so that nothing was shown"


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, :, :, None], x[:, :, None, None]),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], x[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "gru": lambda x: nn.GRU(4, 4)(x)[0],
    "softmax of linear": lambda x: F.linear(x, x).softmax(-1),
    "layer_norm of linear": lambda x: F.layer_norm(F.linear(x, x), (4,)),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(F.linear(x, x)),
    "exp": lambda x: F.linear(x, x).exp(),
    "pow": lambda x: F.linear(x, x).pow(2),
    "sum": lambda x: F.linear(x, x).sum(),
    "prod": lambda x: F.linear(x, x).prod(),
    "mse_loss": lambda x: F.mse_loss(F.linear(x, x), x),
    "cross_entropy": lambda x: F.cross_entropy(F.linear(x, x), torch.arange(4)),
    "cat": lambda x: torch.cat([F.linear(x, x), x]),
    "norm": lambda x: F.linear(x, x).norm(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_runs_the_same_operations_low_in_both_types(name: str) -> None:
    """What all of this rests on: what is bfloat16 under one is float16 under the other."""
    low = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype), torch.no_grad():
            low.append(LAYERS[name](torch.eye(4)).dtype == dtype)
    assert low[0] == low[1]


def test_a_run_in_float32_has_nothing_to_find() -> None:
    assert found(lambda h: scaled_to(1e8, h), precision=False) == []


@pytest.mark.parametrize("precision", [False, True])
@pytest.mark.parametrize("act", [F.gelu, lambda h: F.dropout(scaled_to(1e5, h), 0.3) * 1e-6])
def test_what_runs_inside_is_not_changed_by_a_bit(act: Act, precision: bool) -> None:
    plain, plain_model, _ = run(act, find=False, precision=precision)
    seen, seen_model, _ = run(act, precision=precision)
    assert torch.equal(plain, seen)
    for one, other in zip(plain_model.parameters(), seen_model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    def broken(h: Tensor) -> Tensor:
        raise RuntimeError("no")

    before = dict(nn.modules.module._global_forward_hooks), dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(RuntimeError, match="no"):
        run(broken)
    assert (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks) == before


# The dry run of a recipe

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import torchproof as tp

class Block(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gain = gain
    def forward(self, x):
        h = self.up(self.norm(x)) * self.gain
        return x + self.down(BODY)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(1.0), Block(GAIN), Block(1.0)])
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)ROOT

class Fit(tp.Recipe):
    batch_size = 8
    def model(self):
        return Net()
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).squeeze(1).float(), y)
    def train_data(self):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1))
    eval_data = train_data
    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}
"""


def recipe(tmp_path: Path, *, body: str = "h * h / 1e5", gain: str = "400.0", root: str = "") -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("BODY", body).replace("GAIN", gain).replace("ROOT", root))
    return path


@pytest.fixture
def rehearse(tmp_path: Path) -> Callable[..., DryRun]:
    """The dry run of the recipe, in its own process."""

    def rehearsed(**changes: str) -> DryRun:
        processes = Processes(float("inf"))
        processes.left_s = lambda: GUARD_S  # type: ignore[method-assign]
        opened = processes.open(resolve(str(recipe(tmp_path, **changes))), None)
        return dry_run(processes, msgspec.convert(opened["request"], TrainRequest))

    return rehearsed


def test_the_block_that_overflows_is_the_only_island_and_cures_it(rehearse: Callable[..., DryRun]) -> None:
    dry = rehearse()
    assert dry.refusal == ""
    assert {overflow.module for overflow in dry.overflows} == {"blocks.1"}
    assert dry.overflows[0].line.startswith("recipe.py:")
    assert dry.fp32_modules == ("blocks.1",)
    assert dry.loss_32 is not None
    assert dry.loss_16 == pytest.approx(dry.loss_32, rel=0.01)
    assert dry.scale is not None


def test_a_recipe_whose_values_fit_has_no_island(rehearse: Callable[..., DryRun]) -> None:
    dry = rehearse(gain="40.0")
    assert (dry.overflows, dry.fp32_modules, dry.refusal) == ((), (), "")
    assert dry.loss_16 == pytest.approx(dry.loss_32, rel=0.01)
    assert dry.num_batches == 4


def test_an_overflow_that_is_clamped_next_is_none(rehearse: Callable[..., DryRun]) -> None:
    """float16 makes it infinite and the clamp 6, as in float32: nothing differs, so nothing is said."""
    dry = rehearse(body="(h * h).clamp(max=6.0)")
    assert (dry.overflows, dry.fp32_modules, dry.refusal) == ((), (), "")


def test_an_overflow_in_the_models_own_forward_has_no_cure(rehearse: Callable[..., DryRun]) -> None:
    dry = rehearse(gain="1.0", root=" * 1e6 * 1e-6")
    assert {overflow.module for overflow in dry.overflows} == {""}
    assert dry.fp32_modules == ()
    assert dry.loss_16 is None


def test_a_mask_that_float16_does_not_have_is_found_though_16_mixed_ends_with_an_error(
    rehearse: Callable[..., DryRun],
) -> None:
    dry = rehearse(gain="1.0", body="h.masked_fill(h < 0, -1e9).softmax(-1)")
    assert "without overflow" in dry.refusal
    assert {overflow.op for overflow in dry.overflows} == {"aten.masked_fill.Scalar"}
    assert {overflow.module for overflow in dry.overflows} == {"blocks.0", "blocks.1", "blocks.2"}
