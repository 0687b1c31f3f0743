"""The model behind the server: one thread that does all its work in order, and whether it can answer."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING

from torchproof.serve.problem import ProblemError

if TYPE_CHECKING:
    from torchproof.serve.answer import Answerer

# How long a thread without work may take to end.
END_S = 1.0


class Model:
    """Loads on its own thread and answers there, so that health is answered while it is busy.

    Attributes:
        answerer: None until the model is loaded and proven.
    """

    def __init__(self) -> None:
        self.answerer: Answerer | None = None
        self._thread: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model", initializer=self._remember_thread)

    def _remember_thread(self) -> None:
        self._thread = threading.current_thread()

    @property
    def unready(self) -> str:
        """Why no request can be answered; empty when one can."""
        if self.answerer is None:
            return "the model is not loaded yet"
        if self._thread is None or not self._thread.is_alive():
            return "the model's thread has ended"
        return ""

    async def load(self, open_model: "Callable[[], Answerer]") -> "Answerer":
        """Calls ``open_model`` on the model's thread; raises what it raises."""
        self.answerer = await asyncio.get_running_loop().run_in_executor(self._executor, open_model)
        return self.answerer

    async def answer(self, body: bytes) -> bytes:
        """The response to one request.

        Raises:
            ProblemError: 503 not ready; else see ``Answerer.answer``.
        """
        if self.unready or self.answerer is None:
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, self.unready)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.answerer.answer, body)

    def close(self) -> bool:
        """Drops what waits and ends the thread; False where it is still at work on something."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(END_S)
        return self._thread is None or not self._thread.is_alive()
