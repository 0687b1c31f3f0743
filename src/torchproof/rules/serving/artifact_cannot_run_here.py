"""TP705."""

from collections.abc import Iterable

from torchproof.rules.base import Rule, of_candidate
from torchproof.rules.wording import some
from torchproof.types import ArtifactSeen, Finding


class ArtifactCannotRunHere(Rule[ArtifactSeen]):
    """The chosen artifact was compiled for another CPU, or this machine can't load it.

    ## Why it matters
    Code compiled for instructions that the CPU lacks kills the process with SIGILL at the first request, without a
    traceback. With a fallback the service runs, and not at the speed that the plan promises: that is a warning.
    Without one nothing can be served, and it is an error.

    ## How it is detected
    The instruction sets stored with the artifact are compared with this CPU's before anything is loaded. Where none
    is missing the artifact is loaded, and the first line of an error is reported.

    ## Example
    ```python
    # built on a CPU with avx512, copied to one without
    model = torch._inductor.aoti_load_package("net.pt2")
    ```

    ## Use instead
    ```python
    # rebuilt on the kind of machine that serves it
    path = torch._inductor.aoti_compile_and_package(torch.export.export(net, (x,)))
    model = torch._inductor.aoti_load_package(path)
    ```

    ## Fix
    Run `torchproof tune` on the kind of machine that serves. Where machines differ, choose a runtime whose artifact
    isn't tied to an instruction set, such as ONNX Runtime. Where loading raised an error, install the versions that
    the bundle lists.

    ## Sources
    - PyTorch issue 121516: a model compiled with avx512 dies with SIGILL on a CPU without it.
    - PyTorch docs, "AOTInductor: Ahead-Of-Time Compilation for Torch.Export-ed Models".
    """

    code = "TP705"
    name = "artifact-cannot-run-here"
    severity = "error"
    observes = ArtifactSeen

    def judge(self, seen: ArtifactSeen) -> Iterable[Finding]:
        if seen.missing_cpu_flags:
            cause = f"this CPU lacks {some(seen.missing_cpu_flags)}, which the artifact was compiled for"
        elif seen.error:
            cause = f"the artifact does not load: {seen.error}"
        else:
            return
        yield self.finding(
            of_candidate(seen.target, seen.candidate),
            f"{cause}; {seen.fallback} is used instead" if seen.fallback else f"{cause}; there is no fallback",
            evidence={
                "missing_cpu_flags": ", ".join(seen.missing_cpu_flags),
                "error": seen.error,
                "fallback": seen.fallback,
            },
            fix="run torchproof tune on this kind of machine",
            severity="warning" if seen.fallback else None,
        )
