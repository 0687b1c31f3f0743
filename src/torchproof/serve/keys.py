"""API keys: who may ask."""

import hashlib
import hmac
import logging
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

from torchproof.errors import UsageError

log = logging.getLogger("torchproof.serve")

# 16 characters of hex are 64 bits: at a million guesses a second, 290,000 years for half of them.
MIN_LENGTH = 16
_VISIBLE = re.compile(r"[!-~]+")  # what a header carries unchanged


class Keys:
    """The keys of a file; only their hashes are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a key is in ``Authorization: Bearer`` or ``X-API-Key``.

        Takes as long for a wrong key as for a right one: hashes of one length are compared in constant time, and all of
        them, wherever one fits.

        Args:
            headers: as ASGI has them, names in lower case.
        """
        allowed = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, value = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name != b"x-api-key":
                continue
            sent = hashlib.sha256(value.strip()).digest()
            for known in self._hashes:
                allowed |= hmac.compare_digest(sent, known)
        return allowed


def read_keys(path: Path) -> Keys:
    """The keys in a file: one a line; blank lines and lines that start with ``#`` are left out.

    For a reload it is read again: where that raises, the keys before it stay.

    Raises:
        UsageError: there is no such file, it can't be read, it has no key, or a line is none. Never names a key.
    """
    make = f"python3 -c 'import secrets; print(secrets.token_urlsafe(32))' >> {shlex.quote(str(path))}"
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text", help="write one key a line, in ASCII") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", help=f"make it, with a key: {make}") from None
    except OSError as exc:
        message = f"{path}: {(exc.strerror or str(exc)).lower()}"
        raise UsageError(message, help="name a file that this user may read") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _VISIBLE.fullmatch(line):
            raise UsageError(
                f"{path}, line {number}: a key is visible ASCII without spaces",
                help="one key a line; a comment has a line of its own and starts with #",
            )
        if len(line) < MIN_LENGTH:
            raise UsageError(
                f"{path}, line {number}: the key has {len(line)} characters, the least is {MIN_LENGTH}",
                help=f"make another: {make}",
            )
        keys.append(line)
    if not keys:
        raise UsageError(f"{path} has no key, so nobody could ask", help=f"make one: {make}")
    if mode & stat.S_IROTH:
        log.warning("%s can be read by every user of this machine: chmod o-r %s", path, path)
    return Keys(keys)
