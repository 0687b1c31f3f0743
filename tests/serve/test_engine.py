"""A replica answers each job once, with its own answer, whatever else it holds and whatever the user's code does."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchproof as tp
from torchproof.errors import TargetError
from torchproof.serve.canary import OWN_TOLERANCE, Canary
from torchproof.serve.engine import Engine, _finite
from torchproof.serve.facts import schema_of
from torchproof.serve.load import Loaded
from torchproof.serve.lone import Threads
from torchproof.serve.wire import Answer, Broken, Cancel, Job, Message, Started
from torchproof.target.rows import Batch
from torchproof.types import Candidate, Choice, InputSpec, OutputSpec, Signature
from torchproof.types.serving import Caps, Costs

SIGNATURE = Signature(
    inputs=(InputSpec(name="x", dtype="float32", shape=("length",)),),
    outputs=(OutputSpec(name="output", dtype="float32", shape=("length",)),),
    call="keyword",
    output_kind="tensor",
)
CAPS = Caps(max_body_bytes=10_000, max_item_bytes=1_000, max_items=4, max_sizes={"length": 6})
COSTS = Costs(volumes=(1, 6), batch_sizes=(1, 4), seconds=((0.01, 0.011), (0.02, 0.022)))

T = TypeVar("T")

SECRET = "hunter2"
SAID_OF_500 = b"the service raised an error; its log says more"

# Values that make the model misbehave.
RAISES, EXITS, NAN, INF = -1.0, -2.0, -3.0, -4.0


@dataclass
class Numbers:
    """The first value is the job's id."""

    values: list[float]
    do: str = ""


class Forward(NamedTuple):
    ids: list[int]
    length: int


class Encoded(NamedTuple):
    id: int


class Doubling(tp.Service):
    """Its model gives 2x + 1; requests say what goes wrong."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.modes: list[tuple[str, bool]] = []

    def encode(self, request: Numbers) -> Any:
        self.events.append(Encoded(int(request.values[0])))
        self.modes.append(("encode", torch.is_inference_mode_enabled()))
        if request.do == "refuse":
            raise tp.RequestError("these numbers are not liked")
        if request.do == "refuse oddly":
            raise TargetError("not \udc80", help="")
        if request.do == "return float64":
            return torch.tensor(request.values, dtype=torch.float64)
        if request.do == "return a list":
            return request.values
        misbehave(request.do, "encode")
        return torch.tensor(request.values)

    def decode(self, outputs: Tensor, request: Numbers) -> Any:
        self.modes.append(("decode", torch.is_inference_mode_enabled()))
        if request.do == "round":
            return [int(value) for value in outputs.tolist()]
        if request.do == "return a set of objects":
            return object()
        misbehave(request.do, "decode")
        return {"doubled": outputs.tolist()}


def misbehave(do: str, where: str) -> None:
    if do == f"{where} raises":
        raise RuntimeError(SECRET)
    if do == f"{where} raises ValueError":
        raise ValueError(SECRET)
    if do == f"{where} exits":
        raise SystemExit(SECRET)


class Bench:
    """An engine with all that happens to it in ``events``, and a clock that a forward moves by ``forward_s``."""

    def __init__(
        self,
        *,
        max_batch_size: int = 4,
        padding: bool = True,
        wrong: str = "",
        finite: bool = True,
        costs: Costs = COSTS,
        forward_s: float = 0.0,
        threads: Threads | None = None,
    ) -> None:
        self.events: list[Any] = []
        self.now = 0.0
        self.forward_s = forward_s
        self.num_looks = 0
        self.service = Doubling(self.events)
        rows = [{"x": torch.zeros(1)}]
        references = [{"output": torch.full((1,), 1.0 if finite else torch.nan)}]
        loaded = Loaded(
            target="app.py",
            service=self.service,
            signature=SIGNATURE,
            run=self.run,
            choice=Choice(
                candidate=Candidate(runtime="eager"), max_batch_size=max_batch_size, padding=padding, artifact=""
            ),
            findings=(),
            golden=(),
            requests=(Numbers([0.0]),),
            rows=rows,
            canary=Canary(self.run, SIGNATURE, rows, references, OWN_TOLERANCE),
        )

        def look() -> str:
            self.num_looks += 1
            return wrong

        self.engine = Engine(
            loaded=loaded,
            schema=schema_of(loaded, CAPS, "net"),
            caps=CAPS,
            costs=costs,
            canary=look,
            send=self.events.extend,
            threads=threads,
            clock=lambda: self.now,
        )

    def run(self, batch: Batch) -> Batch:
        x = batch["x"]
        self.events.append(Forward(x[:, 0].int().tolist(), x.shape[1]))
        self.now += self.forward_s
        if bool((x == RAISES).any()):
            raise RuntimeError(SECRET)
        if bool((x == EXITS).any()):
            raise SystemExit(SECRET)
        y = 2 * x + 1
        y[(x == NAN).any(1)] = torch.nan
        y[(x == INF).any(1)] = torch.inf
        return {"output": y}

    def take(self, id: int, *items: Numbers, alone: bool = False, lone: bool = False, deadline: float = 1000.0) -> None:
        """One item as it is, several as a list."""
        value: Any = [vars(item) for item in items]
        body = json.dumps(value if len(items) > 1 else value[0]).encode()
        self.take_body(id, body, alone=alone, lone=lone, deadline=deadline)

    def take_body(
        self,
        id: int,
        body: bytes,
        format: Literal["json", "npy", "v2"] = "json",
        *,
        alone: bool = False,
        lone: bool = False,
        deadline: float = 1000.0,
    ) -> None:
        job = Job(id=id, format=format, body=body, deadline=deadline, alone=alone, lone=lone, request_id=f"r{id}")
        self.engine.take(job)

    def finish(self) -> None:
        """As the replica's loop does."""
        self.engine.flush()
        for _ in range(1000):
            if not self.engine.busy:
                return
            self.engine.step()
        raise AssertionError("it never comes to an end")

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def answers(self) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        for answer in self.of(Answer):
            assert answer.id not in found, "answered twice"
            found[answer.id] = answer
        return found


