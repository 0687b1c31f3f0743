"""Is the model in eval mode in effect? Runs it as loaded and as served, and compares."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchproof.target.rows import Batch, FlatModule, Row, stack
from torchproof.types import ModesSeen, Signature

NUM_REPEATS = 3
# What rounding alone may explain, relative to the largest output, by the model's own precision. float32: see the rules'
# sources; float64 gains nothing by being stricter; bf16 and fp16 keep 8 and 11 bits.
ROUNDING = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@contextmanager
def unchanged(module: nn.Module, *, evaluate: bool) -> Iterator[None]:
    """Puts mode flags, buffers and the random state back as they were.

    Args:
        evaluate: whether the module is in eval mode meanwhile.
    """
    flags = {m: m.training for m in module.modules()}
    buffers = [(m, n, b, b.detach().clone()) for m in module.modules() for n, b in m._buffers.items() if b is not None]
    random = torch.get_rng_state()
    if evaluate:
        module.eval()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        for m, training in flags.items():
            m.training = training
        with torch.no_grad():
            for m, name, buffer, content in buffers:
                m._buffers[name] = buffer
                buffer.copy_(content)


def see_modes(module: nn.Module, rows: Sequence[Row], signature: Signature, target: str) -> ModesSeen:
    """The module as ``load()`` returned it; it is left as it was.

    Args:
        rows: requests to run, each on its own.
    """
    training = module.training
    loaded = [_watch(module, stack([row], signature), signature, evaluate=False) for row in rows]
    served = [_watch(module, stack([row], signature), signature, evaluate=True) for row in rows]
    dtype = str(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32))
    return ModesSeen(
        target=target,
        training=training,
        loaded_repeat_diff=max(w.repeat_diff for w in loaded),
        loaded_mutated_buffers=tuple(sorted({name for w in loaded for name in w.mutated})),
        eval_diff=max(_eval_diff(a, b) for a, b in zip(loaded, served, strict=True)),
        repeat_diff=max(w.repeat_diff for w in served),
        uses_rng=any(w.uses_rng for w in served),
        mutated_buffers=tuple(sorted({name for w in served for name in w.mutated})),
        num_autograd_nodes=max(w.num_autograd_nodes for w in served),
        non_finite_outputs=tuple(sorted({name for w in served for name in w.non_finite})),
        num_samples=len(rows),
        threshold=ROUNDING.get(dtype.removeprefix("torch."), 1e-05),
    )


class _Watched:
    """One request, run several times in one mode."""

    def __init__(self) -> None:
        self.outputs: list[Batch] = []
        self.repeat_diff = 0.0
        self.uses_rng = False
        self.mutated: list[str] = []
        self.num_autograd_nodes = 0
        self.non_finite: list[str] = []


def _watch(module: nn.Module, batch: Batch, signature: Signature, *, evaluate: bool) -> _Watched:
    seen = _Watched()
    flat = FlatModule(module, signature)
    with unchanged(module, evaluate=evaluate), torch.inference_mode():
        before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        for _ in range(NUM_REPEATS):
            random = torch.get_rng_state()
            try:
                outputs = dict(zip(flat.output_names, flat(*batch.values()), strict=True))
            except Exception:
                if evaluate:
                    raise
                return seen  # a forward that only raises in training mode (batch norm on one value) has no outputs
            seen.uses_rng |= not torch.equal(random, torch.get_rng_state())
            seen.num_autograd_nodes = max(seen.num_autograd_nodes, count_autograd_nodes(outputs.values()))
            seen.outputs.append({name: tensor.detach().clone() for name, tensor in outputs.items()})
        seen.mutated = [n for n, b in module.named_buffers() if n not in before or not same(before[n], b)]
    seen.repeat_diff = max(relative_diff(seen.outputs[0], other)[1] for other in seen.outputs[1:])
    seen.non_finite = [
        name for name, t in seen.outputs[0].items() if t.is_floating_point() and not bool(t.isfinite().all())
    ]
    return seen


def _eval_diff(loaded: _Watched, served: _Watched) -> float:
    return relative_diff(served.outputs[0], loaded.outputs[0])[1] if loaded.outputs else math.inf


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shape and content; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def relative_diff(reference: Batch, other: Batch) -> tuple[str, float]:
    """The output that differs most, and its largest difference over its largest absolute value.

    Infinite where the shapes differ or only one side is finite; for integers the share of elements that differ.
    """
    worst = ("", 0.0)
    for name, a in reference.items():
        worst = max(worst, (name, _diff(a, other[name])), key=lambda pair: pair[1])
    return worst


def _diff(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if same(a, b):
        return 0.0
    if not a.is_floating_point():
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    finite = a.isfinite()
    if not bool((finite == b.isfinite()).all()):
        return math.inf
    a, b = a[finite], b[finite]
    largest = float(a.abs().max())
    return float((a - b).abs().max()) / largest if largest > 0 else math.inf


def count_autograd_nodes(outputs: Iterable[Tensor]) -> int:
    """The ``grad_fn`` nodes that are alive behind the outputs."""
    todo = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return len(seen)
