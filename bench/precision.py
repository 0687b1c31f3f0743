"""What the comparison of precisions says of `examples/digits.py`, of a planted difference and of none. Writes
bench/results/precision.md.

    python -m bench.precision

The planted difference smooths labels where autocast is on. Its twin draws one random number more there, so that both
are of one distribution and no two seeds are alike: a comparison that calls them different is wrong.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from torchproof.machine.environment import read_environment
from torchproof.render import precision, units
from torchproof.target.resolve import resolve
from torchproof.tune.precision import compare_precisions
from torchproof.types.precision import PrecisionProof
from torchproof.types.training import TrainPrecision

RESULT = Path(__file__).parent / "results" / "precision.md"
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
LOSS = "        return nn.functional.cross_entropy(model(images), labels)\n"
AUTOCAST = 'torch.is_autocast_enabled("cpu")'
# Fixed before the first run: half a percent of accuracy, and about a tenth of the loss that is reached.
MARGINS = {"acc": 0.005, "nll": 0.01}

PLANTED = f"""        smoothing = 0.1 if {AUTOCAST} else 0.0
        return nn.functional.cross_entropy(model(images), labels, label_smoothing=smoothing)
"""
TWIN = f"        torch.rand(int({AUTOCAST}))\n{LOSS}"


def changed(folder: Path, name: str, loss: str) -> Path:
    """The example with another loss."""
    text = DIGITS.read_text()
    assert LOSS in text
    path = folder / f"{name}.py"
    path.write_text(text.replace(LOSS, loss))
    return path


def compare(path: Path, precisions: tuple[TrainPrecision, ...], num_steps: int | None, budget_s: float) -> str:
    proof = compare_precisions(
        resolve(str(path)),
        margins=MARGINS,
        precisions=precisions,
        num_steps=num_steps,
        budget_s=budget_s,
        progress=lambda text, share: print(f"{path.stem} {share:4.0%} {text}", file=sys.stderr),
    )
    return f"```\n{shown(proof, path)}```"


def shown(proof: PrecisionProof, path: Path) -> str:
    """The report as a user sees it, with the findings."""
    found = [f"{finding.code}: {finding.message}" for finding in proof.findings] or ["no findings"]
    return precision.text(proof, 110).replace(str(path), path.name) + "\n" + "\n".join(found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=480.0, help="of the example; the others have half of it each")
    budget_s = parser.parse_args().budget_s
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "examples/digits.py, whole runs": compare(DIGITS, ("bf16-mixed", "16-mixed"), None, budget_s),
            "A planted difference": compare(
                changed(Path(folder), "planted", PLANTED), ("bf16-mixed",), None, budget_s / 2
            ),
            "Its twin, without one": compare(changed(Path(folder), "twin", TWIN), ("bf16-mixed",), None, budget_s / 2),
        }
    machine = read_environment()
    said = (
        f"# Precision: what the comparison says\n\nWritten by `python -m bench.precision --budget-s {budget_s:g}` on "
        f"{time.strftime('%Y-%m-%d')} in {units.seconds(time.monotonic() - start)}: {machine.cpu_model}, "
        f"{machine.num_cores} cores, Python {machine.python}, torch {machine.versions['torch']}. The margins were "
        "fixed before: " + ", ".join(f"{name} {margin:g}" for name, margin in MARGINS.items()) + "."
    )
    RESULT.write_text("\n\n".join([said, *(f"## {title}\n\n{text}" for title, text in parts.items())]) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
