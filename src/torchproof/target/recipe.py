"""What the user writes for training: six methods of plain PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from torchproof.errors import TargetError
from torchproof.target.lookup import call, check_complete, defines, find, is_of_class
from torchproof.target.service import Service
from torchproof.target.usercode import import_target
from torchproof.types import Target

REQUIRED = ("model", "optimizer", "loss", "train_data", "eval_data", "metrics")


class Recipe:
    """A training run. Subclass it, override six methods, and add nothing else.

    torchproof calls them and does the rest: devices, ranks, precision, accumulation, checkpoints.

    Attributes:
        batch_size: samples of one optimizer step, those of all processes together.
        num_epochs: how often all of ``train_data`` is seen; what ``--epochs`` says, where it is given.
        max_grad_norm: gradients are scaled down to this norm where it is larger; None leaves them.
        seed: of the weights, the order of the samples and everything else that is random.
    """

    batch_size: ClassVar[int] = 32
    num_epochs: int = 1
    max_grad_norm: ClassVar[float | None] = None
    seed: ClassVar[int] = 0

    def model(self) -> nn.Module:
        """The network, on the CPU."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch: a scalar. Whatever runs forward must be called as ``model(...)``."""
        raise NotImplementedError

    def train_data(self) -> Dataset[Any]:
        """What to train on: a dataset with a length."""
        raise NotImplementedError

    def eval_data(self) -> Dataset[Any]:
        """What to evaluate on: a dataset with a length."""
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        """Means over a batch of ``eval_data``, by name; the model is in eval mode and records no graph."""
        raise NotImplementedError

    def scheduler(self, optimizer: Optimizer) -> Any:
        """A scheduler that is stepped after each optimizer step; None for none."""
        return None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples to a batch."""
        return default_collate(list(samples))


def is_recipe(target: Target) -> bool:
    """Whether it names a Recipe; without a name, whether its file defines one and no Service.

    Raises:
        TargetError: there is no such module.
        UserCodeError: importing it raised.
    """
    if target.kind != "python":
        return False
    module = import_target(target)
    if target.name is not None:
        return is_of_class(getattr(module, target.name, None), Recipe)
    return defines(module, Recipe) and not defines(module, Service)


def open_recipe(target: Target) -> Recipe:
    """The user's recipe.

    Raises:
        TargetError: the name isn't there, it is no Recipe, or lacks a method.
        UserCodeError: the user's code raised.
    """
    if target.kind != "python":
        raise TargetError(f"{target.reference} is a saved model, no tp.Recipe", help="name a file: path/to/recipe.py")
    name, value = find(import_target(target), target, Recipe)
    recipe = value if isinstance(value, Recipe) or not callable(value) else call(value, name, target)
    if not isinstance(recipe, Recipe):
        raise TargetError(
            f"{target.reference} is a {type(recipe).__name__}, no tp.Recipe", help="subclass tp.Recipe, and name that"
        )
    check_complete(recipe, name, Recipe, REQUIRED, f"a Recipe has {', '.join(REQUIRED[:-1])} and {REQUIRED[-1]}")
    return recipe
