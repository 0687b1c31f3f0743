"""Every rule keeps one contract: it documents itself, and it is judged on recorded observations without a model."""

import ast
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.rules.base import PARTS, SECTIONS, Rule
from torchproof.rules.registry import all_rules, judge
from torchproof.types import (
    BatchSeen,
    Finding,
    Growth,
    MemorySeen,
    ModesSeen,
    Observation,
    PaddingSeen,
    Severity,
    decode,
    encode,
)
from torchproof.types.precision import Difference

FIXTURES = Path(__file__).parent / "fixtures"
RULES = all_rules()
BAD = sorted(FIXTURES.glob("TP*/bad*.json"))
GOOD = sorted(FIXTURES.glob("TP*/good*.json"))
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def fixture_id(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def recorded(path: Path) -> Any:
    rule = next(rule for rule in RULES if rule.code == path.parent.name)
    return decode(path.read_text(), rule.observes, what=fixture_id(path))


def code_block(body: str) -> str:
    blocks = re.findall(r"```python\n(.*?)\n```", body, flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


# The contract


@every_rule
def test_documents_itself_with_the_fixed_sections(rule: Rule[Any]) -> None:
    doc = rule.doc()
    assert tuple(doc.sections) == SECTIONS
    assert all(doc.sections.values())
    assert "\n" not in doc.summary
    assert doc.summary.endswith(".")
    assert "|" not in doc.summary  # it stands in a markdown table


@every_rule
def test_its_examples_parse_and_differ(rule: Rule[Any]) -> None:
    sections = rule.doc().sections
    bad, good = code_block(sections["Example"]), code_block(sections["Use instead"])
    ast.parse(bad)
    ast.parse(good)
    assert bad != good


@every_rule
def test_its_code_name_and_file_agree(rule: Rule[Any]) -> None:
    assert re.fullmatch(r"TP[1-7]\d\d", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z][a-z0-9]*)+", rule.name)
    assert type(rule).__module__.split(".")[-1] == rule.name.replace("-", "_")
    assert PARTS[rule.part.number].endswith(type(rule).__module__.split(".")[-2])
    assert rule.severity in get_args(Severity)


def test_codes_and_names_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)


@every_rule
def test_its_sources_say_where_each_number_is_from(rule: Rule[Any]) -> None:
    for line in re.split(r"\n(?=- )", rule.doc().sections["Sources"]):
        assert re.match(r"- (PyTorch docs|PyTorch issue|Measured|Threshold|float16)", line), line


@every_rule
def test_it_has_recorded_cases(rule: Rule[Any]) -> None:
    names = {path.stem for path in (FIXTURES / rule.code).glob("*.json")}
    assert {"bad", "good"} <= names


def test_every_recorded_case_belongs_to_a_rule() -> None:
    assert {path.parent.name for path in FIXTURES.rglob("*.json")} == {rule.code for rule in RULES}
    assert set(FIXTURES.rglob("*.json")) == {*BAD, *GOOD}


# The recorded cases


@pytest.mark.parametrize("path", BAD, ids=fixture_id)
def test_a_bad_case_is_found_once_and_by_its_own_rule_only(path: Path) -> None:
    """One problem, one finding: no second rule reports the same cause."""
    assert [finding.code for finding in judge(recorded(path))] == [path.parent.name]


@pytest.mark.parametrize("path", GOOD, ids=fixture_id)
def test_a_near_miss_is_not_found(path: Path) -> None:
    assert path.parent.name not in {finding.code for finding in judge(recorded(path))}


@pytest.mark.parametrize("path", BAD, ids=fixture_id)
def test_a_message_is_one_plain_line(path: Path) -> None:
    (finding,) = judge(recorded(path))
    for line in (finding.message, finding.fix):
        assert "\n" not in line
        assert not line.endswith(".")
        assert line[0].islower() or line.startswith("NaN")
        # an error that is quoted, after the last colon, is not our wording
        assert not re.search(r"\b(invalid|failed|please)\b", line.split(": ")[0], flags=re.IGNORECASE)
    assert not re.search(r"\d\.\d{5,}", finding.message.replace("0.998997", ""))  # digits that mean nothing
    assert finding.evidence