def npy(values: Sequence[float]) -> bytes:
    file = BytesIO()
    np.save(file, np.array(values, dtype=np.float32))
    return file.getvalue()


# One request


def test_rows_of_several_jobs_share_a_forward() -> None:
    """Each gets its own answer, cut back from the padding, and the numbers of the forward that it was in."""
    bench = Bench(forward_s=0.5)
    bench.now = 3.0
    bench.take(1, Numbers([1, 5]))
    bench.now = 4.0
    bench.take(2, Numbers([2, 6, 7, 8]))
    bench.finish()
    assert bench.of(Forward) == [Forward([1, 2], 4)]
    one, two = bench.answers()[1], bench.answers()[2]
    assert json.loads(one.body) == {"doubled": [3, 11]}
    assert json.loads(two.body) == {"doubled": [5, 13, 15, 17]}
    assert (one.status, one.content_type) == (200, "application/json")
    for answer, wait_s in ((one, 1.0), (two, 0.0)):
        assert (answer.batch_size, answer.padding) == (2, 0.25)
        assert (answer.model_s, answer.busy_s, answer.wait_s) == (0.25, 0.25, wait_s)


def test_a_list_is_answered_once_all_its_items_are() -> None:
    """In their order, whatever forwards they were in."""
    bench = Bench(max_batch_size=2, padding=False)
    bench.take(7, Numbers([7, 1, 1]), Numbers([7, 2]), Numbers([7, 3, 3]), Numbers([7, 4]))
    bench.finish()
    assert len(bench.of(Forward)) == 2
    assert json.loads(bench.answers()[7].body) == [
        {"doubled": [15, *[2 * v + 1] * n]} for v, n in ((1, 2), (2, 1), (3, 2), (4, 1))
    ]


def test_without_proof_of_padding_only_equal_sizes_share() -> None:
    bench = Bench(padding=False)
    for id, values in ((1, [1.0]), (2, [2.0, 0.0]), (3, [3.0])):
        bench.take(id, Numbers(values))
    bench.finish()
    assert [forward.ids for forward in bench.of(Forward)] == [[1, 3], [2]]


