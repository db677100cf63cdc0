"""Builds the job of a TensorFlow cluster: tfdist starts its tasks, TF_CONFIG connects them.

On this machine alone the ports are free ones. On other hosts none can be tried out from here: their
ports are one of the rows of ``tfdist.topology.ports``, drawn anew for each start. Where another
program has one, the rank that finds it taken names it and ends the job.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import socket
from collections.abc import Iterable, Mapping

from tfdist import topology
from tfdist.errors import LaunchError, OptionError
from tfdist.launch import hosts, programs
from tfdist.launch.supervisor import Job
from tfdist.launch.tasks import Plan
from tfdist.topology import Topology, ports

_SECRET_BYTES = 16
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def job(
    command: list[str],
    *,
    workers: int,
    ps: int = 0,
    on_hosts: str | None = None,
    environ: Mapping[str, str] = os.environ,
    **deadlines: float | None,
) -> Job:
    """Returns the job that runs ``command`` as ``workers`` tasks; arguments as ``mpi.job``.

    With ``ps`` parameter servers there is a chief too, and a worker may be lost; on this machine
    only workers need a slot then, on other hosts each task does.

    Raises:
        OptionError: of several hosts one has a name that means another host to the others.
        LaunchError: more workers than slots.
        EngineMissingError: other hosts, and no ssh.
    """
    places = hosts.parse(on_hosts)
    roles = _roles(workers, ps)
    is_local = hosts.are_local(places)
    if is_local:
        hosts.check_slots(workers, places)
        ranks = [(places[0], list(range(len(roles))))]
    else:
        hosts.check_slots(len(roles), places)
        programs.find("ssh", "--hosts", environ)
        ranks = _ranks(len(roles), places)
    plan = Plan(
        tasks=list(zip(roles, _addresses(len(roles), places), strict=True)),
        here=[rank for place, own in ranks for rank in own if place.is_local],
        elsewhere=_by_name((place, own) for place, own in ranks if not place.is_local),
        cores=hosts.shares(len(roles)) if is_local else [],
        may_be_lost=list(range(1, 1 + workers)) if ps else [],
    )
    secret = {topology.SECRET: secrets.token_hex(_SECRET_BYTES)}
    return Job(
        command=plan.command(command),
        env=programs.rank_environment(topology.alone(environ)) | secret,
        world_size=len(roles),
        tags="together",
        is_local=is_local,
        **deadlines,
    )


def beside_servers(environ: Mapping[str, str], place: Topology, ps: int) -> dict[str, str]:
    """Returns ``environ`` for a rank that something else has started: a chief, workers, then ``ps``
    parameter servers. Unchanged where a TF_CONFIG has given the roles already.

    Raises:
        LaunchError: too few ranks, or ranks that do not know each other's addresses.
    """
    if "ps" in place.roles:
        return dict(environ)
    workers = place.world_size - 1 - ps
    if workers < 1 or not place.addresses:
        raise LaunchError(
            "a chief, each worker and each parameter server must be a rank with an address",
            received=f"{place.world_size} ranks, told by {place.launcher}, for --ps {ps}",
            mend=f"Start at least {2 + ps} tasks with srun, or give --workers to have them started",
        )
    tasks = list(zip(_roles(workers, ps), place.addresses, strict=True))
    return {**environ, "TF_CONFIG": topology.tf_config(tasks, place.rank)}


def _roles(workers: int, ps: int) -> list[str]:
    return ["chief", *["worker"] * workers, *["ps"] * ps] if ps else ["worker"] * workers


def _ranks(count: int, places: list[hosts.Host]) -> list[tuple[hosts.Host, list[int]]]:
    """Returns the ranks of each host; they fill the hosts in their order."""
    left = iter(range(count))
    return [(place, list(itertools.islice(left, place.slots))) for place in places]


def _by_name(ranks: Iterable[tuple[hosts.Host, list[int]]]) -> dict[str, list[int]]:
    """Returns host -> its ranks, of hosts that may be listed twice or have none."""
    found: dict[str, list[int]] = {}
    for place, own in ranks:
        if own:
            found.setdefault(place.name, []).extend(own)
    return found


def _addresses(count: int, places: list[hosts.Host]) -> list[str]:
    """Returns "host:port" of each rank."""
    if hosts.are_local(places):
        return [f"127.0.0.1:{port}" for port in _free_ports(count)]
    # Without the user as whom ssh goes there.
    names = [p.name.rpartition("@")[2] for p, ranks in _ranks(count, places) for _ in ranks]
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
