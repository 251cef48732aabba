"""Several processes that share one job, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from .errors import FlyError, UsageError

T = TypeVar("T")

RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # torchrun, then kinds of mpirun
WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
ENDED_EARLY = "ended early"
RESUME = "what was done is kept, and `--resume` goes on from there"
FIRST_ERROR, HEARD = "error of the first process", "heard of the error"
POLL_SECONDS = 0.1
SAME_ERROR_SECONDS = 5.0  # for the first process to come upon what this one did
PATIENCE = timedelta(minutes=10)  # for the others to start


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of how many processes this one is, and what they tell each other."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on this machine: the number of its GPU
    local_world: int = 1  # processes on this machine
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

    def tells(self, message: str, *, shared: bool = True) -> bool:
        """Whether this process is to show an error: the first one is, others unless the first shows the same.

        The first may hold the store, and so waits until the others have heard; `shared` says that they might come
        upon the same.
        """
        if self.store is None:
            return True
        try:
            if not self.first:
                return self._hears_another(message)
            self.store.set(FIRST_ERROR, message)
            if shared:
                self._comes_true(lambda: self.store.add(HEARD, 0) >= self.world - 1)
        except RuntimeError:  # the store is gone, with the process that held it
            pass
        return True

    def _hears_another(self, message: str) -> bool:
        """Whether the first process has another error, or none in time."""
        if not self._comes_true(lambda: self.store.check([FIRST_ERROR])):
            return True
        first_error: str = self.store.get(FIRST_ERROR).decode()
        self.store.add(HEARD, 1)
        return first_error != message

    def _comes_true(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition holds within `SAME_ERROR_SECONDS`."""
        for _ in range(round(SAME_ERROR_SECONDS / POLL_SECONDS)):
            if condition():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _count(self, event: str, more: int) -> int:
        """How many have announced the event, with this process's own."""
        try:
            return int(self.store.add(event, more))
        except RuntimeError:  # the store lives in the first process
            raise FlyError("the first process of this run is gone", hint=RESUME) from None


class Alone:
    """A process that decodes by itself. `team.Team` is several that decode as one, and says what these are for."""

    def tell(self, find: Callable[[], T]) -> T:
        return find()

    def agree(self, find: Callable[[], T]) -> T:
        return find()

    def in_turn(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()


def place_of(environment: Mapping[str, str]) -> Processes:
    """This process's place among those that a launcher started; alone where there is none."""

    def first_of(names: tuple[str, ...]) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    rank, world = first_of(RANKS), first_of(WORLDS)
    meeting_point = environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")
    if not rank or world in ("", "1") or not meeting_point:
        return Processes()
    try:
        local = int(first_of(LOCAL_RANKS) or rank), int(first_of(LOCAL_WORLDS) or world)
        return Processes(int(rank), int(world), *local)
    except ValueError:
        raise UsageError(
            f"the rank of this process is {rank!r} of {world!r}", hint="start with torchrun or `accelerate launch`"
        ) from None


def follows(environment: Mapping[str, str]) -> bool:
    """Whether another process of this run is its first one."""
    try:
        return not place_of(environment).first
    except UsageError:
        return False


def join(environment: Mapping[str, str]) -> Processes:
    """This process's place, with a way to the others where there are any."""
    place = place_of(environment)
    if place.world == 1:
        return place
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=PATIENCE))
    return replace(place, store=store)
