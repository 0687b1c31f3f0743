"""Is the model in eval mode in effect? Runs it as loaded and as served, and compares."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchproof.target.rows import Batch, FlatModule, Row, dtype_name, stack
from torchproof.types import ModesSeen, Signature

NUM_REPEATS = 3
# What rounding alone may explain, relative to the largest output, by the model's own precision. float32: see the rules'
# sources; float64 gains nothing by being stricter; bf16 and fp16 keep 8 and 11 bits.
ROUNDING = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@contextmanager
def unchanged(module: nn.Module, *, evaluate: bool) -> Iterator[None]:
    """Puts mode flags, buffers, plain attributes and the random state back as they were.

    Args:
        evaluate: whether the module is in eval mode meanwhile.
    """
    states = [_State(m) for m in module.modules()]
    random = torch.get_rng_state()
    if evaluate:
        module.eval()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        for state in states:
            state.restore()


class _State:
    """What one module holds beside its parameters: buffers with their content, and its attributes as they are.

    Attributes go together with buffers: a cache's buffer put back without its size attribute would be taken for valid.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.training = getattr(module, "training", None)  # a frozen TorchScript module has none
        self.buffers = dict(module._buffers.items())
        self.contents = {name: b.detach().clone() for name, b in self.buffers.items() if b is not None}

    def restore(self) -> None:
        if isinstance(self.module, torch.jit.ScriptModule):  # keeps its attributes out of Python's sight
            if self.training is not None:
                self.module.training = self.training
            for name, buffer in self.buffers.items():
                setattr(self.module, name, buffer)
        else:
            vars(self.module).clear()
            vars(self.module).update(self.attributes)
            self.module._buffers.clear()
            self.module._buffers.update(self.buffers)
        with torch.inference_mode():  # in which tensors made inside and outside of it may be written
            for name, content in self.contents.items():
                buffer = self.buffers[name]
                if buffer is not None and not same(buffer, content):  # an expanded buffer can't be written at all
                    buffer.copy_(content)


def see_modes(module: nn.Module, rows: Sequence[Row], signature: Signature, target: str) -> ModesSeen:
    """The module as ``load()`` returned it; it is left as it was.

    Args:
        rows: requests to run, each on its own.
    """
    training = getattr(module, "training", False)
    loaded = [_watch(module, stack([row], signature), signature, evaluate=False) for row in rows]
    served = [_watch(module, stack([row], signature), signature, evaluate=True) for row in rows]
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
        threshold=ROUNDING[precision_of(module)],
    )


def precision_of(module: nn.Module) -> str:
    """The coarsest of the precisions that a module's parameters have; float32 where it has none."""
    names = {dtype_name(p.dtype) for p in module.parameters()} & ROUNDING.keys()
    return max(names, key=lambda name: ROUNDING[name], default="float32")


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
    # Copies, since a forward may change its input in place; made here, where they are no inference tensors.
    inputs = [[tensor.clone() for tensor in batch.values()] for _ in range(NUM_REPEATS)]
    with unchanged(module, evaluate=evaluate), torch.inference_mode():
        buffers = [_buffers(module)]
        for tensors in inputs:
            random = torch.get_rng_state()
            try:
                outputs = dict(zip(flat.output_names, flat(*tensors), strict=True))
            except Exception:
                if evaluate:
                    raise
                return seen  # a forward that only raises in training mode (batch norm on one value) has no outputs
            seen.uses_rng |= not torch.equal(random, torch.get_rng_state())
            seen.num_autograd_nodes = max(seen.num_autograd_nodes, count_autograd_nodes(outputs.values()))
            seen.outputs.append({name: tensor.detach().clone() for name, tensor in outputs.items()})
            buffers.append(_buffers(module))
    seen.mutated = _mutated(buffers[0], buffers[1], buffers[-1])
    seen.repeat_diff = max(relative_diff(seen.outputs[0], other)[1] for other in seen.outputs[1:])
    seen.non_finite = [
        name for name, t in seen.outputs[0].items() if t.is_floating_point() and not bool(t.isfinite().all())
    ]
    return seen


def _buffers(module: nn.Module) -> Batch:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _mutated(before: Batch, first: Batch, last: Batch) -> list[str]:
    """Buffers that forwards change. A cache that the first forward makes or enlarges and the next leave is none."""
    return [
        name
        for name, buffer in last.items()
        if name not in first
        or not same(first[name], buffer)
        or (name in before and before[name].shape == buffer.shape and not same(before[name], buffer))
    ]


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
    if not torch.equal(finite, b.isfinite()) or not same(a[~finite], b[~finite]):
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
