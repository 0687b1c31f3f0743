"""Loads what each rank is given, with random numbers that follow from the samples and not from the process."""

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from torchproof.errors import TargetError
from torchproof.target.recipe import Recipe
from torchproof.target.usercode import user_code
from torchproof.train.order import Share
from torchproof.types.training import Loading


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's random numbers start from this seed inside, and go on as before after it."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_all(seed: int) -> None:
    """Python's, torch's and, where they are in use, numpy's and CUDA's global generators.

    ``torch.manual_seed`` would format the stack each time, for a CUDA that may be initialized one day.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class _Shared(Dataset[Any]):
    """The user's dataset, asked for a share at a time; DataLoader calls ``__getitems__`` where there is one."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, share: Share) -> Sequence[Any]:
        seed_all(share.seed)  # and nothing goes on from where it was: the loop seeds again after each batch
        if several := getattr(self.dataset, "__getitems__", None):
            samples: Sequence[Any] = several(list(share.indices))
            return samples
        return [self.dataset[index] for index in share.indices]


class Plan(Sampler[Share]):
    """The shares that a loader goes through next; set ``shares`` before each ``iter(loader)``."""

    def __init__(self) -> None:
        self.shares: Sequence[Share] = ()

    def __iter__(self) -> Iterator[Share]:
        return iter(self.shares)

    def __len__(self) -> int:
        return len(self.shares)


def open_data(recipe: Recipe, name: str) -> tuple[Dataset[Any], int]:
    """The dataset that ``train_data`` or ``eval_data`` returns, and its length.

    Raises:
        TargetError: it has no length, or none to speak of.
        UserCodeError: the user's code raised.
    """
    with user_code(f"{name}()"):
        dataset = getattr(recipe, name)()
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TargetError(
                f"{name}() returned a {type(dataset).__name__}, which has no length",
                help="return a dataset with __len__ and __getitem__: ranks share out its indices",
            )
        length = len(dataset)
    if not length:
        raise TargetError(f"{name}() is empty", help="return a dataset with samples in it")
    return dataset, length


def make_loader(
    recipe: Recipe, dataset: Dataset[Any], loading: Loading, *, pin_memory: bool
) -> tuple[DataLoader[Any], Plan]:
    """A loader of shares, and the plan that says which."""
    plan = Plan()
    workers: dict[str, Any] = {}
    if loading.num_workers:
        workers = {"prefetch_factor": loading.prefetch_factor, "persistent_workers": loading.persistent_workers}
    loader: DataLoader[Any] = DataLoader(
        _Shared(dataset),
        batch_sampler=plan,  # type: ignore[arg-type] # _Shared takes a share where others take a list
        collate_fn=recipe.collate,
        num_workers=loading.num_workers,
        pin_memory=pin_memory and loading.pin_memory,
        generator=torch.Generator(),  # its own, so that starting workers takes no number from the model's
        **workers,
    )
    return loader, plan


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in lists, tuples and mappings, and whatever has a ``to()``, moved; the rest as it is."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(part, device) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(part, device) for part in value)
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    return value