def message(case: str) -> str:
    (finding,) = judge(recorded(FIXTURES / f"{case}.json"))
    return finding.message


def test_messages_name_the_value_that_shows_it() -> None:
    assert message("TP101/bad_batch_norm") == (
        "load() returns a model that is not in eval mode: its answer is off by 0.61 of the largest output; "
        "each forward changes 1.running_mean, 1.running_var, 1.num_batches_tracked"
    )
    assert message("TP103/bad").startswith("each forward records 9 autograd nodes")
    assert message("TP704/bad") == (
        "embedding differs from the golden set: cos is 0.865 and has to be at least 0.999; "
        "worst of 300 rows at batch size 1"
    )
    assert "cos is 0.998997 and has to be at least 0.999" in message("TP704/bad_by_a_hair")
    assert "max_abs is 0.0234 and has to be at most 0.01" in message("TP704/bad_max_abs")
    assert message("TP706/bad").startswith("encode needs load(), so each replica pays 5.6 s")
    assert message("TP707/bad") == "the plan was measured elsewhere: num_cores 8 -> 2, torch 2.13.0 -> 2.14.1"
    assert message("TP201/bad").startswith(
        "memory grows by 1.98 MiB [1.98, 1.98] for each 1,000 requests, over 15,000 of them and without slowing down, "
        "1,709 MiB a day at this rate; what malloc has handed out grows"
    )


# The edges of single rules


def modes(**changes: Any) -> tuple[str, ...]:
    """Codes found in a harmless model with ``changes``."""
    seen = ModesSeen(
        target="app.py:Net",
        training=True,
        loaded_repeat_diff=0.0,
        loaded_mutated_buffers=(),
        eval_diff=0.0,
        repeat_diff=0.0,
        uses_rng=False,
        mutated_buffers=(),
        num_autograd_nodes=0,
        non_finite_outputs=(),
        num_samples=3,
    )
    return tuple(finding.code for finding in judge(msgspec.structs.replace(seen, **changes)))


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, ()),
        ({"eval_diff": 1e-5, "repeat_diff": 1e-5, "loaded_repeat_diff": 1e-5}, ()),
        ({"eval_diff": 1.1e-5}, ("TP101",)),
        ({"training": False, "eval_diff": 0.2}, ("TP101",)),
        ({"loaded_repeat_diff": 0.2}, ("TP101",)),
        ({"loaded_mutated_buffers": ("bn.running_mean",)}, ("TP101",)),
        # random as served: the eval copy's difference says nothing about the mode …
        ({"eval_diff": 0.2, "loaded_repeat_diff": 0.2, "repeat_diff": 0.2, "uses_rng": True}, ("TP102",)),
        # … but buffers that only eval mode leaves alone do
        ({"repeat_diff": 0.2, "uses_rng": True, "loaded_mutated_buffers": ("bn.running_mean",)}, ("TP101", "TP102")),
        ({"mutated_buffers": ("n",), "loaded_mutated_buffers": ("n",)}, ("TP104",)),
        ({"mutated_buffers": ("n",), "loaded_mutated_buffers": ("n", "bn.running_mean")}, ("TP101", "TP104")),
        ({"uses_rng": True}, ()),
        ({"non_finite_outputs": ("output",)}, ("TP601",)),
        # NaN - NaN is NaN: it is no second finding where the answer itself is NaN
        ({"non_finite_outputs": ("output",), "repeat_diff": NAN, "eval_diff": NAN}, ("TP601",)),
        ({"eval_diff": NAN}, ("TP101",)),
    ],
)
def test_one_cause_has_one_finding(changes: dict[str, Any], codes: tuple[str, ...]) -> None:
    assert modes(**changes) == codes


