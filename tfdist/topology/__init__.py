"""Where this process stands among the others: a pure function of the environment.

The environment is read here and nowhere else. ``from_environ`` takes a mapping, so tests pass
recorded environments and never touch ``os.environ``.

Sources, the first that is there: TF_CONFIG, Horovod's Gloo, Open MPI, SageMaker, Slurm. What stands
closer to the process comes first: ``tfdist launch`` starts the tasks of a TensorFlow cluster, and
mpirun its ranks, within Slurm's steps and SageMaker's containers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfdist.errors import OptionError, read_json
from tfdist.topology import aws, slurm
from tfdist.topology.values import whole


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in a job.

    Attributes:
        world_size: number of processes in the job, >= 1.
        rank: this process, in [0, world_size).
        local_rank: this process among those of its host, in [0, local_size).
        local_size: number of processes on this host.
        has_own_gpus: whether the GPUs that this process sees are its own, not those of its host.
        launcher: what told the place: "mpi", "gloo", "tf_config", "slurm", "sagemaker" or "none".
        role: of a task in a TensorFlow cluster: "chief", "worker" or "ps"; "worker" elsewhere.
        addresses: "host:port" of each rank, where the source names hosts; empty under MPI and Gloo.
        roles: of each rank, where the source names hosts; empty under MPI and Gloo.
        elastic_workers: number of processes that an elastic job was asked to work with, whatever
            their number is now; None where the number is fixed.
        secret: by which the ranks of a cluster know each other; empty where none was given.
        driver: the pipes of a worker in an elastic job to the job's driver; None for all others.
        kept: the file in which that worker keeps its training while Horovod may end it.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    has_own_gpus: bool = False
    launcher: str = "none"
    role: str = "worker"
    addresses: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    elastic_workers: int | None = None
    secret: str = field(default="", repr=False)
    driver: tuple[int, int] | None = None
    kept: str | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def num_workers(self) -> int:
        """Processes that compute: beside parameter servers the chief does not."""
        return self.roles.count("worker") if "ps" in self.roles else self.world_size


#: Names the variable with the secret of a cluster, the same for all its ranks.
SECRET = "TFDIST_SECRET"

_ELASTIC, _ELASTIC_WORKERS = "HOROVOD_ELASTIC", "TFDIST_ELASTIC_WORKERS"
_LAUNCHERS = {
    "gloo": ("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


def from_environ(environ: Mapping[str, str]) -> Topology:
    """Returns the place that the environment tells; one process by itself where it tells none.

    Raises:
        OptionError: a variable that cannot be read, or contradicts another; it is named.
    """
    place = _place(environ)
    return replace(place, secret=environ.get(SECRET, "")) if place.addresses else place


def _place(environ: Mapping[str, str]) -> Topology:
    if environ.get("TF_CONFIG"):
        return _from_tf_config(environ["TF_CONFIG"])
    if environ.get(_ELASTIC):
        return _elastic(environ)
    for launcher, names in _LAUNCHERS.items():
        if names[0] in environ:
            return _from_launcher(environ, launcher, *names)
    if aws.is_container(environ):
        return _from_addresses("sagemaker", *aws.task(environ))
    if slurm.is_task(environ):
        own_gpus = slurm.has_own_gpus(environ)
        return _from_addresses("slurm", *slurm.task(environ), has_own_gpus=own_gpus)
    return Topology()


def current() -> Topology:
    """Returns the place of this process."""
    environ: Mapping[str, str] = os.environ
    if not aws.is_container(environ) and aws.RESOURCE_CONFIG_FILE.is_file():
        config = aws.RESOURCE_CONFIG_FILE.read_text()
        environ = {**environ, aws.RESOURCE_CONFIG: config}
    return from_environ(environ)


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` without what makes a process one of several."""
    marks = [*aws.MARKS, *slurm.MARKS]
    left = without_places(environ)
    return {name: value for name, value in left.items() if name not in marks}


