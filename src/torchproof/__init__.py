"""torchproof: measures every production decision about a PyTorch model on that model, and checks it at every start.

Importing it changes nothing in the process and does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchproof.target.recipe import Recipe as Recipe
    from torchproof.target.request import RequestError as RequestError
    from torchproof.target.service import Service as Service

__version__ = "0.1.0"
__all__ = ["Recipe", "RequestError", "Service", "__version__"]

_PUBLIC = {
    "Recipe": "torchproof.target.recipe",
    "RequestError": "torchproof.target.request",
    "Service": "torchproof.target.service",
}


def __getattr__(name: str) -> object:  # PEP 562: the public names load when they are used
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
