"""Builds the horovodrun command for Horovod's Gloo controller, which needs no MPI."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from tfdist import topology
from tfdist.launch import hosts, programs
from tfdist.launch.supervisor import Job
from tfdist.launch.tasks import Plan


def job(
    command: list[str],
    *,
    workers: int,
    on_hosts: str | None = None,
    start_timeout_s: float = 120.0,
    environ: Mapping[str, str] = os.environ,
    **deadlines: float | None,
) -> Job:
    """Returns the job that runs ``command`` as ``workers`` Gloo ranks; arguments as ``mpi.job``.

    Raises:
        LaunchError: more workers than slots.
        EngineMissingError: no horovodrun.
    """
    places = hosts.parse(on_hosts)
    hosts.check_slots(workers, places)
    horovodrun = programs.find("horovodrun", "the Gloo controller", environ)
    env = topology.without_places(programs.rank_environment(environ))
    is_local = hosts.are_local(places)
    if is_local:
        command = Plan(here=list(range(workers))).command(command)
    else:
        timeout = ["--start-timeout", str(math.ceil(start_timeout_s))]
        program = [horovodrun, "--gloo", "-np", str(workers), "-H", hosts.listed(places), *timeout]
        command = [*program, *programs.rank_command(command)]
    return Job(
        command=command,
        env=env,
        world_size=workers,
        tags="together" if is_local else "gloo",
        is_local=is_local,
        start_timeout_s=start_timeout_s,
        **deadlines,
    )