def test_a_list_counts_from_its_first_forward_to_its_last() -> None:
    """It waited until the first one; its batch size is that of the largest, its seconds those of all."""
    bench = Bench(max_batch_size=2, padding=False, forward_s=0.5)
    bench.take(1, Numbers([1]), Numbers([1, 0]), Numbers([1]))
    bench.now = 1.0
    bench.finish()
    assert [len(forward.ids) for forward in bench.of(Forward)] == [2, 1]
    answer = bench.answers()[1]
    assert (answer.wait_s, answer.batch_size, answer.model_s) == (1.0, 2, 1.0)


def test_tensors_go_to_the_model_without_the_users_code() -> None:
    """Two rows of the Open Inference Protocol, and one of numpy."""
    bench = Bench()
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 1, 4]}
    bench.take_body(1, json.dumps({"inputs": [tensor]}).encode(), "v2")
    bench.take_body(2, npy([2, 6]), "npy")
    bench.finish()
    assert bench.of(Encoded) == []
    assert json.loads(bench.answers()[1].body)["outputs"][0]["data"] == [3, 5, 3, 9]
    assert np.load(BytesIO(bench.answers()[2].body)).tolist() == [5, 13]


def test_the_users_code_runs_in_the_modes_it_was_proven_in() -> None:
    """Tensors that are made under inference mode would make a compiled model recompile; outputs may be changed."""
    bench = Bench()
    bench.take(1, Numbers([1]))
    bench.take(2, Numbers([2]), alone=True)
    bench.finish()
    assert set(bench.service.modes) == {("encode", False), ("decode", True)}


