"""Builds the job of a single process: of a strategy that starts no others, or of one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from tfdist.launch import programs
from tfdist.launch.supervisor import Job


def job(
    command: list[str],
    *,
    rank: int = 0,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Returns the job that runs ``command`` once, as ``rank``; other arguments as ``mpi.job``."""
    return Job(
        command=[sys.executable, "-m", "tfdist.launch.rank", "--", *command],
        env=programs.rank_environment(os.environ if environ is None else environ),
        world_size=1,
        first_rank=rank,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
    )
