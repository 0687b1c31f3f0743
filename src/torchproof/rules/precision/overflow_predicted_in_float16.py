"""TP602."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import Finding, OverflowSeen
from torchproof.types.precision import Overflow

FLOAT16_MAX = 65504.0  # torch.finfo(torch.float16).max


class OverflowPredictedInFloat16(Rule[OverflowSeen]):
    """An operation that autocast runs in float16 has results that float16 can't hold.

    ## Why it matters
    float16 ends at 65504, and what is larger becomes infinite. The loss is then NaN, or the gradients are not finite
    and the scaler skips the step: training stands still or ends, often hours after it was started. bfloat16 has
    float32's range, and none of this.

    ## How it is detected
    Before anything is trained, four micro-batches go forward and backward, and one through `metrics()`, under
    autocast to bfloat16, which runs the same operations in the lower precision as autocast to float16. A
    `TorchDispatchMode` reads every result of those, also between modules, and reports where a result is above the
    limit and the arguments are not. Operations that autocast leaves in float32 may be as large as they like. Masks
    (infinity, `torch.finfo(x.dtype).min`) and results within 1% above the limit are not reported, and nothing is where
    16-mixed then gives the same loss, finite metrics and finite gradients: a value that is clamped next may overflow.
    It is seen with the model's first weights: activations that grow in training show only there.

    ## Example
    ```python
    def forward(self, x):
        h = self.up(x) * 60
        return self.down(h * h)
    ```

    ## Use instead
    ```python
    def forward(self, x):
        h = self.up(x) * 60
        with torch.autocast(x.device.type, enabled=False):
            return self.down((h.float() * h.float()) / h.shape[-1])
    ```

    ## Fix
    Train in bf16-mixed. Where it has to be 16-mixed, keep the module in float32 with `--fp32-module NAME`; the
    modules that are named were tried out together, in 16-mixed. Where none are named, the operation is in the model's
    own `forward` or in `loss()`: scale it down there, or run it inside `torch.autocast(..., enabled=False)`.

    ## Sources
    - float16 ends at 65504, bfloat16 and float32 at 3.4e38 (`torch.finfo`).
    - Measured, three blocks with `h * h` between two linear layers: the largest output of a module is 0.004 of
      float16's limit, the product 1.99 times as large as it; with this block in float32 the loss of 16-mixed is
      21.2329, of 32-true 21.2321.
    - PyTorch docs, "Automatic Mixed Precision package", section "Autocast Op Reference".
    """

    code = "TP602"
    name = "overflow-predicted-in-float16"
    severity = "warning"
    observes = OverflowSeen

    def judge(self, seen: OverflowSeen) -> Iterable[Finding]:
        if not seen.overflows:
            return
        first = seen.overflows[0]
        more = len({(o.module, o.op, o.line) for o in seen.overflows} - {(first.module, first.op, first.line)})
        others = f", the first of {count(more + 1, 'operation')}" if more else ""
        cure = "".join(f"--fp32-module {name} " for name in seen.fp32_modules)
        yield self.finding(
            seen.target,
            f"{_place(first)} reaches {first.largest:.3g}, {first.largest / FLOAT16_MAX:.2g} times what float16 can "
            f"hold{others}",
            evidence={
                "phase": first.phase,
                "module": first.module,
                "op": first.op,
                "line": first.line,
                "largest": first.largest,
                "num_operations": more + 1,
                "num_batches": seen.num_batches,
                "fp32_modules": some(seen.fp32_modules),
            },
            fix=f"train in bf16-mixed, or in 16-mixed with {cure.strip()}"
            if cure
            else "train in bf16-mixed, or scale the operation down; no module in float32 cures it",
        )


def _place(overflow: Overflow) -> str:
    """``aten.mul.Tensor in b.2 (net.py:12)``."""
    what = "the cast to float16" if "_to_copy" in overflow.op else overflow.op.removesuffix(".default")
    if overflow.phase == "backward":
        what = f"{what}, the gradient of"
        return f"{what} {overflow.module or 'the model'}{f' ({overflow.line})' if overflow.line else ''}"
    where = f" in {overflow.module}" if overflow.module else ""
    return f"{what}{where}{f' ({overflow.line})' if overflow.line else ''}"