# Whose mistake it is


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b'{"values": "1"}', 422, "values"),
        (b"[]", 422, "empty"),
        (json.dumps([{"values": [1]}] * 5).encode(), 413, "5 items; at most 4"),
        (b'{"values": [1]}' + b" " * 1000, 413, "1015 bytes; at most 1000"),
        (b'{"values": [1, 1, 1, 1, 1, 1, 1]}', 413, "length is 7; at most 6"),
        (b'[{"values": [1]}, {"values": [1, 1, 1, 1, 1, 1, 1]}]', 413, "length is 7 in item 1; at most 6"),
        (b'{"values": [1], "do": "refuse"}', 422, "these numbers are not liked"),
        (b'[{"values": [1]}, {"values": [1], "do": "refuse"}]', 422, "these numbers are not liked in item 1"),
        (b'{"values": [1], "do": "refuse oddly"}', 422, "not ?"),
        (b'{"values": [1], "do": "return float64"}', 422, "float64"),
    ],
)
def test_a_mistake_of_the_client_is_told(body: bytes, status: int, said: str) -> None:
    """At once, before any forward; the near miss beside it is answered."""
    bench = Bench()
    bench.take_body(1, body)
    bench.take(2, Numbers([2, 2, 2, 2, 2, 2]))
    bench.engine.flush()
    answer = bench.answers()[1]
    assert (answer.status, answer.batch_size) == (status, 0)
    assert said in answer.body.decode()
    bench.finish()
    assert bench.answers()[2].status == 200
    assert bench.of(Forward) == [Forward([2], 6)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "request_",
    [
        *(
            Numbers([1], f"{where} {what}")
            for where in ("encode", "decode")
            for what in ("raises", "raises ValueError", "exits")
        ),
        Numbers([1], "return a list"),
        Numbers([1], "return a set of objects"),
        Numbers([1, RAISES]),
        Numbers([1, EXITS]),
    ],
    ids=str,
)
def test_a_mistake_of_the_service_is_logged_and_not_told(
    request_: Numbers, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """500, whatever was raised; the log has it. Who shares its forward gets an answer."""
    bench = Bench()
    with caplog.at_level(logging.ERROR, "torchproof.serve"):
        bench.take(1, request_, alone=alone)
        bench.take(2, Numbers([2]))
        bench.finish()
    answers = bench.answers()
    assert (answers[1].status, answers[1].body) == (500, SAID_OF_500)
    assert json.loads(answers[2].body) == {"doubled": [5]}
    (record,) = caplog.records
    assert record.exc_info is not None
    assert bench.engine.num_requests == 2


def test_a_row_fails_alone() -> None:
    """Of 8 rows in one forward the third one raises: the halves are run again, the other seven are answered."""
    costs = Costs(volumes=(1,), batch_sizes=(1, 8), seconds=((0.01, 0.011),))
    bench = Bench(max_batch_size=8, costs=costs)
    for id in range(1, 9):
        bench.take(id, Numbers([id, RAISES if id == 3 else 0]))
    bench.finish()
    assert [forward.ids for forward in bench.of(Forward)] == [
        [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [1, 2], [3, 4], [3], [4], [5, 6, 7, 8]
    ]  # fmt: skip
    statuses = {id: answer.status for id, answer in bench.answers().items()}
    assert statuses == {id: 500 if id == 3 else 200 for id in range(1, 9)}


@pytest.mark.parametrize(("alone", "max_batch_size"), [(True, 4), (False, 1), (False, 4)])
def test_a_list_of_which_several_items_fail_is_answered_once(alone: bool, max_batch_size: int) -> None:
    """And nothing more is run for it after the first."""
    bench = Bench(max_batch_size=max_batch_size)
    bench.take(1, Numbers([1, RAISES]), Numbers([1, RAISES]), Numbers([1, 0]), Numbers([1, RAISES]), alone=alone)
    bench.finish()
    assert bench.answers()[1].status == 500
    assert [len(forward.ids) for forward in bench.of(Forward)] == ([1] if max_batch_size == 1 or alone else [4, 2, 1])


# Nobody waits any more


def test_what_is_cancelled_is_not_run() -> None:
    """Before its first forward, between two of its own, and where it would have gone alone."""
    bench = Bench(max_batch_size=1)
    bench.take(1, Numbers([1]))
    bench.take(2, Numbers([2]), Numbers([2]))
    bench.take(3, Numbers([3]), alone=True)
    bench.take(4, Numbers([4]))
    bench.engine.cancel(Cancel(ids=(1, 3, 99)))
    bench.engine.step()
    bench.engine.cancel(Cancel(ids=(2,)))
    bench.finish()
    assert [forward.ids for forward in bench.of(Forward)] == [[2], [4]]
    assert bench.of(Encoded) == [Encoded(1), Encoded(2), Encoded(2), Encoded(4)]
    assert list(bench.answers()) == [4]


def test_what_is_past_its_deadline_is_not_run() -> None:
    """The one that would be in time by a hair is."""
    bench = Bench(max_batch_size=1)
    bench.take(1, Numbers([1]), deadline=5.0)
    bench.take(2, Numbers([2]), deadline=5.01)
    bench.take(3, Numbers([3]), alone=True, deadline=5.0)
    bench.take(4, Numbers([4]), alone=True, deadline=5.01)
    bench.now = 5.005
    bench.finish()
    assert [forward.ids for forward in bench.of(Forward)] == [[4], [2]]
    assert Encoded(3) not in bench.events
    assert sorted(bench.answers()) == [2, 4]


# Before a forward it is said


def test_a_forward_is_announced_with_what_it_should_take() -> None:
    """By the measured costs of its rows and its padded size."""
    bench = Bench(padding=True)
    bench.take(1, Numbers([1]))
    bench.take(2, Numbers([2, 0, 0, 0, 0, 0]))
    bench.finish()
    (started,) = bench.of(Started)
    assert set(started.ids) == {1, 2}
    assert started.expected_s == pytest.approx(0.02 + (0.022 - 0.02) / 3)


def test_a_suspect_is_announced_before_anything_is_done_with_it() -> None:
    """If ``encode`` ends the process, it is to blame and no other; its rows share no forward, not even with itself."""
    bench = Bench()
    bench.take(1, Numbers([1]))
    bench.take(2, Numbers([2]), Numbers([2, 2]), alone=True)
    bench.take(3, Numbers([3]), alone=True)
    bench.finish()
    kinds = [
        (type(event).__name__, getattr(event, "ids", None) or [event.id])
        for event in bench.events
        if not isinstance(event, Answer)
    ]
    assert kinds == [
        ("Encoded", [1]),
        ("Started", (2,)), ("Encoded", [2]), ("Encoded", [2]),
        ("Started", (2,)), ("Forward", [2]), ("Started", (2,)), ("Forward", [2]),
        ("Started", (3,)), ("Encoded", [3]), ("Started", (3,)), ("Forward", [3]),
        ("Started", (1,)), ("Forward", [1]),
    ]  # fmt: skip


def test_one_forward_that_is_all_there_is_goes_unannounced() -> None:
    """The server knows of it; two rows that take two forwards are announced, and so is whatever comes beside it."""
    bench = Bench(threads=Threads(1, [0]), padding=False)
    bench.take(1, Numbers([1]), lone=True)
    bench.finish()
    assert (bench.of(Started), len(bench.of(Forward))) == ([], 1)
    bench.take(2, Numbers([2]), Numbers([2]), lone=True)
    bench.finish()
    assert (bench.of(Started), len(bench.of(Forward))) == ([], 2)
    bench.take(3, Numbers([3]), Numbers([3, 3]), lone=True)
    bench.finish()
    assert [started.ids for started in bench.of(Started)] == [(3,)]
    bench.take(4, Numbers([4]), lone=True)
    bench.take(5, Numbers([5, 5]))
    bench.finish()
    assert [started.ids for started in bench.of(Started)] == [(3,), (4,), (5,)]
    assert {answer.status for answer in bench.answers().values()} == {200}


class Noting(Threads):
    """Says which forwards ran as a lone request's, and what they should take."""

    def __init__(self) -> None:
        super().__init__(1, [0])
        self.noted: list[tuple[bool, float]] = []

    def run(self, forward: Callable[[], T], *, lone: bool, cost_s: float) -> T:
        self.noted.append((lone, cost_s))
        return super().run(forward, lone=lone, cost_s=cost_s)


def test_only_a_request_that_is_still_alone_runs_as_one() -> None:
    """Another one may have come since the server sent it; a forward that fails is raised through."""
    threads = Noting()
    bench = Bench(threads=threads)
    bench.take(1, Numbers([1]), lone=True)
    bench.finish()
    bench.take(2, Numbers([2]), lone=True)
    bench.take(3, Numbers([3]))
    bench.finish()
    bench.take(4, Numbers([4, RAISES, 0, 0, 0, 0]), lone=True)
    bench.finish()
    assert threads.noted == [(True, 0.01), (False, pytest.approx(0.01 + 0.001 / 3)), (True, pytest.approx(0.02))]
    assert [bench.answers()[id].status for id in (1, 2, 3, 4)] == [200, 200, 200, 500]


# No finite answer


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ({"y": torch.zeros(3)}, True),
        ({"y": torch.zeros(0)}, True),
        ({"y": torch.tensor(2.0)}, True),
        ({"y": torch.tensor([1, 2])}, True),
        ({"y": torch.full((4,), torch.finfo(torch.float32).max)}, True),  # their sum is not
        ({"y": torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16)}, True),
        ({"y": torch.full((4,), -torch.finfo(torch.float64).max, dtype=torch.float64)}, True),
        ({"y": torch.tensor([1.0, torch.nan])}, False),
        ({"y": torch.tensor([torch.inf, -torch.inf])}, False),
        ({"y": torch.tensor([0.0, -torch.inf], dtype=torch.bfloat16)}, False),
        ({"y": torch.zeros(1), "z": torch.tensor([torch.nan], dtype=torch.float64)}, False),
        ({"y": torch.zeros(1), "z": torch.tensor(1)}, True),
    ],
)
def test_finite_is_all_of_it(row: dict[str, Tensor], finite: bool) -> None:
    assert _finite([row]) == finite
    assert _finite([{"y": torch.ones(1)}, row]) == finite


