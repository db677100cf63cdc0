"""Builds the mpirun command for Open MPI 4.1: pure functions of the workers, hosts and machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from tfdist import topology
from tfdist.launch import hosts, programs
from tfdist.launch.supervisor import Job


def job(
    command: list[str],
    *,
    workers: int,
    on_hosts: str | None = None,
    environ: Mapping[str, str] = os.environ,
    **deadlines: float | None,
) -> Job:
    """Returns the job that runs ``command`` as ``workers`` MPI ranks.

    Args:
        command: argument list of one rank.
        workers: number of ranks, >= 1.
        on_hosts: "a:2,b:2"; None for this machine, with one slot for each core but at least two.
        environ: this process's environment unless given.
        deadlines: start_timeout_s and stall_timeout_s; see ``Job``.

    Raises:
        LaunchError: more workers than slots.
        EngineMissingError: no mpirun.
    """
    places = hosts.parse(on_hosts)
    hosts.check_slots(workers, places)
    mpirun = programs.find("mpirun", "the MPI controller", environ)
    env = topology.without_places(programs.rank_environment(environ))
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if hosts.are_local(places):
        where = _local_arguments(workers, hosts.physical_cores())
    else:
        where = _remote_arguments(places, env)
    # A waiting rank would otherwise spin on the core that another one computes on.
    common = ["--tag-output", "--mca", "mpi_yield_when_idle", "1"]
    rank = programs.rank_command(command)
    return Job(
        command=[mpirun, "-np", str(workers), *common, *where, *rank],
        env=env,
        world_size=workers,
        tags="mpi",
        is_local=hosts.are_local(places),
        **deadlines,
    )


# Within a Slurm job mpirun would take the job's hosts and slots, not those that were asked for.
_ONLY_THESE_HOSTS = ["--mca", "ras", "^slurm"]


def _local_arguments(workers: int, cores: int) -> list[str]:
    # "isolated": no ssh is looked for. Ranks talk through shared memory: over TCP each would listen
    # on all interfaces, whichever it was told to use.
    loopback = ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo"]
    per_rank = cores // workers
    if per_rank >= 1 and sys.platform == "linux":
        binding = ["--bind-to", "core", "--map-by", f"slot:PE={per_rank}"]
    else:
        binding = ["--bind-to", "none", "--oversubscribe"]
    return ["--mca", "plm", "isolated", *_ONLY_THESE_HOSTS, *loopback, *binding]


# A host that is gone, or whose link is cut, is noticed within 15 s, as by ``ssh``; not in minutes.
_KEEPALIVE = {"time": "5", "intvl": "5", "probes": "2"}


def _remote_arguments(places: list[hosts.Host], env: Mapping[str, str]) -> list[str]:
    # Not bound: the cores of the other hosts are not known here.
    arguments = ["-H", hosts.listed(places), "--bind-to", "none", *_ONLY_THESE_HOSTS]
    if "OPAL_PREFIX" in env:
        arguments += ["--prefix", env["OPAL_PREFIX"]]
    for name, value in _KEEPALIVE.items():
        arguments += ["--mca", f"oob_tcp_keepalive_{name}", value]
    for name in programs.exported(env):
        arguments += ["-x", name]
    return arguments
