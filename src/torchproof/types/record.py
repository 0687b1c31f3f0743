"""The base of every stored value, and its strict JSON form."""

from typing import TypeVar, dataclass_transform

import msgspec

from torchproof.errors import UsageError


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for type checkers: subclasses inherit both
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value. Unknown keys, missing keys and wrong types are errors that name the path."""


R = TypeVar("R")


def encode(value: object) -> str:
    """Indented JSON with a fixed key order, so that two stored results can be compared with diff."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def decode(text: str | bytes, type_: type[R], *, what: str) -> R:
    """Inverse of ``encode``.

    Args:
        what: names the text in the error ("minilm.tp/proof.json").

    Raises:
        UsageError: not JSON, or not of this shape; names the key's path.
    """
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.DecodeError as exc:
        lowered = str(exc)[:1].lower() + str(exc)[1:]
        raise UsageError(f"{what}: {lowered}", help="write it again with the command that made it") from None