@pytest.mark.parametrize(
    "bad", [Numbers([1, NAN]), Numbers([1, INF]), Numbers([1, NAN], "round"), Numbers([1, INF], "round")], ids=str
)
def test_where_the_model_is_well_it_is_the_request(bad: Numbers) -> None:
    """422 for it alone, as JSON has no such numbers; other formats do. Looked once for the forward."""
    bench = Bench()
    bench.take(1, bad)
    bench.take(2, Numbers([2, 0]))
    bench.take_body(3, npy([3, NAN]), "npy")
    bench.finish()
    answers = bench.answers()
    assert answers[1].status == 422
    assert b"no finite answer" in answers[1].body
    assert json.loads(answers[2].body) == {"doubled": [5, 1]}
    assert np.isnan(np.load(BytesIO(answers[3].body))).all()
    assert bench.num_looks == 1


@pytest.mark.parametrize("finite", [True, False])
def test_answers_that_may_be_what_they_are_cause_no_look(finite: bool) -> None:
    """All finite, or of a model that gives infinities as a rule: the canary isn't asked."""
    bench = Bench(finite=finite, wrong="all of it")
    bench.take_body(1, npy([1, 0 if finite else INF]), "npy")
    bench.finish()
    assert bench.answers()[1].status == 200
    assert bench.num_looks == 0


