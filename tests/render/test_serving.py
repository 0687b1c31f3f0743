"""What ``serve`` says when it is ready."""

import msgspec

from torchproof.render import serving as render
from torchproof.types import Candidate, Choice, Finding, GoldenSeen
from torchproof.types.serving import Caps, MemorySample, Serving

MIB = 2**20
SEEN = GoldenSeen(
    target="app.py:Net",
    candidate="onnxruntime int8, 2 threads",
    output="output",
    metric="cos",
    error=0.99991,
    bound=0.999,
    within=True,
    num_rows=32,
    batch_size=1,
)
CANDIDATE = Candidate(runtime="onnxruntime", precision="int8", num_threads=2)
SERVING = Serving(
    target="app.py:Net",
    bundle="/srv/app.tp",
    choice=Choice(candidate=CANDIDATE, max_batch_size=8, padding=True, artifact="artifacts/onnxruntime"),
    golden=(SEEN,),
    findings=(),
    caps=Caps(max_body_bytes=4 * MIB, max_item_bytes=MIB // 16, max_items=64, max_sizes={"length": 256}),
    max_queue=128,
    deadline_s=10.0,
    num_replicas=2,
    num_threads=2,
    memory=tuple(
        MemorySample(at_s=0.0, num_requests=0, rss_bytes=350 * MIB, private_bytes=own * MIB) for own in (40, 50)
    ),
    url="http://127.0.0.1:8000",
)


def test_the_block_says_what_is_served() -> None:
    assert render.text(SERVING) == (
        "serving:    app.py:Net from /srv/app.tp\n"
        "candidate:  onnxruntime int8, 2 threads\n"
        "golden set: 32 of 32 rows within cos>=0.999, worst 0.99991, at batch size 1\n"
        "replicas:   2, each with 40 MiB to 50 MiB of its own and 310 MiB shared\n"
        "batches:    up to 8 requests, padded where it pays\n"
        "limits:     length 256, body 4 MiB, one request 0.0625 MiB, list 64, queue 128, deadline 10 s\n"
        "serving at http://127.0.0.1:8000   docs at /docs\n"
    )


def test_a_bare_target_in_the_servers_own_process_says_so() -> None:
    choice = Choice(candidate=Candidate(runtime="eager"), max_batch_size=1, padding=False, artifact="")
    bare = msgspec.structs.replace(SERVING, bundle=None, golden=(), choice=choice, num_replicas=0, memory=())
    text = render.text(bare)
    for line in (
        "serving:    app.py:Net",
        "golden set: none: nothing was measured",
        "batches:    one request at a time",
    ):
        assert f"{line}\n" in text
    assert "\nreplicas:   none: " in text


def test_replicas_that_are_not_up_when_it_is_ready_are_no_replicas_of_its_own_process() -> None:
    one = msgspec.structs.replace(SERVING, memory=SERVING.memory[:1])
    assert "replicas:   2 (1 up), each with 40 MiB of its own" in render.text(one)
    alone = msgspec.structs.replace(one, num_replicas=1)
    assert "replicas:   1, with 40 MiB of its own" in render.text(alone)
    assert "replicas:   2, of which none is up" in render.text(msgspec.structs.replace(SERVING, memory=()))


def test_without_padding_requests_of_one_size_share_a_batch() -> None:
    choice = msgspec.structs.replace(SERVING.choice, padding=False)
    assert "batches:    up to 8 requests, of equal sizes\n" in render.text(
        msgspec.structs.replace(SERVING, choice=choice)
    )


def test_the_worst_replay_and_every_finding_are_named() -> None:
    """For ``cos`` the worst is the smallest, for an error the largest."""
    finding = Finding(
        code="TP707",
        name="plan-made-elsewhere",
        severity="warning",
        where="app.py",
        message="torch 2.0.0 -> 2.1.0",
        evidence={},
        fix="",
    )
    worse = msgspec.structs.replace(SEEN, error=0.9995, batch_size=8)
    text = render.text(msgspec.structs.replace(SERVING, golden=(SEEN, worse), findings=(finding,)))
    assert "worst 0.9995, at batch size 1 and 8\n" in text
    assert "finding:    TP707 plan-made-elsewhere: torch 2.0.0 -> 2.1.0\n" in text
    errors = tuple(msgspec.structs.replace(SEEN, metric="max_rel", error=error, bound=0.001) for error in (1e-5, 2e-4))
    assert "within max_rel<=0.001, worst 0.0002," in render.text(msgspec.structs.replace(SERVING, golden=errors))


def test_json_is_the_record_on_one_line() -> None:
    line = render.json(SERVING)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert msgspec.json.decode(line, type=Serving) == SERVING
