"""Every request that was accepted is answered once, with its own answer, whatever becomes of the replicas."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchproof.serve.dispatch import (
    DEADLINE_SHARE,
    LOOK_AFTER_S,
    MAX_SILENCE_S,
    MIN_SILENCE_S,
    SILENCE_FACTOR,
    STALLED_S,
    Costs,
    Dispatcher,
    Ended,
    Entry,
    Holder,
)
from torchproof.serve.wire import Answer, Cancel, Job, Message, Started


class Replica:
    """What a holder sends to; ``cpu`` is its CPU time, and whether it waits for the CPU."""

    def __init__(self, *, in_process: bool = False) -> None:
        self.messages: list[Message] = []
        self.cpu = (0.0, False)
        self.holder = Holder(send=self.messages.append, progress=None if in_process else lambda: self.cpu)

    def jobs(self) -> list[Job]:
        return [message for message in self.messages if isinstance(message, Job)]

    def ids(self) -> list[int]:
        return [job.id for job in self.jobs()]

    def cancelled(self) -> list[int]:
        return [id for message in self.messages if isinstance(message, Cancel) for id in message.ids]


@dataclass
class Client:
    """Who waits for a request; ``results`` holds what it got, which is one thing in the end."""

    entry: Entry
    results: list[Answer | Ended] = field(default_factory=list)
    waited_s: float = -1.0
    here: bool = True

    @property
    def ended(self) -> Ended:
        (result,) = self.results
        assert isinstance(result, Ended)
        return result


def ask(dispatcher: Dispatcher, id: int, *, now: float = 0.0, cost_s: float = 0.1, deadline: float = 1000.0) -> Client:
    """A request that must be accepted."""
    assert dispatcher.reserve(0, deadline - now) is None
    client: Client

    def done(result: Answer | Ended, waited_s: float) -> None:
        client.results.append(result)
        client.waited_s = waited_s

    job = Job(id=id, format="json", body=b"", deadline=deadline)
    client = Client(Entry(job=job, cost_s=cost_s, arrived=now, done=done, gone=lambda: not client.here))
    dispatcher.submit(client.entry)
    return client


def answer(id: int, body: bytes = b"", **more: float) -> Answer:
    return Answer(id=id, status=200, body=body or b"%d" % id, **more)  # type: ignore[arg-type]


def dispatcher_of(num_replicas: int, *, window: int = 2, max_queue: int = 100) -> tuple[Dispatcher, list[Replica]]:
    dispatcher = Dispatcher(max_queue)
    dispatcher.window = window
    replicas = [Replica() for _ in range(num_replicas)]
    for replica in replicas:
        dispatcher.add(replica.holder, 0.0)
    return dispatcher, replicas


def assert_at_rest(dispatcher: Dispatcher) -> None:
    """Nothing is left over once all is answered."""
    assert dispatcher.depth == 0
    assert dispatcher.backlog_s() == 0.0
    for holder in dispatcher.holders:
        assert (holder.entries, holder.load_s) == ({}, 0.0)


# Admission


def test_nothing_is_accepted_without_a_replica() -> None:
    """503 with the reason, whatever it is; one replica that takes work is enough."""
    dispatcher, (replica,) = dispatcher_of(1)
    dispatcher.reason = "it fell over"
    assert dispatcher.reserve(0, 10.0) is None
    dispatcher.release()
    dispatcher.drain(replica.holder)
    assert dispatcher.reserve(0, 10.0) == Ended("not_ready", 503, "it fell over", 1)
    other = Replica()
    dispatcher.add(other.holder, 0.0)
    assert dispatcher.unready == ""
    dispatcher.closed = "the server is stopping"
    assert dispatcher.reserve(0, 10.0) == Ended("not_ready", 503, "the server is stopping", 1)
    assert_at_rest(dispatcher)


def test_a_full_queue_says_when_to_come_back() -> None:
    """429; Retry-After is the backlog by cost, by the speed seen and by the replicas, rounded up."""
    dispatcher, _ = dispatcher_of(2, max_queue=3)
    dispatcher.costs.factor = 2.0
    for id in range(3):
        ask(dispatcher, id, cost_s=1.5)
    assert dispatcher.backlog_s() == pytest.approx(3 * 1.5 * 2.0 / 2)
    refused = dispatcher.reserve(0, 1000.0)
    assert refused is not None
    assert (refused.outcome, refused.status, refused.retry_after_s) == ("refused_queue_full", 429, 5)


def test_a_place_is_taken_from_the_first_byte_on() -> None:
    """Bodies that are still read count; a place that is given back is free again."""
    dispatcher, _ = dispatcher_of(1, max_queue=1)
    assert dispatcher.reserve(0, 10.0) is None
    refused = dispatcher.reserve(0, 10.0)
    assert refused is not None
    assert (refused.status, refused.retry_after_s) == (429, 1)
    dispatcher.release()
    assert dispatcher.reserve(0, 10.0) is None


def test_the_bodies_that_wait_have_a_limit_together() -> None:
    """However few they are; one alone is always taken, and what is answered makes room."""
    dispatcher, (replica,) = dispatcher_of(1)
    dispatcher.max_bytes = 100
    assert dispatcher.reserve(0, 10.0, 150) is None
    refused = dispatcher.reserve(0, 10.0, 1)
    assert refused is not None
    assert (refused.outcome, refused.status) == ("refused_queue_full", 429)
    dispatcher.submit(Entry(Job(1, "json", b"", 50.0), 0.1, 0.0, lambda result, queued: None, bool, num_bytes=150))
    assert dispatcher.reserve(0, 10.0, 1) is not None
    dispatcher.answered(replica.holder, answer(1), 1.0)
    assert dispatcher.reserve(0, 10.0, 100) is None
    assert dispatcher.reserve(0, 10.0, 1) is not None
    dispatcher.release(100)
    assert_at_rest(dispatcher)


def test_what_would_be_late_is_refused_at_once() -> None:
    """503 where the backlog and the request itself take more than their share of the deadline; else it is taken."""
    dispatcher, (replica,) = dispatcher_of(1)
    dispatcher.costs = Costs((), (), 0.5)
    ask(dispatcher, 1, cost_s=1.0)
    enough = 1.5 / DEADLINE_SHARE
    refused = dispatcher.reserve(0, enough * 0.99)
    assert refused is not None
    assert (refused.outcome, refused.status, refused.retry_after_s) == ("refused_deadline", 503, 1)
    assert dispatcher.reserve(0, enough * 1.01) is None
    dispatcher.release()
    dispatcher.answered(replica.holder, answer(1), 1.0)
    assert dispatcher.reserve(0, 1e-3) is None  # nothing waits: an estimate alone refuses nobody


def test_costs_go_by_the_size_of_the_body() -> None:
    """In a line through the smallest and the largest sample, beyond that as a list of such, and never nothing."""
    costs = Costs((0.1, 0.3), (100, 300), 9.0, max_items=64)
    assert [costs.of(n) for n in (100, 200, 300)] == pytest.approx([0.1, 0.2, 0.3], abs=1e-5)
    assert costs.of(3000) == pytest.approx(3.0, rel=1e-4)
    assert costs.of(300_000) == pytest.approx(64 * 0.3, rel=1e-4)  # no list has more
    assert costs.of(0) > 0
    assert Costs((), (), 9.0).of(5) == 9.0
    assert Costs((0.2, 0.1), (), 9.0).of(5) == 0.1  # samples that JSON has no form for


def test_costs_follow_what_is_measured() -> None:
    """A machine that is twice as slow is found out in tens of answers; one outlier moves little, however large."""
    costs = Costs((), (), 0.1)
    costs.seen(0.1, 1e9)
    assert costs.factor < 100
    for _ in range(300):
        costs.seen(0.1, 0.2)
    assert costs.factor == pytest.approx(2.0, rel=0.01)


def test_only_answers_of_the_model_move_the_costs() -> None:
    dispatcher, (replica,) = dispatcher_of(1)
    ask(dispatcher, 1)
    dispatcher.answered(replica.holder, answer(1, busy_s=0.0), 1.0)  # 422 before any forward
    assert dispatcher.costs.factor == 1.0
    ask(dispatcher, 2)
    dispatcher.answered(replica.holder, answer(2, busy_s=1.0, batch_size=1), 1.0)
    assert dispatcher.costs.factor > 1.0


# Who gets it


def test_the_one_with_the_least_to_do_gets_it() -> None:
    """By seconds, not by number; and again once it has answered."""
    dispatcher, (a, b) = dispatcher_of(2, window=10)
    ask(dispatcher, 1, cost_s=1.0)
    for id in (2, 3, 4):
        ask(dispatcher, id, cost_s=0.3)
    assert (a.ids(), b.ids()) == ([1], [2, 3, 4])
    dispatcher.answered(a.holder, answer(1), 1.0)
    ask(dispatcher, 5, now=1.0)
    assert a.ids() == [1, 5]


def test_no_more_than_the_window_is_given() -> None:
    """The rest waits in front, the oldest first, where any replica may take it; the wait is told."""
    dispatcher, (a,) = dispatcher_of(1, window=2)
    clients = [ask(dispatcher, id) for id in range(4)]
    assert a.ids() == [0, 1]
    dispatcher.answered(a.holder, answer(1), 3.0)
    assert a.ids() == [0, 1, 2]
    b = Replica()
    dispatcher.add(b.holder, 5.0)
    assert b.ids() == [3]
    dispatcher.answered(b.holder, answer(3), 6.0)
    assert (clients[1].waited_s, clients[3].waited_s) == (0.0, 5.0)
    assert clients[3].results == [answer(3)]


def test_a_request_is_told_that_it_is_the_only_one() -> None:
    """Not where another one waits, runs elsewhere or is still read; nor where it may have ended a replica."""
    dispatcher, (a, b) = dispatcher_of(2)
    ask(dispatcher, 1)
    ask(dispatcher, 2)
    assert [(job.id, job.lone) for job in a.jobs() + b.jobs()] == [(1, True), (2, False)]
    dispatcher.answered(b.holder, answer(2), 0.1)
    ask(dispatcher, 3)
    dispatcher.answered(a.holder, answer(1), 0.2)
    dispatcher.answered(b.holder, answer(3), 0.2)
    assert dispatcher.reserve(0, 10.0) is None  # its body is read
    ask(dispatcher, 4)
    dispatcher.release()
    assert [job.lone for job in a.jobs() + b.jobs() if job.id in (3, 4)] == [False, False]
    for holder in (a.holder, b.holder):
        if 4 in holder.entries:
            dispatcher.answered(holder, answer(4), 0.3)
    ask(dispatcher, 5)
    assert [job.lone for job in a.jobs() + b.jobs() if job.id == 5] == [True]
    had, other = (a, b) if 5 in a.holder.entries else (b, a)
    dispatcher.drop(had.holder, 0.4, blame=True)
    assert (other.jobs()[-1].id, other.jobs()[-1].alone, other.jobs()[-1].lone) == (5, True, False)
    dispatcher.answered(other.holder, answer(5), 0.5)
    assert_at_rest(dispatcher)


def test_a_draining_replica_finishes_and_gets_nothing_new() -> None:
    dispatcher, (a, b) = dispatcher_of(2, window=1)
    first = ask(dispatcher, 1)
    dispatcher.drain(a.holder)
    ask(dispatcher, 2)
    ask(dispatcher, 3)
    assert (a.ids(), b.ids()) == ([1], [2])
    dispatcher.answered(a.holder, answer(1), 1.0)
    assert first.results == [answer(1)]
    assert a.ids() == [1]
    assert a.holder.idle


def test_an_answer_to_no_question_is_nobodys() -> None:
    """A late one, one of another replica's requests, and one of a replica that was dropped."""
    dispatcher, (a, b) = dispatcher_of(2)
    first, second = ask(dispatcher, 1), ask(dispatcher, 2)
    assert (a.ids(), b.ids()) == ([1], [2])
    dispatcher.answered(a.holder, answer(2), 1.0)
    assert second.results == []
    dispatcher.answered(a.holder, answer(1), 1.0)
    dispatcher.answered(a.holder, answer(1, b"again"), 1.0)
    assert first.results == [answer(1)]
    dispatcher.drop(b.holder, 1.0, blame=False)
    dispatcher.answered(b.holder, answer(2, b"from the dead"), 1.0)
    assert a.ids() == [1, 2]
    dispatcher.answered(a.holder, answer(2), 1.0)
    assert second.results == [answer(2)]
    assert_at_rest(dispatcher)