def test_where_the_model_is_broken_nobody_gets_its_answer() -> None:
    """All that are not answered are named, and none of them is answered afterwards."""
    bench = Bench(max_batch_size=2, padding=False, wrong="output 'output' is not finite")
    bench.take(1, Numbers([1]))
    bench.take(2, Numbers([2]))
    bench.take(3, Numbers([3, NAN]))
    bench.take(4, Numbers([4, 0]))
    bench.take(5, Numbers([5, 0, 0]), Numbers([5, 0]))
    bench.engine.step()
    bench.take(6, Numbers([6]))
    bench.engine.step()
    (broken,) = bench.of(Broken)
    assert broken.reason == "output 'output' is not finite"
    assert sorted(broken.ids) == [3, 4, 5, 6]
    bench.finish()
    assert sorted(bench.answers()) == [1, 2]
    assert bench.of(Broken) == [broken]


def test_suspects_are_named_too_where_the_model_is_broken() -> None:
    """Of three that wait to go alone the first one finds it out, with the first of its two rows."""
    bench = Bench(wrong="it is")
    bench.take(1, Numbers([1, NAN]), Numbers([1, NAN]), alone=True)
    bench.take(2, Numbers([2]), alone=True)
    bench.take(3, Numbers([3]))
    bench.engine.step()
    (broken,) = bench.of(Broken)
    assert sorted(broken.ids) == [1, 2, 3]
    bench.finish()
    assert bench.answers() == {}
    assert len(bench.of(Forward)) == 1


# All of it together


class Asked(NamedTuple):
    """A job that comes, and when it is cancelled or late, if ever."""

    items: list[tuple[list[float], str]]  # values besides the id, and what is done
    format: Literal["json", "npy", "not JSON"]
    alone: bool
    deadline: float

    def request(self, id: int, item: int) -> Numbers:
        values, do = self.items[item]
        return Numbers([float(id), *values], do)


EVENTS = ("refuse", "return float64", "return a list", "encode raises", "encode exits", "decode raises",
          "decode exits", "return a set of objects")  # fmt: skip
VALUES = st.one_of(st.integers(0, 50).map(float), st.sampled_from((RAISES, EXITS, NAN)))
ITEMS = st.tuples(
    st.lists(st.integers(0, 50).map(float), max_size=5) | st.lists(VALUES, max_size=6),
    st.just("") | st.sampled_from(EVENTS),
)
ASKED = st.builds(
    Asked,
    items=st.lists(ITEMS, min_size=1, max_size=5),
    format=st.sampled_from(("json", "json", "json", "npy", "not JSON")),
    alone=st.sampled_from((False, False, True)),
    deadline=st.sampled_from((1000.0, 1000.0, 3.0)),
)


