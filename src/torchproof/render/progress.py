"""Progress of long work on stderr: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

BAR_WIDTH = 20
CLEAR = "\r\x1b[K"


class Progress:
    """Call it with what is being done and the share that is spent; use it as a context manager, which clears the bar.

    Elsewhere than in a terminal a line is printed when the text changes, never twice for the same.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.is_terminal = self.stream.isatty()
        self.start = time.monotonic()
        self.last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_terminal and self.last:
            self.stream.write(CLEAR)
            self.stream.flush()

    def __call__(self, text: str, share: float) -> None:
        elapsed = f"{time.monotonic() - self.start:4.0f} s"
        if self.is_terminal:
            filled = round(share * BAR_WIDTH)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            self.stream.write(f"{CLEAR}[{bar}] {elapsed}  {text[:48]}")
        elif text != self.last:
            self.stream.write(f"{elapsed}  {text}\n")
        self.last = text
        self.stream.flush()