# Ends without an answer


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    """504 from the moment on; the replica is told; the one that came in time is answered."""
    dispatcher, (a,) = dispatcher_of(1, window=1)
    running, waiting, later = (ask(dispatcher, id, deadline=deadline) for id, deadline in ((1, 5), (2, 5), (3, 6)))
    dispatcher.expire(4.99)
    assert not running.results
    dispatcher.expire(5.0)
    assert running.ended.status == waiting.ended.status == 504
    assert (a.cancelled(), a.ids()) == ([1], [1, 3])
    assert not later.results
    dispatcher.answered(a.holder, answer(3), 5.5)
    dispatcher.expire(7.0)
    assert later.results == [answer(3)]
    assert_at_rest(dispatcher)


def test_whoever_has_gone_makes_room() -> None:
    """Running or waiting; a young request is not looked after yet."""
    dispatcher, (a,) = dispatcher_of(1, window=1, max_queue=2)
    clients = [ask(dispatcher, 1), ask(dispatcher, 2)]
    for client in clients:
        client.here = False
    dispatcher.expire(LOOK_AFTER_S / 2)
    assert not any(client.results for client in clients)
    dispatcher.expire(LOOK_AFTER_S * 2)
    assert [client.ended.status for client in clients] == [499, 499]
    assert a.cancelled() == [1]
    assert_at_rest(dispatcher)
    ask(dispatcher, 3, now=1.0)
    assert a.ids() == [1, 3]


