"""A bundle that is not what was written is refused, and the error names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchproof.bundle import write
from torchproof.bundle.read import open_bundle
from torchproof.errors import BundleError
from torchproof.types import SCHEMA


@pytest.fixture
def bundle(project: Any, tmp_path: Path) -> Path:
    path: Path = project.write(tmp_path / "app.tp")
    return path


def refused(path: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert caught.value.help
    assert caught.value.exit_code == 2
    return caught.value


def reseal(path: Path) -> None:
    (path / "SHA256SUMS").unlink()
    write.write_sums(path)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes proof.json and makes the checksums fit again."""
    proof = json.loads((path / "proof.json").read_text())
    change(proof)
    (path / "proof.json").write_text(json.dumps(proof))
    reseal(path)


FILES = ["golden.safetensors", "weights.safetensors", "code/app.py", "code/data/factor.txt", "proof.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_named(bundle: Path, name: str) -> None:
    file = bundle / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert name in str(refused(bundle))


@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert name in str(refused(bundle))


ADDED = ["code/json.py", "code/parts/more.py", "code/json.so", "code/json.pyc", "code/data/more.txt", "code/.env"]


@pytest.mark.parametrize("name", ADDED)
def test_added_code_is_refused(bundle: Path, name: str) -> None:
    """It would be imported or read in the place of what was proven."""
    (bundle / name).write_text("")
    error = refused(bundle)
    assert name in str(error)
    assert error.help.startswith("remove it")


def test_an_added_link_to_code_is_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("")
    (bundle / "code" / "json").symlink_to(tmp_path / "json")
    assert "code/json is not in SHA256SUMS" in str(refused(bundle))


@pytest.mark.parametrize("folder", ["", "code", "code/parts"])
def test_only_the_bundles_own_checksums_are_not_listed(bundle: Path, folder: str) -> None:
    """A model's folder may bring a file of the same name."""
    (bundle / folder / "SHA256SUMS").write_text("")
    reseal(bundle)
    open_bundle(bundle)


LEADS_OUT = ["/etc/hostname", "../app.py", "code/../../app.py"]


@pytest.mark.parametrize("name", LEADS_OUT)
def test_no_checksum_is_read_from_elsewhere(bundle: Path, name: str) -> None:
    with (bundle / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    assert f"SHA256SUMS: {name!r} leads out of the bundle" in str(refused(bundle))


@pytest.mark.parametrize("name", LEADS_OUT)
@pytest.mark.parametrize("key", ["target", "chosen", "runner-up"])
def test_no_code_or_artifact_is_loaded_from_elsewhere(bundle: Path, key: str, name: str) -> None:
    def change(proof: dict[str, Any]) -> None:
        chosen = proof["plan"]["chosen"]
        if key == "target":
            proof["target"]["path"] = name
        elif key == "chosen":
            chosen["artifact"] = name
        else:
            proof["plan"]["runners_up"] = [{**chosen, "artifact": name}]

    edit(bundle, change)
    assert f"proof.json: {name!r} leads out of the bundle" in str(refused(bundle))


def test_dots_in_a_name_lead_nowhere(bundle: Path) -> None:
    edit(bundle, lambda proof: proof["plan"]["chosen"].update(artifact="artifacts/v1..2/./eager"))
    open_bundle(bundle)


@pytest.mark.parametrize(
    "name", ["code/__pycache__/app.cpython-311.pyc", "code/parts/__pycache__/x.pyc", "README", "artifacts/x"]
)
def test_what_running_it_leaves_behind_is_no_harm(bundle: Path, name: str) -> None:
    file = bundle / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x")
    open_bundle(bundle)


@pytest.mark.parametrize("sums", [b"", b"\xff\xfe\x00garbage", b"\n\n", b"abc  proof.json\n"])
def test_broken_checksums_are_no_checksums(bundle: Path, sums: bytes) -> None:
    (bundle / "SHA256SUMS").write_bytes(sums)
    refused(bundle)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_seen(bundle: Path, data: st.DataObject) -> None:
    files = sorted(p for p in bundle.rglob("*") if p.is_file() and p.stat().st_size)
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    changed = bytearray(before)
    changed[position] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(changed)
    try:
        refused(bundle)
    finally:
        file.write_bytes(before)
    open_bundle(bundle)


def test_a_line_of_checksums_ends_in_one_way_only(bundle: Path) -> None:
    """Found by the test above: one bit makes a vertical tab of a newline."""
    sums = bundle / "SHA256SUMS"
    sums.write_bytes(sums.read_bytes().replace(b"\n", b"\x0b", 1))
    refused(bundle)


def test_a_newer_schema_says_which_and_to_upgrade(bundle: Path) -> None:
    """Before anything else: its other keys may mean anything."""

    def newer(proof: dict[str, Any]) -> None:
        proof.clear()
        proof.update(schema=SCHEMA + 1, torchproof="9.0.0", plan="in another form")

    edit(bundle, newer)
    error = refused(bundle)
    assert "torchproof 9.0.0" in str(error)
    assert f"schema {SCHEMA + 1}" in str(error)
    assert "upgrade" in error.help


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda proof: proof.update(colour="red"), "colour"),
        (lambda proof: proof["plan"]["chosen"].update(colour="red"), "$.plan.chosen"),
        (lambda proof: proof.pop("plan"), "plan"),
        (lambda proof: proof["golden"].update(num_rows="four"), "$.golden.num_rows"),
        (lambda proof: proof.pop("schema"), "schema"),
        (lambda proof: proof.update(schema="one"), "schema"),
    ],
)
def test_a_proof_of_another_shape_names_the_key(
    bundle: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    edit(bundle, change)
    error = str(refused(bundle))
    assert "proof.json" in error
    assert named in error


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_proof_that_is_no_json(bundle: Path, text: str) -> None:
    (bundle / "proof.json").write_text(text)
    assert "proof.json" in str(refused(bundle))


def test_what_is_no_bundle(tmp_path: Path) -> None:
    assert "no such folder" in str(refused(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    assert "no such folder" in str(refused(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "no bundle" in str(refused(tmp_path / "empty"))


def test_a_bundle_of_a_model_without_weights(project: Any, tmp_path: Path) -> None:
    write.write_bundle(
        tmp_path / "app.tp",
        project.proof(),
        golden=project.work / "golden.safetensors",
        weights=None,
        artifacts={},
        code=[Path(file) for file in project.done["code"]],
    )
    assert open_bundle(tmp_path / "app.tp").weights is None
