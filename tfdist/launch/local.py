"""Builds the job of a single process: of a strategy that starts no others, or of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.launch import programs
from tfdist.launch.supervisor import Job


def job(
    command: list[str],
    *,
    rank: int = 0,
    environ: Mapping[str, str] = os.environ,
    **deadlines: float | None,
) -> Job:
    """Returns the job that runs ``command`` once, as ``rank``; other arguments as ``mpi.job``."""
    return Job(
        command=programs.rank_command(command),
        env=programs.rank_environment(environ),
        world_size=1,
        first_rank=rank,
        **deadlines,
    )
