"""Which launcher starts the processes of which strategy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tfdist import topology
from tfdist.errors import LaunchError, OptionError, unknown_choice
from tfdist.launch import elastic, gloo, local, mpi, tf_cluster
from tfdist.launch.supervisor import Job
from tfdist.strategies import REGISTRY, Spec, check_takes_keras, names_of, spec_of
from tfdist.strategies.spec import REPLICAS
from tfdist.topology import Topology, deadlines
from tfdist.training.engine.options import option

# What a ``Spec`` calls a launcher -> what builds its job.
_LAUNCHERS = {"mpi": mpi.job, "gloo": gloo.job, "tasks": tf_cluster.job}

CONTROLLERS = ("mpi", "gloo")


def of_several() -> str:
    """Returns the strategy for several processes where none is named.

    Horovod where it is installed; else TensorFlow's own, which needs nothing beside it.
    """
    return "multi_worker" if importlib.util.find_spec("horovod") is None else "horovod"


def check_keras(strategy: str) -> None:
    """Raises:
    EngineMissingError: Keras 3 was chosen, and the strategy needs Keras 2.
    """
    if strategy != "auto":  # Which chooses one that takes either.
        check_takes_keras(strategy)


@dataclass(frozen=True, kw_only=True)
class Where:
    """A strategy, and the processes that a command runs on.

    Attributes:
        strategy: a registered name, or "auto", which chooses inside one process.
        options: of the strategy, see ``spec_of``; None where the command knows them alone.
        workers: number of processes; 2 unless given where the strategy needs several.
        start_timeout_s, stall_timeout_s: see ``Job``.
    """

    strategy: str = option("auto", f"How to train: {', '.join(REGISTRY)}, or auto.")
    options: Mapping[str, Any] | None = option(
        None,
        "An option of the strategy, such as precision=mixed_float16, accumulate_steps=4, "
        "recompute=blocks, lr_scaling=linear; an unknown one lists all. Repeatable.",
        metavar="KEY=VALUE",
    )
    workers: int | None = option(None, "Number of processes.", least=1)
    ps: int | None = option(
        None,
        "Number of parameter servers, beside the workers and a chief.  [default: 1, where the "
        "strategy has them]",
        metavar="M",
        least=1,
    )
    hosts: str | None = option(None, "Hosts with their slots.", metavar="A:2,B:2")
    controller: str | None = option(
        None,
        "What starts and connects the processes of horovod.  [default: mpi]",
        choices=CONTROLLERS,
    )
    min_workers: int | None = option(
        None,
        "Makes the job elastic: when workers are lost, those that are left go on from "
        "the last step kept in memory, as long as there are N.",
        metavar="N",
        least=1,
    )
    max_workers: int | None = option(
        None, "Elastic: most workers at a time.  [default: --workers]", metavar="M", least=1
    )
    host_discovery: str | None = option(
        None,
        "Elastic: a program that prints the slots there are, as localhost:2; asked every "
        "second. Fewer and then more again brings new workers.",
        metavar="SCRIPT",
    )
    start_timeout_s: float = option(
        120.0, "Until every process must have started.", metavar="SECONDS"
    )
    stall_timeout_s: float | None = option(
        300.0, "Longest silence of a running job.", metavar="SECONDS"
    )

    @property
    def place(self) -> Topology | None:
        """Where this process stands among others that srun, mpirun or SageMaker has started.

        None when it is the only one, and where processes are asked for anew.
        """
        if self.is_elastic or (self.workers, self.hosts, self.controller) != (None, None, None):
            return None
        place = topology.current()
        return place if place.world_size > 1 else None

    @property
    def is_chief(self) -> bool:
        """Whether this command shows and keeps the results: one does of those that srun starts."""
        return self.place is None or self.place.is_chief

    @property
    def asked(self) -> dict[str, Any]:
        """What is not as by default, as options of a command; a list is one given repeatedly."""
        named = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        options, _ = named.pop("options")
        found = {
            name.removesuffix("_s").replace("_", "-"): own
            for name, (own, usual) in named.items()
            if own != usual
        }
        said = [f"{name}={value}" for name, value in (options or {}).items()]
        return found | ({"option": said} if said else {})

    @property
    def is_elastic(self) -> bool:
        return (self.min_workers, self.max_workers, self.host_discovery) != (None, None, None)

    def job(self, command: list[str]) -> Job:
        """Returns the job that runs ``command`` as the processes that the strategy needs.

        In a process that is one of several ranks already, see ``place``, it is that rank's job.

        Args:
            command: argument list of one process.

        Raises:
            OptionError: unknown strategy or controller, hosts that cannot be read, parameter
                servers for a strategy that has none, or options of an elastic job that do not fit.
            LaunchError: more workers than slots, or several for a strategy of one process.
            EngineMissingError: the launcher's program is not installed.
        """
        strategy, workers, ps, controller = self.strategy, self.workers, self.ps, self.controller
        spec = _AUTO if strategy == "auto" else spec_of(strategy, self.options)
        timeouts = {
            "start_timeout_s": self.start_timeout_s,
            "stall_timeout_s": self.stall_timeout_s,
        }
        environ = {**os.environ, **deadlines.told(**timeouts)}
        if ps is not None and not spec.has_servers:
            with_servers = " or ".join(names_of(lambda spec: spec.has_servers))
            raise OptionError(
                f"--ps must go with strategy {with_servers}",
                received=f"--ps {ps} with --strategy {strategy}",
                mend=f"Leave it out, or choose {with_servers}",
            )
        if self.is_elastic:
            _refuse_elastic(spec, self)
            return elastic.job(
                command,
                workers=2 if workers is None else workers,
                min_workers=self.min_workers,
                max_workers=self.max_workers,
                host_discovery=self.host_discovery,
                environ=environ,
                **timeouts,
            )
        place = self.place
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
            _refuse_several(self)
            environ = environ if workers is None else topology.alone(environ)
            return local.job(command, environ=environ, **timeouts)
        if controller is not None and not spec.has_controllers:
            known = names_of(lambda spec: spec.has_controllers)
            raise OptionError(
                f"--controller must go with strategy {' or '.join(known)}",
                received=f"--controller {controller} with --strategy {strategy}, whose processes "
                "tfdist starts itself",
                mend="Leave it out",
            )
        name = controller or spec.launchers[0]
        if name not in spec.launchers:
            raise unknown_choice("controller", name, list(spec.launchers))
        workers = 2 if workers is None else workers
        servers = {"ps": ps or 1} if spec.has_servers else {}
        return _LAUNCHERS[name](
            command, workers=workers, on_hosts=self.hosts, environ=environ, **servers, **timeouts
        )


def job_for(strategy: str, command: list[str], **processes: Any) -> Job:
    """Returns what ``Where.job`` does, of a command whose silence is not watched unless told so."""
    return Where(strategy=strategy, **{"stall_timeout_s": None, **processes}).job(command)


#: It chooses inside one process.
_AUTO = Spec(name="auto", path="", summary="what fits this machine and this launcher")


def _refuse_elastic(spec: Spec, where: Where) -> None:
    if not spec.is_elastic:
        known = names_of(lambda spec: spec.is_elastic)
        raise OptionError(
            f"an elastic job must have strategy {' or '.join(known)}",
            received=f"--strategy {spec.name}",
            mend="Leave --min-workers, --max-workers and --host-discovery out, and give "
            "--max-restarts to start all again when a process is lost",
        )
    if where.min_workers is None:
        raise OptionError(
            "--max-workers and --host-discovery must go with --min-workers, which makes a job "
            "elastic",
            received="no --min-workers",
            mend="Give --min-workers, the number that the job can go on with",
        )
    if (place := topology.current()).launcher in ("slurm", "mpi") and place.world_size > 1:
        raise OptionError(
            "an elastic job must be started once, as it starts its workers itself",
            received=f"rank {place.rank} of {place.world_size}, told by {place.launcher}",
            mend="Leave srun or mpirun out",
        )
    if where.hosts is not None:
        raise OptionError(
            "an elastic job must learn its hosts from a script",
            received=f"--hosts {where.hosts}",
            mend="Give --host-discovery SCRIPT instead",
        )
    if where.controller not in (None, "gloo"):
        raise OptionError(
            "an elastic job must have the controller gloo, since MPI ends with its first lost rank",
            received=f"--controller {where.controller}",
            mend="Leave --controller out",
        )


def _refuse_several(where: Where) -> None:
    workers = None if where.workers == 1 else where.workers
    said = {"workers": workers, "hosts": where.hosts, "controller": where.controller}
    given = [f"--{option} {value}" for option, value in said.items() if value is not None]
    if given:
        it = "them" if given[1:] else "it"
        raise _one_process(where.strategy, " ".join(given), f"leave {it} out")


def _one_process(strategy: str, received: str, otherwise: str) -> LaunchError:
    each = ""
    if strategy != "auto" and spec_of(strategy).divides_model:
        each = f", give -o replicas={' or '.join(REPLICAS)} to have one on each rank"
    return LaunchError(
        f"strategy '{strategy}' must run in one process",
        received=received,
        mend=f"Choose one of {', '.join(names_of(lambda spec: spec.launchers))}{each}, or "
        f"{otherwise}",
    )
