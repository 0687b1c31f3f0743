"""A request is let in with one of the keys and with nothing else; a file that lets nobody or anybody in is refused."""

import hmac
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.errors import UsageError
from torchproof.serve.keys import MIN_LENGTH, Keys, read_keys

ONE = "0123456789abcdef"
TWO = "fedcba9876543210-and-more"


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"localhost"), (b"authorization", f"{scheme} {key}".encode())]


def keys_in(folder: Path, text: str | bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("key", [ONE, TWO])
def test_each_key_is_let_in(key: str) -> None:
    """In either header; the scheme's case doesn't matter (RFC 9110), and neither do spaces around the key."""
    keys = Keys([ONE, TWO])
    assert keys.allows(bearer(key))
    assert keys.allows(bearer(key, "bearer"))
    assert keys.allows(bearer(f" {key} "))
    assert keys.allows([(b"x-api-key", key.encode())])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", ONE.encode())],
        bearer(""),
        bearer(ONE[:-1]),
        bearer(ONE + "0"),
        bearer(ONE.upper()),
        bearer(f"{ONE} {TWO}"),
        bearer(f"{ONE}\n{TWO}"),
        bearer(ONE, "Basic"),
        [(b"authorization", ONE.encode())],
        [(b"authorization", b"Bearer" + ONE.encode())],
        [(b"x-api-key", b"Bearer " + ONE.encode())],
        [(b"x-api-key", b"\xff\x00")],
        [(b"cookie", b"x-api-key=" + ONE.encode())],
    ],
)
def test_nothing_else_is(headers: list[tuple[bytes, bytes]]) -> None:
    assert not Keys([ONE, TWO]).allows(headers)


def test_one_right_header_is_enough() -> None:
    """A proxy's own Authorization doesn't shut out a client that sends X-API-Key."""
    proxied = bearer("somebody-else's-token")
    assert Keys([ONE]).allows([*proxied, (b"x-api-key", ONE.encode())])
    assert Keys([ONE]).allows([(b"x-api-key", ONE.encode()), *proxied])


VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=MIN_LENGTH, max_size=40)


@given(st.lists(VISIBLE, min_size=1, max_size=4), VISIBLE, st.data())
def test_a_key_is_let_in_exactly_when_it_is_one_of_them(known: list[str], other: str, data: st.DataObject) -> None:
    sent = data.draw(st.sampled_from([*known, other, known[0][:-1], known[0] + "x"]))
    assert Keys(known).allows(bearer(sent)) == (sent in known)


def test_a_wrong_key_takes_as_long_as_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, wherever one fits, and what is compared has one length: time tells nothing."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys([ONE, TWO, ONE + TWO])
    for sent in (ONE, TWO, ONE + TWO, "no", "n" * 1000):
        compared.clear()
        keys.allows(bearer(sent))
        assert compared == [(32, 32)] * 3, sent


def test_keys_are_not_kept() -> None:
    """What is in memory, a crash's dump included, is their hashes."""
    assert ONE not in repr(vars(Keys([ONE])))
    assert ONE.encode() not in b"".join(Keys([ONE])._hashes)


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    """Comments, blank lines, spaces around a key and Windows' line ends are no part of one."""
    text = f"# who: the batch job\n{ONE}\r\n\n  # until June\n  {TWO}\t\n"
    keys = read_keys(keys_in(tmp_path, text))
    assert keys.allows(bearer(ONE))
    assert keys.allows(bearer(TWO))
    assert not keys.allows(bearer("# who: the batch job"))


def test_a_reload_takes_keys_in_and_out(tmp_path: Path) -> None:
    """The file is read again into new keys; those before it stay as they were."""
    path = keys_in(tmp_path, ONE)
    before = read_keys(path)
    path.write_text(TWO)
    after = read_keys(path)
    assert before.allows(bearer(ONE))
    assert not after.allows(bearer(ONE))
    assert after.allows(bearer(TWO))


def test_the_shortest_key(tmp_path: Path) -> None:
    assert read_keys(keys_in(tmp_path, "k" * MIN_LENGTH)).allows(bearer("k" * MIN_LENGTH))
    with pytest.raises(UsageError, match=f"line 2: the key has {MIN_LENGTH - 1} characters, the least is"):
        read_keys(keys_in(tmp_path, "\n" + "k" * (MIN_LENGTH - 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key, so nobody could ask"),
        ("# nothing yet\n\n", "has no key, so nobody could ask"),
        (f"{ONE} # the batch job", "line 1: a key is visible ASCII without spaces"),
        (f"{ONE}\n{TWO}é", "line 2: a key is visible ASCII without spaces"),
        (b"\xff\xfe0\x001\x00", "is no text"),
    ],
)
def test_a_file_that_is_none_of_keys(tmp_path: Path, text: str | bytes, message: str) -> None:
    """The error has the file and a cure, and never a key: it goes to a log."""
    path = keys_in(tmp_path, text)
    with pytest.raises(UsageError, match=message) as caught:
        read_keys(path)
    assert str(caught.value).startswith(str(path))
    assert caught.value.help
    assert ONE not in str(caught.value) + caught.value.help


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The cure can be pasted: it makes a file that is accepted."""
    with pytest.raises(UsageError, match="no such file") as caught:
        read_keys(tmp_path / "my keys")
    assert f">> '{tmp_path}/my keys'" in caught.value.help
    with pytest.raises(UsageError, match="is a directory"):
        read_keys(tmp_path)


@pytest.mark.parametrize(("mode", "is_warned"), [(0o644, True), (0o640, False), (0o600, False)])
def test_a_file_that_everybody_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    """A warning, no refusal: in a container nobody else is there. A group may be meant to read it."""
    path = keys_in(tmp_path, ONE)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING, "torchproof"):
        read_keys(path)
    assert ("can be read by every user" in caplog.text) == is_warned
    assert ONE not in caplog.text
