"""Builds the horovodrun command for Horovod's Gloo controller, which needs no MPI."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping

from tfdist import topology
from tfdist.launch import events, hosts, programs
from tfdist.launch.supervisor import Job
from tfdist.launch.tasks import Plan


def job(
    command: list[str],
    *,
    workers: int,
    on_hosts: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Returns the job that runs ``command`` as ``workers`` Gloo ranks; arguments as ``mpi.job``.

    Raises:
        LaunchError: more workers than slots.
        EngineMissingError: no horovodrun.
    """
    environ = os.environ if environ is None else environ
    places = hosts.parse(on_hosts)
    hosts.check_slots(workers, places)
    horovodrun = programs.find("horovodrun", "the Gloo controller", environ)
    env = topology.without_places(programs.rank_environment(environ))
    env[events.VARIABLE] = "1"
    is_local = all(place.is_local for place in places)
    if is_local:
        command = Plan(here=list(range(workers))).command(command)
    else:
        listed = ",".join(f"{host.name}:{host.slots}" for host in places)
        timeout = ["--start-timeout", str(math.ceil(start_timeout_s))]
        program = [horovodrun, "--gloo", "-np", str(workers), "-H", listed, *timeout]
        command = [*program, sys.executable, "-m", "tfdist.launch.rank", "--", *command]
    return Job(
        command=command,
        env=env,
        world_size=workers,
        tags="together" if is_local else "gloo",
        is_local=is_local,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
    )
