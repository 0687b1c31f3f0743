"""The model in the server's own process, for models that take less than a hop to another one."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from torchproof.bundle.read import Bundle, open_bundle
from torchproof.errors import describe, revive
from torchproof.serve.dispatch import Holder
from torchproof.serve.engine import Engine
from torchproof.serve.load import Prepared, prepare
from torchproof.serve.replica import handle, open_engine
from torchproof.serve.wanted import Wanted
from torchproof.serve.wire import Begin, Message
from torchproof.target.usercode import OWN_FOLDER
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
        try:
            return open_engine(_prepare(wanted), begin, lambda replies: heard(holder, replies))
        except (Exception, SystemExit) as exc:  # whatever the user's code raises, as from a replica
            raise revive(describe(exc)) from exc

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
    """As the bundle or the target lies on the disk now: what was imported of it before is imported again."""
    source = wanted.target or open_bundle(wanted.bundle or Path())
    target = source.target if isinstance(source, Bundle) else source
    if target.path is not None:
        _forget_code(Path(target.path).parent)
    return prepare(source)


def _forget_code(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or "site-packages" in file or file.startswith(OWN_FOLDER):
            continue
        if Path(file).is_relative_to(folder):
            del sys.modules[name]
