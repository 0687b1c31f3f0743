"""Short hashes of what a user's objects hold, which are the same in every process."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

SCALARS = (str, bytes, int, float, complex, bool, type(None))
MAX_DEPTH = 8  # an object may hold itself
MAX_PARTS = 1 << 16  # and, as a logger does, much that is not its own


def digest(value: Any) -> str:
    """One hash of all parts of a value."""
    return _hash("all", "".join(parts(value)).encode())


def parts(value: Any) -> Iterator[str]:
    """A hash of each part of a sample and its place in it, in order; at most ``MAX_PARTS``.

    Parts are tensors, arrays, images, numbers, strings and lists of these. What can't be looked into counts by its type
    alone: its ``repr`` may hold an address.
    """
    return itertools.islice(_parts(value, "", 0), MAX_PARTS)


def _parts(value: Any, place: str, depth: int) -> Iterator[str]:
    """One hash at least from each call, so that their limit is one of the work."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
        value = value.tolist()  # its bytes are addresses
    kind = f"{place} {type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        yield _hash_tensor(value, place)
    elif isinstance(value, np.ndarray | np.generic):
        yield _hash(f"{kind} {value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes())
    elif _is_plain(value):
        yield _hash(kind, _repr(value).encode())
    elif not isinstance(value, Mapping | type) and callable(getattr(value, "tobytes", None)):  # an image of Pillow
        yield _hash(f"{kind} {getattr(value, 'size', '')}", value.tobytes())
    elif depth < MAX_DEPTH and (held := _held(value)):
        for name, member in held:
            yield from _parts(member, f"{place}/{name}", depth + 1)
    else:
        yield _hash(kind, b"")


def _is_plain(value: Any) -> bool:
    """Whether its ``repr`` says what it is."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(isinstance(member, SCALARS) for member in value)
    return isinstance(value, SCALARS)


def _repr(plain: Any) -> str:
    """The same in every process; the order of a set is not."""
    return str(sorted(map(repr, plain))) if isinstance(plain, set | frozenset) else repr(plain)


def _held(value: Any) -> list[tuple[str, Any]]:
    """What is inside, by name; nothing where that can't be told."""
    if isinstance(value, Mapping):
        return [(_repr(key) if _is_plain(key) else type(key).__qualname__, value[key]) for key in value]
    if isinstance(value, list | tuple):
        return [(str(index), member) for index, member in enumerate(value)]
    if isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        return sorted(vars(value).items())
    return []


def tensors(model: nn.Module, *, buffers: bool) -> dict[str, tuple[str, str]]:
    """Shape and hash of each parameter, and of each buffer, by name."""
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    return {name: (f"{tensor.dtype}{tuple(tensor.shape)}", _hash_tensor(tensor)) for name, tensor in named}


def stored(state: Mapping[str, Any]) -> dict[str, str]:
    """A hash of each value of a nested state_dict, by its path."""
    found: dict[str, str] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{path}": hashed for path, hashed in stored(value).items()}
        else:
            found[str(key)] = digest(value)
    return found


def attributes(model: nn.Module, optimizer: Optimizer, recipe: object) -> dict[str, str]:
    """A hash of each plain attribute that the user's classes have put on model, optimizer and recipe, by its path."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        found |= _own(f"model.{path}" if path else "model", module, vars(nn.Module()).keys())
    known = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {"step", "_opt_called"}
    return found | _own("optimizer", optimizer, known) | _own("recipe", recipe, ())


def _own(path: str, owner: object, known: Any) -> dict[str, str]:
    return {
        f"{path}.{name}": digest(value)
        for name, value in vars(owner).items()
        if name not in known and not callable(value) and not isinstance(value, nn.Module)
    }


def _hash_tensor(tensor: torch.Tensor, place: str = "") -> str:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    flat = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _hash(f"{place} {tensor.dtype}{tuple(tensor.shape)}", flat.view(torch.uint8).numpy().tobytes())


def _hash(kind: str, data: bytes) -> str:
    hashed = hashlib.blake2b(kind.encode() + b"\0", digest_size=8)
    hashed.update(data)
    return hashed.hexdigest()
