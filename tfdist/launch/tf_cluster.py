"""Builds the job of a TensorFlow cluster: mpirun starts its tasks, TF_CONFIG connects them.

On this machine alone the ports are free ones. On other hosts none can be tried out from here: their
ports are one of the rows of ``tfdist.topology.ports``, drawn anew for each start. Where another
program has one, the rank that finds it taken names it and ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping

from tfdist import topology
from tfdist.errors import LaunchError, OptionError
from tfdist.launch import hosts, mpi
from tfdist.launch.supervisor import Job
from tfdist.topology import Topology, ports

_SECRET_BYTES = 16
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def job(
    command: list[str],
    *,
    workers: int,
    ps: int = 0,
    on_hosts: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Returns the job that runs ``command`` as ``workers`` tasks; arguments as ``mpi.job``.

    With ``ps`` parameter servers there is a chief too, and a worker may be lost; on this machine
    only workers need a slot then, on other hosts each task does.

    Raises:
        OptionError: of several hosts one has a name that means another host to the others.
    """
    places = hosts.parse(on_hosts)
    roles = _roles(workers, ps)
    slots = workers if all(place.is_local for place in places) else len(roles)
    hosts.check_slots(slots, places)
    tasks = list(zip(roles, _addresses(len(roles), places), strict=True))
    environ = os.environ if environ is None else environ
    return mpi.job(
        _task_command(tasks, command),
        workers=len(roles),
        on_hosts=on_hosts,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
        environ={**environ, topology.SECRET: secrets.token_hex(_SECRET_BYTES)},
        slots=slots,
        may_be_lost=range(1, 1 + workers) if ps else (),
    )


def task_beside_servers(command: list[str], place: Topology, ps: int) -> list[str]:
    """Returns the command of a rank that something else has started: a chief, workers, then ``ps``
    parameter servers. Unchanged where a TF_CONFIG has given the roles already.

    Raises:
        LaunchError: too few ranks, or ranks that do not know each other's addresses.
    """
    if "ps" in place.roles:
        return command
    workers = place.world_size - 1 - ps
    if workers < 1 or not place.addresses:
        raise LaunchError(
            "a chief, each worker and each parameter server must be a rank with an address",
            received=f"{place.world_size} ranks, told by {place.launcher}, for --ps {ps}",
            mend=f"Start at least {2 + ps} tasks with srun, or give --workers to have them started",
        )
    tasks = list(zip(_roles(workers, ps), place.addresses, strict=True))
    return _task_command(tasks, command)


def _roles(workers: int, ps: int) -> list[str]:
    return ["chief", *["worker"] * workers, *["ps"] * ps] if ps else ["worker"] * workers


def _task_command(tasks: list[tuple[str, str]], command: list[str]) -> list[str]:
    return [sys.executable, "-m", "tfdist.launch.task", json.dumps(tasks), "--", *command]


def _addresses(count: int, places: list[hosts.Host]) -> list[str]:
    """Returns "host:port" of each rank; mpirun fills the hosts in their order."""
    if all(place.is_local for place in places):
        return [f"127.0.0.1:{port}" for port in _free_ports(count)]
    names = [place.name for place in places for _ in range(place.slots)][:count]
    if _LOOPBACK & set(names):
        raise OptionError(
            "the hosts of a cluster must have names by which they reach each other",
            received=", ".join(sorted(_LOOPBACK & set(names))),
            mend=f"Name this machine as the others know it, such as {socket.gethostname()}",
        )
    first = ports.first_port(random.randrange(ports.NUMBERS))
    return [f"{name}:{first + rank}" for rank, name in enumerate(names)]


def _free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing listens on; held all at a time, so none twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