def expected(id: int, asked: Asked) -> tuple[int, Any]:
    """What the job is answered with, found row by row; no engine, no torch."""
    if asked.format == "not JSON":
        return 400, None
    items = asked.items[:1] if asked.format == "npy" else asked.items
    if len(items) > CAPS.max_items:
        return 413, None
    if asked.format == "json":
        for _, do in items:
            if do in ("refuse", "return float64"):
                return 422, None
            if do.startswith("encode") or do == "return a list":
                return 500, None
    if any(1 + len(values) > CAPS.max_sizes["length"] for values, _ in items):
        return 413, None
    if any({RAISES, EXITS} & set(values) for values, _ in items):
        return 500, None
    if asked.format == "npy":
        values, _ = items[0]
        return 200, None if NAN in values else [2 * v + 1 for v in (id, *values)]
    if any(do.startswith("decode") for _, do in items):
        return 500, None
    finite = not any(NAN in values for values, _ in items)
    if any(do == "return a set of objects" for _, do in items) and finite:
        return 500, None
    if not finite:
        return 422 if not any(do == "return a set of objects" for _, do in items) else -1, None
    answers = [{"doubled": [2 * v + 1 for v in (id, *values)]} for values, _ in items]
    return 200, answers if len(items) > 1 else answers[0]


OPERATIONS = st.lists(
    ASKED | st.just("step") | st.tuples(st.just("cancel"), st.integers(1, 20)) | st.just("wait"), max_size=25
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(1, 5), st.booleans())
def test_every_job_gets_its_own_answer_once(operations: list[Any], max_batch_size: int, padding: bool) -> None:
    """Whatever comes with it: failing rows, lists, refusals, cancels, deadlines, suspects."""
    bench = Bench(max_batch_size=max_batch_size, padding=padding)
    jobs: dict[int, Asked] = {}
    left: set[int] = set()  # nobody waits for them
    for operation in operations:
        if isinstance(operation, Asked):
            id = len(jobs) + 1
            jobs[id] = operation
            if operation.format == "json":
                requests = [operation.request(id, item) for item in range(len(operation.items))]
                bench.take(id, *requests, alone=operation.alone, deadline=operation.deadline)
            else:
                body = npy(operation.request(id, 0).values) if operation.format == "npy" else b"{"
                format: Any = "npy" if operation.format == "npy" else "json"
                bench.take_body(id, body, format, alone=operation.alone, deadline=operation.deadline)
        elif operation == "step":
            bench.engine.step()
        elif operation == "wait":
            bench.now += 1.0
        else:
            bench.engine.cancel(Cancel(ids=(operation[1],)))
            left.add(operation[1])
            left -= set(bench.answers()) | {id for id in left if id not in jobs}
    bench.finish()
    answers = bench.answers()
    for id, asked in jobs.items():
        if id not in answers:
            assert id in left or asked.deadline <= bench.now, "never answered"
            continue
        status, value = expected(id, asked)
        assert answers[id].status == status or status == -1
        if value is not None:
            body = answers[id].body
            assert (json.loads(body) if asked.format == "json" else np.load(BytesIO(body)).tolist()) == value
        if answers[id].status == 500:
            assert answers[id].body == SAID_OF_500
    assert bench.engine.num_requests == len(answers)
    assert_announced(bench, jobs, max_batch_size, padding=padding)


def assert_announced(bench: Bench, jobs: dict[int, Asked], max_batch_size: int, *, padding: bool) -> None:
    """Every forward was said before, with just the jobs in it; suspects have one to themselves."""
    said: list[Message] = []
    begun: set[int] = set()
    for event in bench.events:
        if isinstance(event, Started):
            said = [event]
            begun |= set(event.ids)
        elif isinstance(event, Encoded):
            assert not jobs[event.id].alone or event.id in begun
        elif isinstance(event, Forward):
            assert len(event.ids) <= max_batch_size
            assert len(set(event.ids)) == 1 or not any(jobs[id].alone for id in event.ids)
            assert not jobs[event.ids[0]].alone or len(event.ids) == 1
            assert set(event.ids) <= {id for message in said if isinstance(message, Started) for id in message.ids}