def without_places(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` without what a rank would take for its place before MPI's or Gloo's."""
    marks = ["TF_CONFIG", _ELASTIC, *(names[0] for names in _LAUNCHERS.values())]
    return {name: value for name, value in environ.items() if name not in marks}


def lacks_srun() -> bool:
    """Whether this is the only process of a Slurm job of several tasks: srun did not start it."""
    return slurm.lacks_srun(os.environ) and current().launcher == "none"


def _from_launcher(
    environ: Mapping[str, str],
    launcher: str,
    size: str,
    rank: str,
    local_rank: str,
    local_size: str,
) -> Topology:
    place = Topology(
        world_size=whole(environ, size, at_least=1),
        rank=whole(environ, rank),
        local_rank=whole(environ, local_rank) if local_rank in environ else 0,
        local_size=whole(environ, local_size, at_least=1) if local_size in environ else 1,
        launcher=launcher,
    )
    if place.rank >= place.world_size:
        raise OptionError(
            f"{rank} must be less than {size}",
            received=f"{place.rank} of {environ[size]}",
            mend=f"Give each process a {rank} of its own, from 0 to {place.world_size - 1}",
        )
    return place


def _elastic(environ: Mapping[str, str]) -> Topology:
    """Returns the place of a worker in an elastic Horovod job, as tfdist's driver tells it.

    Each slot is a host to Horovod there, so the driver tells which it is of its real host.
    """
    if not environ.get(_ELASTIC_WORKERS):
        raise OptionError(
            "an elastic job must be started by tfdist, which keeps its batches the same",
            received=f"{_ELASTIC} without {_ELASTIC_WORKERS}",
            mend="Start it with tfdist launch --workers 2 --min-workers 1 -- python script.py",
        )
    workers = whole(environ, _ELASTIC_WORKERS, at_least=1)
    words, _, orders = environ["TFDIST_DRIVER"].partition(",")
    joins = "HOROVOD_SIZE" not in environ  # Without a rank before it does.
    return Topology(
        local_rank=whole(environ, "TFDIST_LOCAL_RANK"),
        local_size=workers,
        elastic_workers=workers,
        driver=(int(words), int(orders)),
        kept=environ["TFDIST_KEPT"],
        world_size=workers + 1 if joins else whole(environ, "HOROVOD_SIZE", at_least=1),
        rank=workers if joins else whole(environ, "HOROVOD_RANK"),
        launcher="gloo",
    )


def _from_addresses(
    launcher: str,
    rank: int,
    addresses: tuple[str, ...],
    roles: tuple[str, ...] = (),
    has_own_gpus: bool = False,
) -> Topology:
    roles = roles or ("worker",) * len(addresses)
    hosts = [address.rpartition(":")[0] for address in addresses]
    here = hosts[rank]
    return Topology(
        world_size=len(addresses),
        rank=rank,
        local_rank=hosts[:rank].count(here),
        local_size=hosts.count(here),
        launcher=launcher,
        role=roles[rank],
        addresses=addresses,
        roles=roles,
        has_own_gpus=has_own_gpus,
    )


# In the order of ranks. An evaluator stands beside the cluster and takes no part in the steps.
ROLES = ("chief", "worker", "ps")
_NO_CONFIG = (ValueError, KeyError, TypeError, IndexError, AttributeError)


def tf_config(tasks: Sequence[tuple[str, str]], rank: int) -> str:
    """Returns the TF_CONFIG of one task.

    Args:
        tasks: (role, "host:port") of each rank, those of a role together.
        rank: of the task.
    """
    cluster: dict[str, list[str]] = {}
    for role, address in tasks:
        cluster.setdefault(role, []).append(address)
    role, address = tasks[rank]
    task = {"type": role, "index": cluster[role].index(address)}
    return json.dumps({"cluster": cluster, "task": task})


def is_evaluator(environ: Mapping[str, str]) -> bool:
    """Whether TF_CONFIG calls this process the evaluator of its cluster."""
    try:
        return read_json(environ["TF_CONFIG"])["task"]["type"] == "evaluator"
    except _NO_CONFIG:
        return False  # ``from_environ`` says what is wrong.


def _from_tf_config(text: str) -> Topology:
    if is_evaluator({"TF_CONFIG": text}):
        raise OptionError(
            "the evaluator of a TF_CONFIG must run tfdist train, as the training does",
            received=f"another program, in {text[:200]}",
            mend="Leave the evaluator out, or evaluate in it with strategy 'single' and no "
            "TF_CONFIG",
        )
    try:
        config = read_json(text)
        cluster = config["cluster"]
        tasks = [(role, address) for role in ROLES for address in cluster.get(role, [])]
        if not all(isinstance(address, str) for _, address in tasks):
            raise TypeError("addresses are texts")
        role, index = config["task"]["type"], int(str(config["task"]["index"]))
        if index < 0 or len({address for _, address in tasks}) < len(tasks):
            raise ValueError("two tasks would have one place")
        rank = tasks.index((role, cluster[role][index]))
    except _NO_CONFIG as error:
        raise OptionError(
            "TF_CONFIG must hold a cluster of chief, worker and ps tasks, and the place of this "
            "one",
            received=text[:200],
            mend='Write {"cluster": {"worker": ["host:port", ...]}, '
            '"task": {"type": "worker", "index": 0}}, or let tfdist launch write it',
        ) from error
    roles, addresses = zip(*tasks, strict=True)
    return _from_addresses("tf_config", rank, addresses, roles)
