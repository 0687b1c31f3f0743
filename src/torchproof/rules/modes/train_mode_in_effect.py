"""TP101."""

import math
from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import answers_differ
from torchproof.rules.wording import of_largest, some
from torchproof.types import Finding, ModesSeen


class TrainModeInEffect(Rule[ModesSeen]):
    """The model that `load()` returns answers differently from its own eval-mode copy.

    ## Why it matters
    In training mode dropout drops activations, and batch norm uses the statistics of the batch instead of the
    stored ones, and moves the stored ones with every request. Answers are noisy or shifted, and nothing raises.
    torchproof calls `eval()` on what it serves. Every other user of `load()` (a notebook, another server, an
    export script) gets the model as it is.

    ## How it is detected
    One request is run several times on the model as `load()` returned it, and on a copy after `eval()`. The rule
    reports an answer that differs between the two, answers that differ between equal requests only as loaded, or
    buffers that a forward changes only as loaded. The flag `training` is not judged: it is True on models where
    it changes nothing, and False on models with a submodule left in training mode. Where the answers also vary in
    eval mode, a difference proves nothing about the mode, and TP102, TP104 or TP105 has the cause.

    ## Example
    ```python
    class Classifier(tp.Service):
        def load(self):
            model = Net()
            model.load_state_dict(torch.load("net.pt", weights_only=True))
            return model
    ```

    ## Use instead
    ```python
    class Classifier(tp.Service):
        def load(self):
            model = Net()
            model.load_state_dict(torch.load("net.pt", weights_only=True))
            return model.eval()
    ```

    ## Fix
    Call `eval()` once, on the whole model, at the end of `load()`. Where the flag is False already, look for a
    submodule on which `train()` was called later.

    ## Sources
    - PyTorch docs, "Autograd mechanics", section "Evaluation Mode"; `torch.nn.BatchNorm2d`, `torch.nn.Dropout`.
    - Threshold 1e-5, relative to the largest output. Measured: rounding alone gives 1e-7 to 1e-6 in float32.
    - Measured: a batch norm layer in training mode gives equal answers to equal requests (difference 0), so
      repeating a request does not show it; its moving buffers and the eval copy do.
    """

    code = "TP101"
    name = "train-mode-in-effect"
    severity = "warning"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        stable_as_served = not answers_differ(seen.repeat_diff, seen)
        stopped = [name for name in seen.loaded_mutated_buffers if name not in seen.mutated_buffers]
        effects = []
        if stable_as_served and answers_differ(seen.eval_diff, seen):
            off = f"its answer is off by {of_largest(seen.eval_diff)}"
            effects.append("its forward raises, or its answer is not finite" if math.isinf(seen.eval_diff) else off)
        if stable_as_served and answers_differ(seen.loaded_repeat_diff, seen):
            effects.append(f"equal requests differ by {of_largest(seen.loaded_repeat_diff)}")
        if stopped:
            effects.append(f"each forward changes {some(stopped)}")
        if effects:
            yield self.finding(
                seen.target,
                f"load() returns a model that is not in eval mode: {'; '.join(effects)}",
                evidence={
                    "eval_diff": seen.eval_diff,
                    "loaded_repeat_diff": seen.loaded_repeat_diff,
                    "repeat_diff": seen.repeat_diff,
                    "buffers_changed_as_loaded_only": ", ".join(stopped),
                    "training_flag": seen.training,
                },
                fix="return model.eval() from load()",
            )
