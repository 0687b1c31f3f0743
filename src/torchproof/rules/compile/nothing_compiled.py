"""TP301."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import CompileSeen, Finding


class NothingCompiled(Rule[CompileSeen]):
    """`torch.compile` was applied and compiled no graph at all.

    ## Why it matters
    The model runs in eager mode, correctly, and nothing says so. The process still pays for importing the compiler
    and for its guards, and the speed-up that the deployment counts on isn't there.

    ## How it is detected
    After the first compiled call the compiler's own counters are read: it looked at one Python frame or more, and
    made no graph. Models with graph breaks that compiled at least one graph are not reported.

    ## Example
    ```python
    model = torch.compile(nn.LSTM(64, 128).eval())
    model(x)
    ```

    ## Use instead
    ```python
    model = nn.LSTM(64, 128).eval()
    model(x)
    ```

    ## Fix
    Take `torch.compile` off, or run it once with `fullgraph=True`, which raises an error that names the reason. For
    recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) let `torchproof tune` measure the other runtimes.

    ## Sources
    - PyTorch docs, `torch.compile`: `fullgraph`.
    - Measured on torch 2.13: a bare `nn.LSTM` gives 1 frame and 0 graphs, without an error or a warning, and a
      speed-up whose confidence interval, [0.93, 1.31], includes 1.
    """

    code = "TP301"
    name = "nothing-compiled"
    severity = "warning"
    observes = CompileSeen

    def judge(self, seen: CompileSeen) -> Iterable[Finding]:
        if seen.num_frames > 0 and seen.num_graphs == 0:
            reasons = f": {some(seen.reasons)}" if seen.reasons else ", and gave no reason"
            yield self.finding(
                seen.target,
                f"torch.compile looked at {count(seen.num_frames, 'frame')} and compiled 0 graphs{reasons}",
                evidence={
                    "num_frames": seen.num_frames,
                    "num_graphs": seen.num_graphs,
                    "num_graph_breaks": seen.num_graph_breaks,
                    "reasons": "; ".join(seen.reasons),
                },
                fix="take torch.compile off; fullgraph=True names what it cannot compile",
            )
