"""Which launcher starts the processes of which strategy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from tfdist import topology
from tfdist.compat import refuse_keras_3
from tfdist.errors import LaunchError, OptionError, unknown_choice
from tfdist.launch import elastic, gloo, local, mpi, tf_cluster
from tfdist.launch.supervisor import Job
from tfdist.strategies import Spec, check_takes_keras, names_of, spec_of
from tfdist.strategies.spec import REPLICAS
from tfdist.topology import Topology, deadlines

# What a ``Spec`` calls a launcher -> what builds its job.
_LAUNCHERS = {"mpi": mpi.job, "gloo": gloo.job, "tasks": tf_cluster.job}

CONTROLLERS = ("mpi", "gloo")


def of_several() -> str:
    """Returns the strategy for several processes where none is named.

    Horovod where it is installed; else TensorFlow's own, which needs nothing beside it.
    """
    return "multi_worker" if importlib.util.find_spec("horovod") is None else "horovod"


def standing(
    workers: int | None = None, hosts: str | None = None, controller: str | None = None
) -> Topology | None:
    """Returns the place of this process when others of its job have been started beside it.

    Such as by srun, by mpirun, or by SageMaker on each host. None when it is the only one, and
    where the arguments (see ``job_for``) ask for processes anew.
    """
    if not (workers is None and hosts is None and controller is None):
        return None
    place = topology.current()
    return place if place.world_size > 1 else None


def check_keras(strategy: str, *, is_elastic: bool) -> None:
    """Raises:
    EngineMissingError: Keras 3 was chosen, and the job needs Keras 2.
    """
    if strategy != "auto":  # Which chooses one that takes either.
        check_takes_keras(strategy)
    if is_elastic:
        refuse_keras_3("an elastic job")


def job_for(
    strategy: str,
    command: list[str],
    *,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | None = None,
    controller: str | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    host_discovery: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float | None = None,
) -> Job:
    """Returns the job that runs ``command`` as the processes that ``strategy`` needs.

    In a process that is one of several ranks already, see ``standing``, it is the job of that rank.

    Args:
        strategy: a registered name, or "auto", which chooses inside one process.
        command: argument list of one process.
        options: of the strategy, see ``spec_of``; None where the command knows them alone.
        workers: number of processes; 2 unless given where the strategy needs several.
        ps: number of parameter servers; 1 unless given where the strategy has them.
        hosts: "a:2,b:2"; None for this machine.
        controller: "mpi" or "gloo", of horovod alone; None for the strategy's first.
        min_workers: makes the job elastic: it goes on with this many; see ``elastic.job``.
        max_workers: of an elastic job.
        host_discovery: of an elastic job.
        start_timeout_s: see ``Job``.
        stall_timeout_s: see ``Job``.

    Raises:
        OptionError: unknown strategy or controller, hosts that cannot be read, parameter servers
            for a strategy that has none, or options of an elastic job that do not fit.
        LaunchError: more workers than slots, or several for a strategy of one process.
        EngineMissingError: the launcher's program is not installed.
    """
    spec = _AUTO if strategy == "auto" else spec_of(strategy, options)
    timeouts = {"start_timeout_s": start_timeout_s, "stall_timeout_s": stall_timeout_s}
    environ = {**os.environ, **deadlines.told(**timeouts)}
    if ps is not None and not spec.has_servers:
        with_servers = " or ".join(names_of(lambda spec: spec.has_servers))
        raise OptionError(
            f"--ps must go with strategy {with_servers}",
            received=f"--ps {ps} with --strategy {strategy}",
            mend=f"Leave it out, or choose {with_servers}",
        )
    if (min_workers, max_workers, host_discovery) != (None, None, None):
        _refuse_elastic(spec, hosts, controller, min_workers)
        return elastic.job(
            command,
            workers=2 if workers is None else workers,
            min_workers=min_workers,
            max_workers=max_workers,
            host_discovery=host_discovery,
            environ=environ,
            **timeouts,
        )
    place = standing(workers, hosts, controller)
    if place is not None:
        if not spec.launchers and strategy != "auto":
            raise _one_process(
                strategy,
                f"rank {place.rank} of {place.world_size}, told by {place.launcher}",
                "give --workers 1 for a training of its own in each process",
            )
        if spec.has_servers:
            environ = tf_cluster.beside_servers(environ, place, ps or 1)
        return local.job(command, rank=place.rank, environ=environ, **timeouts)
    if not spec.launchers:
        _refuse_several(strategy, workers, hosts, controller)
        environ = environ if workers is None else topology.alone(environ)
        return local.job(command, environ=environ, **timeouts)
    if controller is not None and not spec.has_controllers:
        raise _no_controller(strategy, controller)
    name = controller or spec.launchers[0]
    if name not in spec.launchers:
        raise unknown_choice("controller", name, list(spec.launchers))
    workers = 2 if workers is None else workers
    servers = {"ps": ps or 1} if spec.has_servers else {}
    return _LAUNCHERS[name](
        command, workers=workers, on_hosts=hosts, environ=environ, **servers, **timeouts
    )


#: It chooses inside one process.
_AUTO = Spec(name="auto", path="", summary="what fits this machine and this launcher")


def _refuse_elastic(
    spec: Spec, hosts: str | None, controller: str | None, min_workers: int | None
) -> None:
    if not spec.is_elastic:
        known = names_of(lambda spec: spec.is_elastic)
        raise OptionError(
            f"an elastic job must have strategy {' or '.join(known)}",
            received=f"--strategy {spec.name}",
            mend="Leave --min-workers, --max-workers and --host-discovery out, and give "
            "--max-restarts to start all again when a process is lost",
        )
    if min_workers is None:
        raise OptionError(
            "--max-workers and --host-discovery must go with --min-workers, which makes a job "
            "elastic",
            received="no --min-workers",
            mend="Give --min-workers, the number that the job can go on with",
        )
    if hosts is not None:
        raise OptionError(
            "an elastic job must learn its hosts from a script",
            received=f"--hosts {hosts}",
            mend="Give --host-discovery SCRIPT instead",
        )
    if controller not in (None, "gloo"):
        raise OptionError(
            "an elastic job must have the controller gloo, since MPI ends with its first lost rank",
            received=f"--controller {controller}",
            mend="Leave --controller out",
        )


def _refuse_several(
    strategy: str, workers: int | None, hosts: str | None, controller: str | None
) -> None:
    given = []
    if workers is not None and workers != 1:
        given.append(f"--workers {workers}")
    if hosts is not None:
        given.append(f"--hosts {hosts}")
    if controller is not None:
        given.append(f"--controller {controller}")
    if given:
        raise _one_process(strategy, " ".join(given), f"leave {'them' if given[1:] else 'it'} out")


def _no_controller(strategy: str, controller: str) -> OptionError:
    known = names_of(lambda spec: spec.has_controllers)
    return OptionError(
        f"--controller must go with strategy {' or '.join(known)}",
        received=f"--controller {controller} with --strategy {strategy}, whose processes tfdist "
        "starts itself",
        mend="Leave it out",
    )


def _one_process(strategy: str, received: str, otherwise: str) -> LaunchError:
    each = ""
    if spec_of(strategy).divides_model:
        each = f", give -o replicas={' or '.join(REPLICAS)} to have one on each rank"
    return LaunchError(
        f"strategy '{strategy}' must run in one process",
        received=received,
        mend=f"Choose one of {', '.join(names_of(lambda spec: spec.launchers))}{each}, or "
        f"{otherwise}",
    )