def test_bodies_of_those_that_have_gone_are_let_go() -> None:
    """The first in the queue still waits, those behind it have gone: the queue keeps none of them."""
    dispatcher, _ = dispatcher_of(1, window=1, max_queue=3)
    ask(dispatcher, 0)
    ask(dispatcher, 1)
    for id in range(2, 50):
        ask(dispatcher, id).here = False
        dispatcher.expire(1.0)
    assert [entry.job.id for entry in dispatcher._queue] == [1]


def test_all_can_be_ended() -> None:
    dispatcher, (a,) = dispatcher_of(1, window=1)
    clients = [ask(dispatcher, id) for id in range(3)]
    dispatcher.fail_all("the model gives wrong answers")
    assert {(c.ended.status, c.ended.detail) for c in clients} == {(503, "the model gives wrong answers")}
    assert a.cancelled() == [0]
    assert_at_rest(dispatcher)


# A replica ends


def test_who_was_in_the_forward_goes_alone_and_once() -> None:
    """Of three held two were in the forward: they are tried once more, each alone; the third is free of blame."""
    dispatcher, (a, b, c) = dispatcher_of(3, window=10)
    dispatcher.drain(b.holder)
    dispatcher.drain(c.holder)
    one, two, three = (ask(dispatcher, id) for id in (1, 2, 3))
    dispatcher.started(a.holder, Started(ids=(1, 3), expected_s=0.1), 1.0)
    b.holder.draining = False
    retried: list[int] = []
    dispatcher._retried = retried.append
    dispatcher.drop(a.holder, 2.0, blame=True)
    assert [(job.id, job.alone) for job in b.jobs()] == [(1, True), (2, False), (3, True)]
    assert retried == [3]
    dispatcher.started(b.holder, Started(ids=(1,), expected_s=0.1), 2.5)
    c.holder.draining = False
    dispatcher.drop(b.holder, 3.0, blame=True)
    assert (one.ended.outcome, one.ended.status) == ("error", 500)
    assert not two.results
    assert [(job.id, job.alone) for job in c.jobs()] == [(2, False), (3, True)]
    for id in (2, 3):
        dispatcher.answered(c.holder, answer(id), 4.0)
    assert two.results + three.results == [answer(2), answer(3)]
    assert_at_rest(dispatcher)


