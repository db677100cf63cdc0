"""Builds the command of an elastic Horovod job, which goes on when workers are lost or join."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from tfdist import topology
from tfdist.errors import EngineMissingError, OptionError
from tfdist.launch import discovery, hosts, programs
from tfdist.launch.membership import Elasticity
from tfdist.launch.supervisor import Job


def job(
    command: list[str],
    *,
    workers: int,
    min_workers: int,
    max_workers: int | None = None,
    host_discovery: str | None = None,
    environ: Mapping[str, str] = os.environ,
    **deadlines: float | None,
) -> Job:
    """Returns the job that begins with ``workers`` and goes on with at least ``min_workers``.

    Args:
        command: argument list of one worker.
        workers: number to begin with; whatever number works later, batches, order of records and
            learning rate are those of this one.
        min_workers: the job ends in an error when fewer are left for ``start_timeout_s``.
        max_workers: most workers at a time; ``workers`` unless given.
        host_discovery: an executable file that prints "host:slots" lines, asked every second; None
            offers ``workers`` slots of this machine, and none for a lost one.
        environ: this process's environment unless given.
        deadlines: start_timeout_s, until all have started, and until those that go on have met
            again; stall_timeout_s; see ``Job``.

    Raises:
        OptionError: numbers that do not fit, or a discovery script that cannot be used.
        LaunchError: more workers than slots, or the script fails.
        EngineMissingError: no Horovod.
    """
    most = workers if max_workers is None else max_workers
    _check_numbers(workers, min_workers, most, host_discovery)
    if host_discovery is None:
        hosts.check_slots(workers, hosts.parse(None))
    else:
        discovery.check(host_discovery)
    _check_horovod()
    settings = {
        "workers": workers,
        "min_workers": min_workers,
        "max_workers": most,
        "host_discovery": host_discovery,
    }
    env = programs.rank_environment(topology.alone(environ))
    env["TFDIST_ELASTIC_WORKERS"] = str(workers)
    # Horovod tells of each lost rank as of an error.
    env.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    driver = [sys.executable, "-m", "tfdist.launch.elastic_driver", json.dumps(settings), "--"]
    return Job(
        command=[*driver, *programs.rank_command(command)],
        env=env,
        world_size=workers,
        tags="elastic",
        is_local=True,
        elasticity=Elasticity(min_workers=min_workers, is_fixed=host_discovery is None),
        **deadlines,
    )


def _check_numbers(workers: int, least: int, most: int, host_discovery: str | None) -> None:
    received = f"--workers {workers} --min-workers {least} --max-workers {most}"
    if not 1 <= least <= workers:
        raise OptionError(
            "--min-workers must be at least 1 and at most --workers",
            received=received,
            mend=f"Choose --min-workers from 1 to {workers}",
        )
    if most < workers:
        raise OptionError(
            "--max-workers must be at least --workers",
            received=received,
            mend=f"Choose --max-workers {workers} or more, or leave it out",
        )
    if most > workers and host_discovery is None:
        raise OptionError(
            "more workers than --workers must come from a discovery script",
            received=received,
            mend="Give --host-discovery SCRIPT, or leave --max-workers out",
        )


def _check_horovod() -> None:
    import importlib.util

    if importlib.util.find_spec("horovod") is None:
        raise EngineMissingError(
            "an elastic job must have the package horovod, built with Gloo",
            received="no horovod",
            mend="Run tfdist install horovod",
        )
