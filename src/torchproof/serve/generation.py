"""The processes of one state of the bundle; a reload makes another one."""

import asyncio
import logging
from dataclasses import dataclass, field

from torchproof.serve.dispatch import Holder
from torchproof.serve.processes import Replica, Zygote
from torchproof.serve.wanted import Wanted
from torchproof.serve.wire import Setup
from torchproof.types.serving import Facts

log = logging.getLogger("torchproof.serve")


@dataclass(eq=False)
class Generation:
    """The replicas of one state of the bundle."""

    wanted: Wanted
    facts: Facts | None = None
    share: bool = True
    load_s: float = 0.0  # of the first replica
    zygote: Zygote | None = None  # that forks new replicas
    zygotes: list[Zygote] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the zygotes
    succession: asyncio.Lock = field(default_factory=asyncio.Lock)
    replicas: list[Replica] = field(default_factory=list)
    keepers: list[asyncio.Task[None]] = field(default_factory=list)
    first_tries: list[asyncio.Future[None]] = field(default_factory=list)
    in_process: Holder | None = None
    closing: bool = False

    async def open_zygote(self) -> Zygote:
        """One that lives; another kind where the user's code leaves the first one unable to fork."""
        async with self.lock:
            wanted = self.wanted
            while self.zygote is None or not self.zygote.alive:
                setup = Setup(
                    bundle=str(wanted.bundle) if wanted.bundle else None,
                    target=wanted.target,
                    share=self.share,
                    log_format=wanted.log_format,
                )
                zygote = self.zygote = Zygote(setup, wanted.environment)
                for ended in [one for one in self.zygotes if not one.alive]:
                    ended.close()
                    self.zygotes.remove(ended)
                self.zygotes.append(zygote)
                try:
                    await zygote.prepared()
                except BaseException:
                    zygote.close()
                    raise
                if zygote.refusal:
                    log.info("replicas share no weights, as what loads the model can't be forked: %s", zygote.refusal)
                    self.share = False
                    zygote.close()
            return self.zygote
