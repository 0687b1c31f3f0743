"""Which name of the user's file is the Service, and what its samples have to be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchproof.errors import TargetError, TrafficError, UserCodeError
from torchproof.target.resolve import resolve
from torchproof.target.service import Service
from torchproof.target.subject import load_module, make_subject, open_service, sample_requests

Write = Callable[..., Path]

TWO = """
LIMIT = 3

class Base(tp.Service):
    annotation = None
    def load(self):
        return nn.Linear(2, 2)
    def encode(self, request):
        return torch.tensor(request)
    def decode(self, outputs, request):
        return outputs.tolist()
    def samples(self):
        return [[1.0, 2.0]]

class Ranker(Base):
    pass
"""

ONE = TWO.replace("class Ranker(Base):\n    pass\n", "") + "ready = Base()\n"


def opened(path: Path, name: str = "") -> Service:
    return open_service(resolve(f"{path}:{name}" if name else str(path)))


def refused(path: Path, name: str = "") -> TargetError:
    with pytest.raises(TargetError) as caught:
        opened(path, name)
    return caught.value


def test_the_only_service_needs_no_name(write: Write) -> None:
    """The base class that was imported to derive from does not count."""
    path = write("from torchproof import Service\n" + ONE.replace("ready = Base()\n", ""))
    assert type(opened(path)).__name__ == "Base"


def test_without_a_name_two_services_are_one_too_many(write: Write) -> None:
    error = refused(write(TWO))
    assert str(error).endswith("app.py defines Base, Ranker")
    assert error.help.endswith("app.py:NAME (there: Base, Ranker)")


def test_without_a_name_a_factory_is_not_guessed(write: Write) -> None:
    error = refused(write("def net():\n    return nn.Linear(2, 2)\n"))
    assert str(error).endswith("app.py defines no tp.Service")
    assert error.help.endswith("app.py:NAME (there: net)")


def test_a_name_that_is_not_there_suggests_the_closest(write: Write) -> None:
    error = refused(write(TWO), "Rankr")
    assert str(error).endswith("app.py has no 'Rankr'")
    assert error.help == "did you mean Ranker? names there: LIMIT, Base, Ranker"
    assert refused(write(TWO), "zzz").help == "names there: LIMIT, Base, Ranker"
    assert refused(write("", "empty.py", header=""), "Net").help == "names there: none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LIMIT", "app.py:LIMIT is a int, no Service"),
        ("number", "app.py:number gives a int"),
        ("Plain", "app.py:Plain gives a Plain"),
        ("triple", "app.py:triple gives a tuple"),
    ],
)
def test_what_is_no_service(write: Write, name: str, message: str) -> None:
    path = write("LIMIT = 3\nclass Plain: pass\ndef number(): return 3\ndef triple(): return nn.Identity(), [], 1\n")
    error = refused(path, name)
    assert str(error).endswith(message)
    assert error.help.startswith("a target is a tp.Service, or a function that returns (nn.Module, example inputs)")


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("class Net(tp.Service):\n    def __init__(self, width, *, depth, seed=0): pass\n", "width, depth"),
        ("def Net(width): return nn.Linear(width, 2)\n", "width"),
        ("class Net(nn.Module):\n    def __init__(self, width): pass\n", "width"),
    ],
)
def test_what_needs_arguments(write: Write, code: str, needed: str) -> None:
    """Nobody could give them."""
    assert str(refused(write(code), "Net")).endswith(f"app.py:Net takes arguments: {needed}")


def test_arguments_with_defaults_are_none(write: Write) -> None:
    path = write("def net(width=2, *args, **kwargs):\n    return nn.Linear(width, 2), torch.ones(1, width)\n")
    assert isinstance(opened(path, "net").load(), torch.nn.Linear)


def test_an_instance_is_taken_as_it_is(write: Write) -> None:
    path = write(ONE + "ready.mark = 1\n")
    assert opened(path, "ready").mark == 1  # type: ignore[attr-defined]


def test_a_factory_may_give_a_service(write: Write) -> None:
    assert type(opened(write(TWO + "def make(): return Ranker()\n"), "make")).__name__ == "Ranker"


@pytest.mark.parametrize("method", ["load", "encode", "decode"])
def test_a_method_that_nobody_wrote(write: Write, method: str) -> None:
    """It is named, in place of a NotImplementedError from inside torchproof."""
    path = write(TWO.replace(f"def {method}(", f"def other_{method}("))
    assert str(refused(path, "Ranker")) == f"Ranker has no {method}()"


def test_samples_that_nobody_wrote(write: Write, tmp_path: Path) -> None:
    """They are needed only where there is no traffic file."""
    service = opened(write(TWO.replace("def samples(", "def other(")), "Ranker")
    with pytest.raises(TargetError, match=r"Ranker has no samples\(\)"):
        sample_requests(service, None)
    (tmp_path / "requests.jsonl").write_text("[1.0, 2.0]\n")
    assert sample_requests(service, tmp_path / "requests.jsonl")[1] == [("requests.jsonl, line 1", [1.0, 2.0])]


@pytest.mark.parametrize("value", ["[]", "iter(())", "()"])
def test_samples_must_not_be_empty(write: Write, value: str) -> None:
    service = opened(write(TWO.replace("return [[1.0, 2.0]]", f"return {value}")), "Ranker")
    with pytest.raises(TargetError, match=r"^samples\(\) is empty$"):
        sample_requests(service, None)


def test_samples_may_be_a_generator(write: Write) -> None:
    """It is run once, and an error inside it is the user's."""
    good = opened(write(TWO.replace("return [[1.0, 2.0]]", "yield [1.0, 2.0]; yield [3.0, 4.0]")), "Ranker")
    assert sample_requests(good, None) == ("samples()", [("sample 0", [1.0, 2.0]), ("sample 1", [3.0, 4.0])])
    bad = opened(write(TWO.replace("return [[1.0, 2.0]]", "yield [1.0, 2.0]; 1 / 0"), "bad.py"), "Ranker")
    with pytest.raises(UserCodeError, match=r"samples\(\) raised ZeroDivisionError"):
        sample_requests(bad, None)