def test_before_its_first_forward_any_request_may_have_ended_it() -> None:
    """``encode`` may have, of which nothing is said beforehand."""
    dispatcher, (a, b) = dispatcher_of(2)
    dispatcher.drain(b.holder)
    ask(dispatcher, 1)
    ask(dispatcher, 2)
    b.holder.draining = False
    dispatcher.drop(a.holder, 1.0, blame=True)
    assert [(job.id, job.alone) for job in b.jobs()] == [(1, True), (2, True)]


@pytest.mark.parametrize("say", ["answer", "health"])
def test_a_forward_that_is_over_is_not_to_blame(say: str) -> None:
    """Something was heard since it began, so what is encoded now may have ended it as well."""
    dispatcher, (a, b) = dispatcher_of(2, window=9)
    dispatcher.drain(b.holder)
    for id in (1, 2, 3):
        ask(dispatcher, id)
    dispatcher.started(a.holder, Started(ids=(1, 2), expected_s=0.1), 1.0)
    if say == "answer":
        dispatcher.answered(a.holder, answer(1), 1.1)
    else:
        dispatcher.health(a.holder, 1.1)
    b.holder.draining = False
    dispatcher.drop(a.holder, 2.0, blame=True)
    assert all(job.alone for job in b.jobs())
    assert 3 in b.ids()


def test_without_blame_it_is_as_if_it_had_not_been_given() -> None:
    """As often as it takes, shared with others, before those that came later and in the old order."""
    dispatcher, replicas = dispatcher_of(1, window=3)
    clients = [ask(dispatcher, id) for id in range(6)]
    for _ in range(4):
        last = replicas[-1]
        dispatcher.started(last.holder, Started(ids=(0, 1), expected_s=0.1), 1.0)
        dispatcher.drop(last.holder, 1.0, blame=False)
        replicas.append(Replica())
        dispatcher.add(replicas[-1].holder, 1.0)
        assert [(job.id, job.alone) for job in replicas[-1].jobs()] == [(0, False), (1, False), (2, False)]
    for id in range(6):
        dispatcher.answered(replicas[-1].holder, answer(id), 2.0)
    assert [client.results for client in clients] == [[answer(id)] for id in range(6)]


def test_what_must_not_run_twice_does_not() -> None:
    """Not idempotent: 500 for what was given, the rest waits for another replica; a silent one's work stays with it."""
    dispatcher, (a, b) = dispatcher_of(2, window=1)
    dispatcher.idempotent = False
    one, two, three = (ask(dispatcher, id, cost_s=0.01) for id in (1, 2, 3))
    assert not dispatcher.hung(1.0)
    assert a.holder.silent
    assert b.ids() == [2]
    dispatcher.answered(b.holder, answer(2), 1.1)
    assert b.ids() == [2, 3]
    dispatcher.drop(a.holder, 1.2, blame=False)
    assert (one.ended.status, two.results) == (500, [answer(2)])
    dispatcher.answered(b.holder, answer(3), 1.3)
    assert three.results == [answer(3)]
    assert b.ids() == [2, 3]


