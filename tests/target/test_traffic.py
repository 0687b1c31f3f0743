"""A traffic file is read line by line, and what is wrong with it is said with the line's number."""

import codecs
from pathlib import Path

import pytest

from torchproof.errors import TrafficError
from torchproof.target.traffic import MAX_REQUESTS, read_traffic


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_blank_lines_count_but_hold_no_request(file: Path) -> None:
    """The numbers are the editor's."""
    file.write_text('{"a": 1}\n\n  \n[2]\n"three"')
    assert read_traffic(file) == [(1, {"a": 1}), (4, [2]), (5, "three")]


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_other_systems_write(file: Path, end: str, mark: bytes) -> None:
    """Windows line ends, a byte order mark, and text beyond ASCII; U+2028 ends no line."""
    file.write_bytes(mark + end.join(['{"text": "Zürich"}', '"日本\u2028語"', ""]).encode())
    assert read_traffic(file) == [(1, {"text": "Zürich"}), (2, "日本\u2028語")]


@pytest.mark.parametrize("line", [b"{'a': 1}", b'{"a": 1', b"NaN", b"\xff\xfe", b'"\xff"', b'{"a": 1} {"a": 2}'])
def test_a_broken_line_is_named(file: Path, line: bytes) -> None:
    file.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(TrafficError, match=r"requests\.jsonl, line 3: not JSON: "):
        read_traffic(file)


@pytest.mark.parametrize("content", ["", "\n \n\r\n"])
def test_a_file_without_a_request(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(TrafficError, match="no request in it"):
        read_traffic(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="no such file or directory"):
        read_traffic(tmp_path / "gone.jsonl")
    with pytest.raises(TrafficError, match="is a directory"):
        read_traffic(tmp_path)


@pytest.mark.parametrize("extra", [0, 1, MAX_REQUESTS, 12345])
def test_a_long_file_is_sampled_evenly(file: Path, extra: int) -> None:
    """At most MAX_REQUESTS, each once, in order, from the first line to the last stretch."""
    num = MAX_REQUESTS + extra
    file.write_text("".join(f"{i}\n" for i in range(num)))
    requests = read_traffic(file)
    numbers = [number for number, _ in requests]
    assert len(requests) == MAX_REQUESTS
    assert numbers == sorted(set(numbers))
    assert all(value == number - 1 for number, value in requests)
    assert numbers[0] == 1
    assert numbers[-1] > num - num / MAX_REQUESTS - 1


def test_a_broken_line_is_found_where_it_would_not_be_sampled(file: Path) -> None:
    """Otherwise a file would be good or bad by its length."""
    lines = [str(i) for i in range(2 * MAX_REQUESTS)]
    lines[1] = "{"
    file.write_text("\n".join(lines))
    with pytest.raises(TrafficError, match="line 2:"):
        read_traffic(file)
