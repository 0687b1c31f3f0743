"""Rows whose answers are known, run again and again while serving: a model that goes wrong is found out."""

from collections.abc import Sequence

from torchproof.serve.wire import CHECK_ROWS
from torchproof.target import golden
from torchproof.target.rows import Row, Run, run_rows, sizes_of, volume
from torchproof.target.usercode import first_line
from torchproof.types import Signature, Tolerance

# Of a target without a bundle, whose own answers at the start are the reference: what other batch sizes and thread
# counts may add to float32.
OWN_TOLERANCE = Tolerance(metric="max_rel", bound=1e-3)


class Canary:
    """A few rows with their reference outputs.

    Attributes:
        finite: whether all references are; else an answer that is not says nothing.
    """

    def __init__(
        self, run: Run, signature: Signature, rows: Sequence[Row], references: Sequence[Row], tolerance: Tolerance
    ) -> None:
        order = sorted(range(len(rows)), key=lambda i: volume(sizes_of(rows[i], signature.inputs)))
        picked = sorted({0, len(order) // 2, len(order) - 1}) if order else []
        self._run, self._signature, self._tolerance = run, signature, tolerance
        # Copies: a file's tensors are mapped, and would change with a bundle that is written over in place.
        self._rows = [{name: tensor.clone() for name, tensor in rows[order[i]].items()} for i in picked]
        self._references = [{name: tensor.clone() for name, tensor in references[order[i]].items()} for i in picked]
        self.finite = all(
            bool(tensor.isfinite().all()) for row in references for tensor in row.values() if tensor.is_floating_point()
        )

    def look(self, num_rows: int = CHECK_ROWS) -> str:
        """What is wrong with the answers to the first so many rows; empty when nothing is."""
        rows, references = self._rows[:num_rows], self._references[:num_rows]
        if not rows:
            return ""
        try:
            outputs = [run_rows(self._run, [row], self._signature)[0] for row in rows]
        except Exception as exc:  # noqa: BLE001  a model may raise anything
            return f"a row of the golden set raised {first_line(exc)}"
        error = golden.compare(outputs, references, [spec.name for spec in self._signature.outputs])
        if golden.within(error, self._tolerance):
            return ""
        value = golden.value_of(error, self._tolerance)
        kind = self._tolerance.metric
        said = "is not finite" if value != value else f"has {kind} {value:.5g}, the bound is {self._tolerance.bound:g}"
        return f"output {error.output!r} of a row whose answer is known {said}"
