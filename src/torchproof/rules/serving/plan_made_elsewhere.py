"""TP707."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import Finding, PlanSeen


class PlanMadeElsewhere(Rule[PlanSeen]):
    """The plan was measured on another processor, another number of cores or other versions than serve it.

    ## Why it matters
    The golden set proves that the answers are the same here. It doesn't prove the speed: which runtime wins, the
    number of threads and the largest batch within the limits were measured elsewhere, and may be the wrong choice.

    ## How it is detected
    The processor, the number of cores that the process may run on and the versions of torch and ONNX Runtime are
    stored with the plan, and compared when `torchproof serve` starts. A fact that is unknown on either side is not
    compared.

    ## Example
    ```python
    torch.set_num_threads(16)  # the fastest on the machine it was measured on, which has 16 cores
    ```

    ## Use instead
    ```python
    num_threads = fastest(measure(net, num_threads) for num_threads in (1, 2))  # on the machine that serves
    torch.set_num_threads(num_threads)
    ```

    ## Fix
    Run `torchproof tune` again on this machine, with the versions that will serve. Or serve where the plan was made:
    the same kind of machine, as many cores, the versions that the bundle lists.

    ## Sources
    - PyTorch docs, "Performance Tuning Guide", section "CPU specific optimizations".
    - PyTorch docs, "Reproducibility": results may differ between releases and between platforms.
    """

    code = "TP707"
    name = "plan-made-elsewhere"
    severity = "warning"
    observes = PlanSeen

    def judge(self, seen: PlanSeen) -> Iterable[Finding]:
        changed = {
            name: f"{expected} -> {found}"
            for name, expected in seen.expected.items()
            if expected and (found := seen.found.get(name)) and found != expected
        }
        if changed:
            yield self.finding(
                seen.target,
                "the plan was measured elsewhere: " + ", ".join(f"{name} {change}" for name, change in changed.items()),
                evidence=changed,
                fix="run torchproof tune again on this machine",
            )