def test_changed_buffers_are_an_error_only_where_they_moved_an_answer() -> None:
    (counter,) = judge(recorded(FIXTURES / "TP104/bad.json"))
    (running_mean,) = judge(recorded(FIXTURES / "TP104/bad_running_mean.json"))
    assert (counter.severity, running_mean.severity) == ("warning", "error")


def test_an_artifact_with_a_fallback_is_a_warning() -> None:
    (alone,) = judge(recorded(FIXTURES / "TP705/bad.json"))
    (with_fallback,) = judge(recorded(FIXTURES / "TP705/bad_with_fallback.json"))
    assert (alone.severity, with_fallback.severity) == ("error", "warning")
    assert "onnxruntime, 2 threads is used instead" in with_fallback.message


def test_a_difference_that_is_nan_counts_as_one() -> None:
    same = {"target": "app.py:Net", "output": "y", "threshold": 1e-9, "precision": "float64"}
    batch = BatchSeen(row_diff=NAN, batch_size=2, **same)
    padding = PaddingSeen(pad_diff=NAN, dim="length", size=7, padded_size=16, **same)
    found = (*judge(batch), *judge(padding))
    assert [finding.code for finding in found] == ["TP701", "TP702"]
    assert found[0].evidence["row_diff"] == "nan"  # JSON has no NaN


@pytest.mark.parametrize(("row_diff", "num_findings"), [(1e-9, 0), (1.01e-9, 1)])
def test_a_row_may_differ_by_rounding(row_diff: float, num_findings: int) -> None:
    seen = BatchSeen(
        target="app.py:Net", row_diff=row_diff, output="y", batch_size=2, threshold=1e-9, precision="float64"
    )
    assert len(judge(seen)) == num_findings


FLAT = Growth(slope=0.0, low=-9.0, high=9.0, first=0.0, first_low=-9.0, second=0.0, second_low=-9.0)
GROWS = Growth(slope=3e3, low=2e3, high=4e3, first=3e3, first_low=1e3, second=3e3, second_low=1e3)


def memory(**changes: Any) -> list[str]:
    """Kinds of growth found in a replica whose resident and private memory grow, and nothing else, with ``changes``."""
    seen = MemorySeen(
        target="app.py:Net",
        replica=1,
        num_samples=200,
        num_requests=10_000,
        seconds=2000.0,
        resident=GROWS,
        private=GROWS,
        in_use=FLAT,
        free=FLAT,
    )
    return [str(finding.evidence["kind"]) for finding in judge(msgspec.structs.replace(seen, **changes))]


def growing(**changes: float) -> Growth:
    return msgspec.structs.replace(GROWS, **changes)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["mapped"]),
        ({"in_use": GROWS}, ["kept"]),
        ({"in_use": GROWS, "private": FLAT, "resident": FLAT}, ["kept"]),  # it fills what malloc held free
        ({"free": GROWS}, ["held"]),
        ({"free": growing(slope=1.4e3)}, ["unknown"]),  # less than half of it
        ({"free": growing(first_low=0.0)}, ["unknown"]),  # not proven
        ({"in_use": msgspec.structs.replace(FLAT, high=1.6e3)}, ["unknown"]),  # may be more than half of it
        ({"in_use": None, "free": None}, ["unknown"]),
        ({"private": FLAT}, []),
        ({"resident": FLAT}, []),
        ({"num_samples": 47}, []),
        ({"num_requests": 7_499}, []),
        ({"num_requests": 7_500}, ["mapped"]),
        ({"device_allocated": GROWS, "device_reserved": GROWS}, ["mapped", "device-kept"]),
        ({"device_allocated": FLAT, "device_reserved": GROWS}, ["mapped", "device-held"]),
        ({"device_allocated": FLAT, "device_reserved": FLAT}, ["mapped"]),
        ({"device_allocated": GROWS, "private": FLAT}, ["device-kept"]),
    ],
)
def test_what_grows_tells_the_kind(changes: dict[str, Any], kinds: list[str]) -> None:
    assert memory(**changes) == kinds


