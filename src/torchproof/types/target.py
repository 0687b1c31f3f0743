"""What the user named."""

from typing import Literal

from torchproof.types.record import Record


class Target(Record):
    """A reference to the user's model, resolved to where it lies; nothing is imported or loaded yet.

    Attributes:
        reference: as the user wrote it, such as ``app.py:Net``.
        kind: ``python`` is code to import; the others are saved models.
        path: absolute path of the file or folder; None for an installed ``package.module:Name``.
        module: the dotted module of ``package.module:Name``; None for a path.
        name: the name after the colon; None when the user left it out.
    """

    reference: str
    kind: Literal["python", "exported", "torchscript", "onnx", "huggingface"]
    path: str | None = None
    module: str | None = None
    name: str | None = None
