"""The model in the server's own process, for models that take less than a hop to another one."""

import asyncio
from collections.abc import Callable

from torchproof.bundle.read import open_bundle
from torchproof.serve.dispatch import Holder
from torchproof.serve.engine import Engine
from torchproof.serve.load import Prepared, prepare
from torchproof.serve.replica import handle, open_engine
from torchproof.serve.wanted import Wanted
from torchproof.serve.wire import Begin, Message
from torchproof.types.serving import Facts


async def open_in_process(
    wanted: Wanted, facts: Facts | None, heard: Callable[[Holder, list[Message]], None]
) -> tuple[Holder, Facts]:
    """Loads the model; the event loop itself runs it then, and requests that came together share forwards.

    Args:
        facts: what a replica found out already; None to find them out here.
        heard: takes the replies.
    """
    loop = asyncio.get_running_loop()
    begin = Begin(cores=(), num_threads=wanted.num_threads, name=wanted.name, asked=wanted.asked, facts=facts)
    pending: list[Message] = []
    holder = Holder(send=pending.append, progress=None)

    def load() -> tuple[Engine, Facts | None]:
        return open_engine(_prepare(wanted), begin, lambda replies: heard(holder, replies))

    # On a thread, so that health is answered meanwhile.
    engine, found = await loop.run_in_executor(None, load)
    scheduled = False

    def send(message: Message) -> None:
        nonlocal scheduled
        pending.append(message)
        if not scheduled:
            scheduled = True
            loop.call_soon(work)

    def work() -> None:
        nonlocal scheduled
        scheduled = False
        received, pending[:] = list(pending), []
        handle(engine, received)  # type: ignore[arg-type]
        if engine.busy:
            engine.step()
        if engine.busy and not scheduled:
            scheduled = True
            loop.call_soon(work)

    holder.send = send
    known = facts or found
    assert known is not None
    return holder, known


def _prepare(wanted: Wanted) -> Prepared:
    if wanted.target is not None:
        return prepare(wanted.target)
    assert wanted.bundle is not None
    return prepare(open_bundle(wanted.bundle))