@pytest.mark.parametrize(
    ("growth", "num_kinds"),
    [
        (growing(low=100.0), 0),
        (growing(low=101.0), 1),
        (growing(first_low=0.0), 0),
        (growing(second_low=0.0), 0),
        (growing(second=0.79 * 3e3), 0),  # it slows down
        (growing(second=0.81 * 3e3), 1),
        (growing(second=9e3), 1),
        (growing(slope=838.0), 0),  # 10,000 requests: less than 8 MiB
        (growing(slope=839.0), 1),
        (growing(second=NAN), 0),
    ],
)
def test_memory_grows_only_where_it_matters_and_goes_on(growth: Growth, num_kinds: int) -> None:
    assert len(memory(in_use=growth, private=FLAT)) == num_kinds


# Any observation


def observations() -> st.SearchStrategy[Observation]:
    """Every kind of observation with any values, NaN and infinity too."""
    likely: dict[Any, st.SearchStrategy[Any]] = {  # the values that rules branch on come up often
        int: st.integers(min_value=0, max_value=2) | st.integers(min_value=0, max_value=2**40),
        float: st.sampled_from([0.0, 1.0, NAN, float("inf")]) | st.floats(),
        str: st.just("") | st.text(),
    }

    def values(type_: Any) -> st.SearchStrategy[Any]:
        return likely.get(type_, st.from_type(type_))

    kinds = [
        st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})
        for kind in get_args(Observation)
    ]
    return st.one_of(kinds)


@given(observations())
def test_judging_never_raises_and_what_it_finds_can_be_stored(seen: Observation) -> None:
    for finding in judge(seen):
        rule = next(rule for rule in RULES if rule.code == finding.code)
        assert finding.name == rule.name
        assert isinstance(seen, rule.observes)
        assert finding.where.startswith(seen.target)
        assert decode(encode(finding), Finding, what="finding") == finding


@given(observations())
def test_judging_twice_finds_the_same(seen: Observation) -> None:
    assert judge(seen) == judge(seen)


def test_a_metric_within_the_margin_or_better_is_no_finding_though_it_differs() -> None:
    def found(low: float, high: float, better: str) -> list[str]:
        difference = Difference(mean=(low + high) / 2, low=low, high=high)
        seen = msgspec.structs.replace(recorded(FIXTURES / "TP604/bad.json"), difference=difference, better=better)
        return [finding.code for finding in judge(seen)]

    assert found(-0.0049, -0.0001, "higher") == []
    assert found(-0.0051, -0.0001, "higher") == ["TP604"]
    assert found(0.0001, 0.0051, "higher") == []
    assert found(0.0001, 0.0051, "lower") == ["TP604"]
    assert found(0.0001, 0.0051, "unknown") == ["TP604"]
    assert found(-0.02, 0.0001, "higher") == []


@pytest.mark.parametrize(("num_skipped_last", "num_findings"), [(19, 0), (20, 1)])
def test_a_scaler_may_skip_as_often_as_its_scale_can_explain(num_skipped_last: int, num_findings: int) -> None:
    seen = msgspec.structs.replace(recorded(FIXTURES / "TP603/bad.json"), num_skipped_last=num_skipped_last)
    assert len(judge(seen)) == num_findings


def test_precision_messages_name_the_value_that_shows_it() -> None:
    assert message("TP602/bad") == ("aten.mul.Tensor in b.2 (net.py:9) reaches 1.3e+05, 2 times what float16 can hold")
    assert message("TP602/bad_without_cure") == (
        "the cast to float16 (net.py:9) reaches 1.3e+05, 2 times what float16 can hold, the first of 2 operations"
    )
    assert message("TP603/bad") == (
        "the scaler skipped all 25 steps, and its scale went from 65536 to 0.002: nothing was trained"
    )
    assert message("TP604/bad") == (
        "acc differs from 32-true by -0.0067 [-0.010, -0.0032] over 24 seeds; the margin is 0.005"
    )
