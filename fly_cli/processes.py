"""Several processes that share one job, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from .errors import FlyError, UsageError

RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # torchrun, then kinds of mpirun
WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
ENDED_EARLY = "ended early"
RESUME = "what was done is kept, and `--resume` goes on from there"
POLL_SECONDS = 0.1
PATIENCE = timedelta(minutes=10)  # for the others to start


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of how many processes this one is, and what they tell each other."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on this machine: the number of its GPU
    store: Any = None  # torch's key-value store, which the launcher provides

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks for all."""
        return self.rank == 0

    def announce(self, event: str) -> None:
        """Tell the others that this process has come so far."""
        if self.store is not None:
            self._count(event, 1)

    def wait_for(self, event: str, count: int) -> None:
        """Wait until `count` processes have announced the event. Ctrl-C ends the wait.

        Raises `FlyError` where one of them has announced that it ended early, or the first one is gone.
        """
        while self.store is not None and self._count(event, 0) < count:
            if self._count(ENDED_EARLY, 0):
                raise FlyError("another process of this run ended early", hint=f"its own message says why; {RESUME}")
            time.sleep(POLL_SECONDS)

    def _count(self, event: str, more: int) -> int:
        """How many have announced the event, with this process's own."""
        try:
            return int(self.store.add(event, more))
        except RuntimeError:  # the store lives in the first process
            raise FlyError("the first process of this run is gone", hint=RESUME) from None


def join(environment: Mapping[str, str]) -> Processes:
    """This process's place among those that a launcher started; alone where there is none."""

    def first_of(names: tuple[str, ...]) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    rank, world = first_of(RANKS), first_of(WORLDS)
    meeting_point = environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")
    if not rank or world in ("", "1") or not meeting_point:
        return Processes()
    try:
        place = Processes(int(rank), int(world), int(first_of(LOCAL_RANKS) or rank))
    except ValueError:
        raise UsageError(
            f"the rank of this process is {rank!r} of {world!r}", hint="start with torchrun or `accelerate launch`"
        ) from None
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=PATIENCE))
    return replace(place, store=store)
