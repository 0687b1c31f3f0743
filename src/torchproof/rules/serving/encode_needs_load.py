"""TP706."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import seconds
from torchproof.types import Finding, LoadSeen


class EncodeNeedsLoad(Rule[LoadSeen]):
    """`encode` uses something that only `load()` makes.

    ## Why it matters
    A plan with an exported artifact doesn't need the PyTorch model. Where `encode` needs a tokenizer that `load()`
    made, every replica still has to run `load()`: it imports torch, holds the weights a second time and starts as
    slowly as before.

    ## How it is detected
    `encode` is called on a fresh Service without `load()`, and again after it. The rule reports an `encode` that
    raises an error only the first time, with that error and the seconds that `load()` took.

    ## Example
    ```python
    class Embedder(tp.Service):
        def load(self):
            self.tokenizer = Tokenizer.from_file("tokenizer.json")
            return Net().eval()

        def encode(self, request):
            return {"ids": torch.tensor(self.tokenizer.encode(request["text"]).ids)}
    ```

    ## Use instead
    ```python
    class Embedder(tp.Service):
        def __init__(self):
            self.tokenizer = Tokenizer.from_file("tokenizer.json")

        def load(self):
            return Net().eval()

        def encode(self, request):
            return {"ids": torch.tensor(self.tokenizer.encode(request["text"]).ids)}
    ```

    ## Fix
    Make in `__init__` what `encode` and `decode` need, and leave to `load()` what only the model needs.

    ## Sources
    - Measured on a sentence embedding model, from the start of a process to its first answer: 8.7 s and 432 MB
      with `load()`, 0.8 s and 175 MB with ONNX Runtime alone.
    """

    code = "TP706"
    name = "encode-needs-load"
    severity = "warning"
    observes = LoadSeen

    def judge(self, seen: LoadSeen) -> Iterable[Finding]:
        if seen.encode_needs_load:
            yield self.finding(
                seen.target,
                f"encode needs load(), so each replica pays {seconds(seen.load_s)} and the model's memory even where "
                f"an exported artifact answers: {seen.error}",
                evidence={"load_s": seen.load_s, "error": seen.error},
                fix="make what encode needs in __init__",
            )
