"""Several processes that decode as one: each holds a part of the target, and all do what the first one finds.

Each forward of the target is a work of all of them. What they do between forwards follows from the prompt, the
settings, the cost table, the drafts and what the target says of these; all of it comes from the first process, so
that nothing tells them apart, be it a clock, a random number, a file on another machine or the rounding of another
processor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.distributed.utils import get_distributed_backend

from .errors import FlyError, LostProcessError, SettingsError, UsageError
from .processes import ALONE, Alone, Processes, place_of

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # with a process that waits for its reader, as in a pager
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")  # in what a lost process causes


class Team(Alone):
    """One of the processes that decode as one."""

    def __init__(self, place: Processes, group: Any) -> None:
        self.place = place
        self._group = group  # of CPUs, whatever the models run on

    def tell(self, find: Callable[[], T]) -> T:
        """What `find` gives in the first process, which alone calls it. An error of ours is raised in all."""
        found: T = self._from_first(self._outcome(find) if self.place.first else None)
        return found

    def agree(self, find: Callable[[], T]) -> T:
        """What `find` gives in the first process; all call it, as where the target takes part."""
        found: T = self._from_first(self._outcome(find))
        return found

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process of each machine does what is inside before the others, who find there what it left."""
        if self.place.local_rank > 0:
            self._meet()
        yield
        if self.place.local_rank == 0:
            self._meet()

    def _meet(self) -> None:
        with lost_processes():
            dist.barrier(group=self._group)

    def _outcome(self, find: Callable[[], Any]) -> tuple[Any, FlyError | None]:
        with lost_processes():
            try:
                return find(), None
            except FlyError as error:
                return None, error

    def _from_first(self, outcome: tuple[Any, FlyError | None] | None) -> Any:
        box = [outcome]
        with lost_processes():
            dist.broadcast_object_list(box, src=0, group=self._group)
        assert box[0] is not None
        found, error = box[0]
        if error is not None:
            raise error
        return found


@contextmanager
def lost_processes() -> Iterator[None]:
    """Turns what a process notices when another one has gone into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in LOST):
            raise LostProcessError(
                "another process of this run ended early", hint="its own message says why, where it had time for one"
            ) from error
        raise


@cache
def join_team(world: int) -> Alone:
    """This process as one of `world` that decode as one, or alone. Raises `UsageError` where they are not there."""
    if world == 1:
        return ALONE
    place = place_of(os.environ)
    if place.world != world:
        raise UsageError(
            f"the target is to be shared by {world} processes, and there are {place.world}",
            hint=f"start them with `torchrun --nproc-per-node {world} -m fly_cli generate ...`",
        )
    begin(place)
    return Team(place, dist.new_group(backend="gloo", timeout=PATIENCE))


def begin(place: Processes) -> None:
    """Bring the processes together, as transformers would do, but for its patience."""
    if dist.is_initialized():
        return
    device = own_device(place)
    if device.type == "mps":
        raise SettingsError(
            "several processes cannot share the target on this machine's accelerator (mps)", hint="use one process"
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    ranks = {"RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.local_rank}
    os.environ |= {name: str(value) for name, value in ranks.items()}  # transformers reads them
    backend = get_distributed_backend(device.type)
    with lost_processes():
        dist.init_process_group(
            backend,
            timeout=PATIENCE,
            device_id=device if backend == "nccl" else None,
            rank=place.rank,
            world_size=place.world,
        )


def own_device(place: Processes) -> torch.device:
    """Where this process's part of the target goes: the accelerator of its number, or the CPU where there is none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    if place.local_rank >= torch.accelerator.device_count():
        raise SettingsError(
            f"process {place.local_rank} of this machine has no {kind.type} device of its own",
            hint=f"start {torch.accelerator.device_count()} processes on it at most",
        )
    return torch.device(kind.type, place.local_rank)


def leave() -> None:
    """Part from the other processes, after all work is done."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