def test_with_no_replica_left_requests_wait_for_the_next_one() -> None:
    dispatcher, (a,) = dispatcher_of(1)
    client = ask(dispatcher, 1, now=0.5, deadline=9.0)
    dispatcher.drop(a.holder, 1.0, blame=False)
    assert dispatcher.unready
    assert not client.results
    dispatcher.expire(2.0)
    b = Replica()
    dispatcher.add(b.holder, 3.0)
    assert b.ids() == [1]
    dispatcher.answered(b.holder, answer(1), 4.0)
    assert client.waited_s == 0.0  # until the first one had it: the rest is a retry


# Silence


def silent_at(work_s: float) -> float:
    return max(MIN_SILENCE_S, SILENCE_FACTOR * work_s)


def test_who_is_silent_for_too_long_is_helped_and_the_first_answer_counts() -> None:
    """Its requests go to another one as well, those in its forward alone; whoever answers second is told to stop."""
    dispatcher, (a, b) = dispatcher_of(2, window=5)
    dispatcher.drain(b.holder)
    one, two = ask(dispatcher, 1), ask(dispatcher, 2)
    b.holder.draining = False
    dispatcher.started(a.holder, Started(ids=(1,), expected_s=0.1), 0.0)
    late = silent_at(0.1)
    assert dispatcher.hung(late * 0.99) == []
    assert b.ids() == []
    assert dispatcher.hung(late * 1.01) == []
    assert [(job.id, job.alone) for job in b.jobs()] == [(1, True), (2, False)]
    dispatcher.hung(late * 1.02)
    assert b.ids() == [1, 2]  # once
    ask(dispatcher, 3, now=late * 1.03)
    assert a.ids() == [1, 2]  # nothing new for a silent one
    dispatcher.answered(b.holder, answer(1, b"b"), 1.0)
    assert 1 in a.cancelled()
    dispatcher.answered(a.holder, answer(1, b"a"), 1.1)
    dispatcher.answered(a.holder, answer(2, b"a"), 1.1)
    assert 2 in b.cancelled()
    assert one.results == [answer(1, b"b")]
    assert two.results == [answer(2, b"a")]
    dispatcher.answered(b.holder, answer(3), 1.2)
    assert_at_rest(dispatcher)


@pytest.mark.parametrize("begun", [True, False])
def test_work_that_is_known_to_be_long_is_not_silence(begun: bool) -> None:
    """The near miss: as late as the test above, and what it has takes that long by what is known."""
    dispatcher, (a, b) = dispatcher_of(2, window=5)
    ask(dispatcher, 1, cost_s=0.1 if begun else 10.0)
    if begun:
        dispatcher.started(a.holder, Started(ids=(1,), expected_s=10.0), 0.0)
    dispatcher.hung(silent_at(10.0) * 0.99)
    assert not a.holder.silent
    assert b.ids() == []
    dispatcher.hung(silent_at(10.0) * 1.01)
    assert a.holder.silent
    assert b.ids() == [1]


def test_a_slow_machine_is_given_its_time() -> None:
    """All is ten times as slow as at warm-up, and the costs have seen that."""
    dispatcher, (_, b) = dispatcher_of(2)
    dispatcher.costs.factor = 10.0
    ask(dispatcher, 1, cost_s=0.1)
    dispatcher.hung(silent_at(1.0) * 0.99)
    assert b.ids() == []


def test_time_without_work_is_no_silence() -> None:
    """An hour without requests, then one: the clock starts with it, also for a check."""
    dispatcher, (a,) = dispatcher_of(1)
    assert dispatcher.hung(3600.0) == []
    ask(dispatcher, 1, now=3600.0, deadline=5000.0)
    dispatcher.hung(3600.1)
    assert not a.holder.silent
    dispatcher.answered(a.holder, answer(1), 3600.2)
    dispatcher.check(7000.0, 10.0)
    dispatcher.hung(7000.1)
    assert not a.holder.silent


def test_without_progress_on_the_cpu_it_hangs() -> None:
    """Silent and asleep: ended soon after, not at once. One that was heard again starts anew."""
    dispatcher, (a,) = dispatcher_of(1)
    ask(dispatcher, 1)
    a.cpu = (5.0, False)
    late = silent_at(0.1) + 0.01
    assert dispatcher.hung(late) == []
    assert dispatcher.hung(late + STALLED_S * 0.99) == []
    assert dispatcher.hung(late + STALLED_S * 1.01) == [a.holder]
    dispatcher.health(a.holder, 10.0)
    assert dispatcher.hung(10.0 + late) == []
    assert dispatcher.hung(10.0 + late + STALLED_S * 0.99) == []
    assert dispatcher.hung(10.0 + late + STALLED_S * 1.01) == [a.holder]


