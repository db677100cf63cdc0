"""Where this process stands among the others: a pure function of the environment.

The environment is read here and nowhere else. ``from_environ`` takes a mapping, so tests pass
recorded environments and never touch ``os.environ``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in a job.

    Attributes:
        world_size: number of processes in the job, >= 1.
        rank: this process, in [0, world_size).
        local_rank: this process among those of its host, in [0, local_size).
        local_size: number of processes on this host.
        launcher: what started the job: "mpi", "gloo" or "none".
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


_LAUNCHERS = {
    "gloo": ("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


def from_environ(environ: Mapping[str, str]) -> Topology:
    """Returns the topology that mpirun or horovodrun wrote down; one process otherwise."""
    for launcher, (size, rank, local_rank, local_size) in _LAUNCHERS.items():
        if size in environ:
            return Topology(
                world_size=int(environ[size]),
                rank=int(environ[rank]),
                local_rank=int(environ.get(local_rank, 0)),
                local_size=int(environ.get(local_size, 1)),
                launcher=launcher,
            )
    return Topology()


def current() -> Topology:
    """Returns the topology of this process."""
    return from_environ(os.environ)