ANNOTATIONS = {
    "Data": "import dataclasses\n@dataclasses.dataclass\nclass Data:\n    width: int\n",
    "Typed": "from typing import TypedDict\nclass Typed(TypedDict):\n    width: int\n",
    "Record": "import msgspec\nclass Record(msgspec.Struct):\n    width: int\n",
}


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_samples_fit_the_annotation(write: Write, tmp_path: Path, name: str) -> None:
    """Dicts become the annotated class; what doesn't fit is named, with its number, in samples and in traffic."""
    code = ANNOTATIONS[name] + TWO.replace("request):", f"request: {name}):", 1)
    service = opened(write(code.replace("[[1.0, 2.0]]", "[{'width': 3}, {'width': 'wide'}]")), "Ranker")
    with pytest.raises(TargetError, match=r"^sample 1 of samples\(\): Expected `int`, got `str` - at `\$.width`$"):
        sample_requests(service, None)
    traffic = tmp_path / "requests.jsonl"
    traffic.write_text('{"width": 3}\n\n{"width": 4}\n')
    (_, first), (where, _) = sample_requests(service, traffic)[1]
    assert (first if isinstance(first, dict) else {"width": first.width}) == {"width": 3}
    assert where == "requests.jsonl, line 3"
    traffic.write_text('{"width": 3}\n\n{"width": "wide"}\n')
    with pytest.raises(TrafficError, match=r"requests.jsonl, line 3: Expected `int`, got `str` - at `\$.width`$"):
        sample_requests(service, traffic)


def test_load_must_give_a_module(write: Write) -> None:
    service = opened(write(TWO.replace("return nn.Linear(2, 2)", "return 'net'")), "Ranker")
    with pytest.raises(TargetError, match=r"load\(\) returned a str"):
        load_module(service)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1.0]", r"encode\(\) of sample 0 returned a float for 'input'"),
        ("3", r"encode\(\) of sample 0 returned a int"),
        ("None", r"encode\(\) of sample 0 returned a NoneType"),
        ("{'x': [1.0]}", r"encode\(\) of sample 0 returned a list for 'x'"),
        ("{}", r"encode\(\) of sample 0 returned no tensor"),
        ("()", r"encode\(\) of sample 0 returned no tensor"),
    ],
)
def test_encode_must_give_tensors(write: Write, value: str, message: str) -> None:
    path = write(TWO.replace("return torch.tensor(request)", f"return {value}"))
    target = resolve(f"{path}:Ranker")
    service = open_service(target)
    with pytest.raises(TargetError, match=message):
        make_subject(target, service, service.load(), *sample_requests(service, None))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("torch.ones(2)", ["input"]),
        ("(torch.ones(2),)", ["input"]),
        ("{'other': torch.ones(2)}", ["other"]),
        ("[torch.ones(2), torch.ones(2)]", ["input", "input1"]),
    ],
)
def test_tensors_get_the_names_of_forward(write: Write, value: str, names: list[str]) -> None:
    path = write(TWO.replace("return torch.tensor(request)", f"return {value}"))
    target = resolve(f"{path}:Ranker")
    service = open_service(target)
    subject = make_subject(target, service, service.load(), *sample_requests(service, None))
    assert [list(row) for row in subject.rows] == [names]