@pytest.mark.parametrize("how", ["computes", "waits for the CPU"])
def test_a_busy_machine_is_no_hang_until_it_takes_far_too_long(how: str) -> None:
    """The near miss: as silent as the one above, but it computes, or would if the CPU were free."""
    dispatcher, (a,) = dispatcher_of(1)
    ask(dispatcher, 1)
    now = 0.5
    while now <= MAX_SILENCE_S:
        a.cpu = (now, False) if how == "computes" else (5.0, True)
        assert dispatcher.hung(now) == []
        now += 0.5
    assert dispatcher.hung(MAX_SILENCE_S + 0.01) == [a.holder]


def test_the_model_in_the_servers_own_process_is_never_silent() -> None:
    dispatcher = Dispatcher(9)
    replica = Replica(in_process=True)
    dispatcher.add(replica.holder, 0.0)
    ask(dispatcher, 1)
    assert dispatcher.hung(500.0) == []
    assert not replica.holder.silent


def test_who_is_heard_again_gets_work_again() -> None:
    dispatcher, (a,) = dispatcher_of(1, window=5)
    ask(dispatcher, 1)
    dispatcher.hung(1.0)
    ask(dispatcher, 2, now=1.0)
    assert a.ids() == [1]
    dispatcher.answered(a.holder, answer(1), 1.5)
    assert a.ids() == [1, 2]


def test_one_hang_is_not_counted_twice() -> None:
    """It fell silent, nobody had room to help, then it is ended: the request has its second chance still."""
    dispatcher, (a, b) = dispatcher_of(2, window=1)
    one = ask(dispatcher, 1)
    ask(dispatcher, 2, cost_s=50.0)
    dispatcher.hung(1.0)
    assert b.ids() == [2]
    dispatcher.drop(a.holder, 4.0, blame=True)
    assert one.results == []
    dispatcher.answered(b.holder, answer(2), 5.0)
    assert [(job.id, job.alone) for job in b.jobs()] == [(2, False), (1, True)]
    dispatcher.drop(b.holder, 6.0, blame=True)
    assert one.ended.status == 500


def test_a_request_that_waits_for_help_holds_up_nobody() -> None:
    """The replica that has it speaks again and has room; the only other one is full."""
    dispatcher, (a, b) = dispatcher_of(2, window=2)
    for id, cost_s in ((1, 0.1), (2, 50.0), (3, 0.1), (4, 50.0)):
        ask(dispatcher, id, cost_s=cost_s)
    dispatcher.hung(1.0)
    assert (a.holder.silent, b.holder.silent) == (True, False)
    for id in (5, 6):
        ask(dispatcher, id, now=1.0)
    dispatcher.answered(a.holder, answer(3), 1.1)
    assert (a.ids(), b.ids()) == ([1, 3, 5], [2, 4])
    dispatcher.answered(b.holder, answer(2), 1.2)
    assert b.ids() == [2, 4, 1]  # and it is still the first in the queue


def test_two_are_enough() -> None:
    """It falls silent, speaks and falls silent again: who helps has its work already, a third one gets none."""
    dispatcher, (a, b, c) = dispatcher_of(3)
    for replica in (b, c):
        dispatcher.drain(replica.holder)
    for id in (1, 2):
        ask(dispatcher, id)
    b.holder.draining = c.holder.draining = False
    for now in (1.0, 3.0):
        dispatcher.started(a.holder, Started(ids=(1,), expected_s=0.1), now)
        dispatcher.hung(now + 1.0)
        dispatcher.health(b.holder, now + 1.0)
    assert sorted(b.ids() + c.ids()) == [1, 2]


def test_who_waits_for_help_waits_for_it_once() -> None:
    """As above, and there is no room yet."""
    retried: list[int] = []
    dispatcher, (a, b) = dispatcher_of(2)
    dispatcher._retried = retried.append
    for id, cost_s in ((1, 0.1), (2, 50.0), (3, 0.1), (4, 50.0)):
        ask(dispatcher, id, cost_s=cost_s)
    for now in (1.0, 3.0):
        dispatcher.started(a.holder, Started(ids=(1,), expected_s=0.1), now)
        dispatcher.hung(now + 1.0)
    assert retried == [2]
    for id in (2, 4):
        dispatcher.answered(b.holder, answer(id), 5.0)
    assert b.ids() == [2, 4, 1, 3]
    assert not dispatcher._queue


def test_the_second_chance_is_the_last() -> None:
    """In the forward of one that fell silent and ended, now alone with one that is silent: no third one is risked."""
    dispatcher, (a, b, c) = dispatcher_of(3)
    for replica in (b, c):
        dispatcher.drain(replica.holder)
    one = ask(dispatcher, 1)
    b.holder.draining = False
    dispatcher.hung(1.0)
    dispatcher.drop(a.holder, 4.0, blame=True)
    c.holder.draining = False
    dispatcher.hung(5.0)
    assert b.holder.silent
    assert (b.ids(), c.ids()) == ([1], [])
    dispatcher.drop(b.holder, 8.0, blame=True)
    assert one.ended.status == 500


