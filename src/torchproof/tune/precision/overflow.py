"""Finds the operations whose results float16 can't hold, without training in it.

Autocast to bfloat16 runs the same operations in the lower precision as autocast to float16 does, and bfloat16 has
float32's range. So a step under it shows which operations are low and how large their results are; what autocast
leaves in float32 may be as large as it likes. bfloat16 rounds to 3 digits: what is nearer to the limit isn't told.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchproof
from torchproof.types.precision import Overflow

# float16 ends at 65504 (torch.finfo). Twice bfloat16's rounding, 1/256, is added: below it could be either.
LIMIT = 65504 * (1 + 2 / 256)
# The largest bfloat16 is nothing that was computed: it is the mask ``torch.finfo(x.dtype).min``, which fits any dtype.
MASK = torch.finfo(torch.bfloat16).max
LOW = (torch.bfloat16, torch.float16)
# What these return is memory as it was found: nothing was computed.
UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(torchproof.__file__).parent), "<")
Phase = Literal["forward", "backward", "evaluation"]


class OverflowFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, notes each operation in a low precision whose result is too large for float16 and whose inputs
    are not. What runs inside is not changed, not by a bit.

    Args:
        model: whose modules are named.

    Attributes:
        phase: of the step; set it before each.
        found: the overflows by operation, the first one first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.found: dict[tuple[str, ...], Overflow] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules: list[str] = []
        self._made: dict[int, tuple[str, str]] = {}  # by sequence number: module and line of what backward goes through
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        if node is None and self.phase != "evaluation":
            # The first one that is dispatched after a node was made is that node's.
            self._made.setdefault(torch._C._autograd._get_sequence_nr(), self._here())
        # What is changed in place is read before; else only where the result is too large.
        before = _largest((args, kwargs)) if func._schema.is_mutable else None
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in UNWRITTEN:
            return out
        largest = _largest(out)
        if largest > LIMIT and (_largest((args, kwargs)) if before is None else before) <= LIMIT:
            module, line = self._here() if node is None else self._maker(node)
            self._note(module, str(func), line, largest)
        return out

    def _note(self, module: str, op: str, line: str, largest: float) -> None:
        key = (self.phase, module, op, line)
        known = self.found.get(key)
        if known is None or known.largest < largest:
            self.found[key] = Overflow(phase=self.phase, module=module, op=op, line=line, largest=largest)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        # One that the model doesn't know (a criterion of the loss) counts to the module around it.
        self._modules.append(self._names.get(id(module), self._modules[-1] if self._modules else ""))

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        self._modules.pop()  # and returns nothing: what a forward hook returns takes the place of the module's output

    def _here(self) -> tuple[str, str]:
        return self._modules[-1] if self._modules else "", _user_line()

    def _maker(self, node: Any) -> tuple[str, str]:
        """Where forward made an autograd node: it was given its number before its operation was dispatched."""
        return self._made.get(node._sequence_nr() + 1, ("", ""))


def _largest(values: Any) -> float:
    """The largest finite absolute value in tensors of a low precision; 0 where there is none."""
    largest = 0.0
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.dtype in LOW and value.numel() and not value.is_meta:
            size = value.detach().abs().float()
            largest = max(largest, torch.where(size < MASK, size, 0.0).amax().item())
    return largest


def _user_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
