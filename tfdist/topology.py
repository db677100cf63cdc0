"""Where this process stands among the others: a pure function of the environment.

The environment is read here and nowhere else. ``from_environ`` takes a mapping, so tests pass
recorded environments and never touch ``os.environ``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in a job.

    Attributes:
        world_size: number of processes in the job, >= 1.
        rank: this process, in [0, world_size).
        local_rank: this process among those of its host, in [0, local_size).
        local_size: number of processes on this host.
        launcher: what started the job: "mpi", "gloo", "tf_config" or "none".
        role: of a task in a TensorFlow cluster: "chief", "worker" or "ps"; "worker" elsewhere.
        addresses: "host:port" of each rank's task in a TensorFlow cluster; empty elsewhere.
        roles: of each rank's task in a TensorFlow cluster; empty elsewhere.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    role: str = "worker"
    addresses: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def num_workers(self) -> int:
        """Processes that compute: beside parameter servers the chief does not."""
        return self.roles.count("worker") if "ps" in self.roles else self.world_size


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
    """Returns the topology that the launcher wrote down; one process otherwise.

    TF_CONFIG comes first: ``tfdist launch`` starts the tasks of a TensorFlow cluster with mpirun,
    and a cluster is then what they are.

    Raises:
        OptionError: TF_CONFIG is there and cannot be read.
    """
    if environ.get("TF_CONFIG"):
        return _from_tf_config(environ["TF_CONFIG"])
    for launcher, (size, rank, local_rank, local_size) in _LAUNCHERS.items():
        if size in environ:
            return Topology(
                world_size=int(environ[size]),
                rank=int(environ[rank]),
                local_rank=int(environ.get(local_rank, 0)),
                local_size=int(environ.get(local_size, 1)),
                launcher=launcher,
            )
    return Topology()


def current() -> Topology:
    """Returns the topology of this process."""
    return from_environ(os.environ)


# In the order of ranks. An evaluator stands beside the cluster and takes no part in the steps.
ROLES = ("chief", "worker", "ps")


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


def _from_tf_config(text: str) -> Topology:
    try:
        config = json.loads(text)
        cluster = config["cluster"]
        tasks = [(role, address) for role in ROLES for address in cluster.get(role, [])]
        role, index = config["task"]["type"], int(config["task"]["index"])
        rank = tasks.index((role, cluster[role][index]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise OptionError(
            "TF_CONFIG holds a cluster of chief, worker and ps tasks, and the place of this one",
            received=text[:200],
            mend='Write {"cluster": {"worker": ["host:port", ...]}, '
            '"task": {"type": "worker", "index": 0}}, or let tfdist launch write it',
        ) from error
    hosts = [address.rpartition(":")[0] for _, address in tasks]
    here = hosts[rank]
    return Topology(
        world_size=len(tasks),
        rank=rank,
        local_rank=hosts[:rank].count(here),
        local_size=hosts.count(here),
        launcher="tf_config",
        role=role,
        addresses=tuple(address for _, address in tasks),
        roles=tuple(role for role, _ in tasks),
    )