# All of it together

BODIES = st.integers(0, 1000)


class Traffic(RuleBasedStateMachine):
    """Requests come and go, replicas start, answer, fall silent and end, in any order."""

    @initialize(window=st.integers(1, 4), max_queue=st.integers(1, 12), idempotent=st.booleans())
    def begin(self, window: int, max_queue: int, idempotent: bool) -> None:
        self.dispatcher = Dispatcher(max_queue)
        self.dispatcher.window, self.dispatcher.idempotent = window, idempotent
        self.dispatcher.costs = Costs((0.01, 0.2), (10, 500), 0.1)
        self.now = 1.0
        self.clients: dict[int, Client] = {}
        self.reserved = 0
        self.replicas: list[Replica] = []  # those that live
        self.dead: list[Replica] = []
        self.open: dict[int, list[int]] = {}  # what each replica has not answered, by id(replica)
        self.forward: dict[int, tuple[int, ...]] = {}
        self.suspects: set[int] = set()  # whose replica ended or fell silent, maybe because of them
        self.blamed: dict[int, int] = {}  # how many ends each may have caused, where no other replica had it
        self.add()

    # What a replica is sent

    def send_to(self, replica: Replica) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            assert replica in self.replicas, "a dropped replica gets nothing"
            replica.messages.append(message)
            if isinstance(message, Job):
                assert replica.ids().count(message.id) == 1, "given twice to one replica"
                assert not replica.holder.draining
                assert not replica.holder.silent
                assert len(replica.holder.entries) <= self.dispatcher.window
                assert not self.clients[message.id].results, "given after its end"
                assert self.blamed.get(message.id, 0) < 2, "given after two ends"
                assert message.id in self.suspects or not message.alone
                assert message.id not in self.blamed or message.alone
                self.open[id(replica)].append(message.id)

        return send

    @rule()
    def add(self) -> None:
        if len(self.replicas) < 4:
            replica = Replica()
            replica.holder.send = self.send_to(replica)
            self.open[id(replica)] = []
            self.replicas.append(replica)
            self.dispatcher.add(replica.holder, self.now)

    # Clients

    @rule(num_bytes=BODIES, left_s=st.floats(0.01, 60.0))
    def reserve(self, num_bytes: int, left_s: float) -> None:
        before = self.dispatcher.depth
        refused = self.dispatcher.reserve(num_bytes, left_s)
        if refused is None:
            assert before < self.dispatcher.max_queue
            assert any(not replica.holder.draining for replica in self.replicas)
            self.reserved += 1
        else:
            assert self.dispatcher.depth == before
            assert refused.retry_after_s >= 1
            assert refused.status == 503 or (refused.status == 429 and before == self.dispatcher.max_queue)

    @precondition(lambda self: self.reserved)
    @rule()
    def release(self) -> None:
        self.reserved -= 1
        self.dispatcher.release()

    @precondition(lambda self: self.reserved)
    @rule(num_bytes=BODIES, left_s=st.floats(0.01, 60.0))
    def submit(self, num_bytes: int, left_s: float) -> None:
        self.reserved -= 1
        number = len(self.clients)
        client: Client

        def done(result: Answer | Ended, waited_s: float) -> None:
            assert not client.results, "answered twice"
            assert waited_s >= 0
            if isinstance(result, Answer):
                assert result.body == b"%d" % number, "the answer of another request"
            client.results.append(result)

        entry = Entry(
            job=Job(id=number, format="json", body=b"", deadline=self.now + left_s),
            cost_s=self.dispatcher.costs.of(num_bytes),
            arrived=self.now,
            done=done,
            gone=lambda: not client.here,
        )
        client = self.clients[number] = Client(entry)
        self.dispatcher.submit(entry)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.clients[data.draw(st.sampled_from(sorted(self.clients)))].here = False

    # Replicas

    def pick(self, data: st.DataObject) -> Replica:
        return data.draw(st.sampled_from(self.replicas))

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), expected_s=st.floats(0.001, 1.0))
    def start(self, data: st.DataObject, expected_s: float) -> None:
        replica = self.pick(data)
        if self.open[id(replica)]:
            ids = tuple(data.draw(st.lists(st.sampled_from(self.open[id(replica)]), min_size=1, unique=True)))
            self.forward[id(replica)] = ids
            self.dispatcher.started(replica.holder, Started(ids=ids, expected_s=expected_s), self.now)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), busy_s=st.floats(0.0, 1.0))
    def answer(self, data: st.DataObject, busy_s: float) -> None:
        replica = self.pick(data)
        if self.open[id(replica)]:
            number = data.draw(st.sampled_from(self.open[id(replica)]))
            self.open[id(replica)].remove(number)
            self.forward[id(replica)] = ()
            client = self.clients[number]
            waited = not client.results
            self.dispatcher.answered(replica.holder, answer(number, busy_s=busy_s, batch_size=1), self.now)
            if waited:
                assert isinstance(client.results[0], Answer)

    @precondition(lambda self: self.dead and self.clients)
    @rule(data=st.data())
    def answer_of_the_dead(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.dead))
        number = data.draw(st.sampled_from(sorted(self.clients)))
        before = list(self.clients[number].results)
        self.dispatcher.answered(replica.holder, answer(number), self.now)
        assert self.clients[number].results == before

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), blame=st.booleans())
    def end(self, data: st.DataObject, blame: bool) -> None:
        self.drop(self.pick(data), blame=blame)

    def suspects_of(self, replica: Replica) -> set[int]:
        held = set(replica.holder.entries)
        return set(self.forward.get(id(replica)) or held) & held

    def drop(self, replica: Replica, *, blame: bool) -> None:
        held = [self.clients[number] for number in replica.holder.entries]
        if blame:
            self.suspects |= self.suspects_of(replica)
            for number in self.suspects_of(replica):
                if len(self.clients[number].entry.holders) == 1:
                    self.blamed[number] = self.blamed.get(number, 0) + 1
        again = [client for client in held if client.entry.retried]
        self.replicas.remove(replica)
        self.dead.append(replica)
        self.dispatcher.drop(replica.holder, self.now, blame=blame)
        for client in held:
            if client.results:
                assert client.ended.status == 500
                assert not self.dispatcher.idempotent or (blame and client in again)
            else:
                assert self.dispatcher.idempotent

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.dispatcher.drain(self.pick(data).holder)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def health(self, data: st.DataObject) -> None:
        replica = self.pick(data)
        self.dispatcher.check(self.now, 0.0)
        self.forward[id(replica)] = ()
        self.dispatcher.health(replica.holder, self.now)

    # Time

    @rule(seconds=st.sampled_from((0.0, 0.02, 0.5, 3.0, 40.0)))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.expire(self.now)
        for client in self.clients.values():
            if client.entry.job.deadline <= self.now or (not client.here and self.now - client.entry.arrived > 0.1):
                assert client.results, "nobody waits for it any more"

    @rule(seconds=st.sampled_from((0.02, 0.5, 3.0, 40.0)), runnable=st.booleans())
    def watch(self, seconds: float, runnable: bool) -> None:
        self.now += seconds
        silent = [replica for replica in self.replicas if replica.holder.silent]
        for replica in self.replicas:
            replica.cpu = (0.0, runnable)
            if replica not in silent:
                self.suspects |= self.suspects_of(replica)
        stuck = self.dispatcher.hung(self.now)
        for replica in [replica for replica in self.replicas if replica.holder in stuck]:
            assert replica in silent or self.now > MAX_SILENCE_S
            assert not replica.holder.idle
            self.drop(replica, blame=True)

    # What always holds

    @invariant()
    def counters_are_sums(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        waiting = [client for client in self.clients.values() if not client.results]
        assert self.dispatcher.depth == len(waiting) + self.reserved <= self.dispatcher.max_queue
        num_open = sum(not replica.holder.silent and not replica.holder.draining for replica in self.replicas)
        load_s = self.dispatcher.backlog_s() * max(1, num_open) / self.dispatcher.costs.factor
        assert load_s == pytest.approx(sum(client.entry.cost_s for client in waiting), abs=1e-9)
        for replica in self.replicas:
            held = replica.holder.entries
            assert replica.holder.load_s == pytest.approx(sum(e.cost_s for e in held.values()), abs=1e-9)
            assert all(not self.clients[number].results for number in held)
            assert set(held) <= set(self.open[id(replica)])

    @invariant()
    def nobody_waits_beside_room(self) -> None:
        """Where a replica has room all have one; one that has just spoken again gets work with the next tick."""
        if hasattr(self, "dispatcher"):
            self.dispatcher.pump(self.now)
            open = [replica.holder for replica in self.replicas if not replica.holder.silent | replica.holder.draining]
            if any(len(holder.entries) < self.dispatcher.window for holder in open):
                assert all(client.entry.holders for client in self.clients.values() if not client.results)

    def teardown(self) -> None:
        """Whatever has happened: one good replica answers all that is left, and nothing remains."""
        if not hasattr(self, "dispatcher"):
            return
        for replica in list(self.replicas):
            self.drop(replica, blame=False)
        self.add()
        (last,) = self.replicas
        while numbers := self.open[id(last)]:
            self.dispatcher.answered(last.holder, answer(numbers.pop(0)), self.now)
        for _ in range(self.reserved):
            self.dispatcher.release()
        assert all(len(client.results) == 1 for client in self.clients.values())
        assert_at_rest(self.dispatcher)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
