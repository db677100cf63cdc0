"""Connects the processes of a cluster: servers on workers and parameter servers, then the chief."""

from __future__ import annotations

import atexit
import faulthandler
import os
import time

import tensorflow as tf

from tfdist.errors import LaunchError, first_line
from tfdist.strategies.parameter_server.connections import (
    Lines,
    Task,
    Watch,
    stay_until_goodbye,
    tasks_of,
)
from tfdist.strategies.rank_devices import before_tensorflow, take_threads
from tfdist.strategies.rendezvous import meet_and_stay
from tfdist.topology import Topology

# The chief's own end is told first: it is the cause.
_AFTER_CHIEF_S = 2.0
# TensorFlow may wait for ever for a lost task when a process ends.
_LEAVE_S = 5.0


@before_tensorflow("parameter_server")
def take_devices(place: Topology, threads: int | None) -> tf.compat.v1.ConfigProto:
    """Gives this task its GPU and threads; returns the same for its server.

    A worker has one of its host's GPUs, the chief one where it has no worker beside it.

    Raises:
        OptionError: TensorFlow was used already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(_own_gpus(place, gpus), "GPU")
    intra = take_threads(threads, place)
    # Steps occupy threads while they wait for weights.
    inter = max(4, intra, place.roles.count("worker") + 1)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    return tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=intra, inter_op_parallelism_threads=inter
    )


def _own_gpus(place: Topology, gpus: list) -> list:
    host = place.addresses[place.rank].rpartition(":")[0]
    here = [task for task in tasks_of(place) if task.address.rpartition(":")[0] == host]
    workers = [task.rank for task in here if task.role == "worker"]
    if place.role == "worker":
        return [gpus[workers.index(place.rank) % len(gpus)]]
    return gpus[:1] if place.role == "chief" and not workers else []


def serve(place: Topology, config: tf.compat.v1.ConfigProto, *, start_timeout_s: float) -> None:
    """Serves as a worker or parameter server until the chief has said goodbye.

    Raises:
        LaunchError: the address is taken, the chief does not come up in time, or it has died.
    """
    task = tasks_of(place)[place.rank]
    server = _server(task, place, config)  # Before the meeting: TensorFlow then finds all at once.
    line = meet_and_stay(place, timeout_s=start_timeout_s)[0]
    if not stay_until_goodbye(line):
        time.sleep(_AFTER_CHIEF_S)
        raise LaunchError(
            "the chief must stay until the tasks of its cluster have ended",
            received=f"that {task} has lost the chief at {place.addresses[0]}",
            mend="Look at the chief's last lines",
        )
    del server


def _server(task: Task, place: Topology, config: tf.compat.v1.ConfigProto) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            _cluster_spec(place),
            job_name=task.role,
            task_index=task.index,
            protocol="grpc",
            config=config,
        )
    except tf.errors.OpError as error:
        raise LaunchError(
            "a task of a cluster must listen on its address in TF_CONFIG",
            received=f"an error of {task}: {first_line(error)}",
            mend="Choose a free port of this host",
        ) from error


def _cluster_spec(place: Topology) -> tf.train.ClusterSpec:
    cluster: dict[str, list[str]] = {}
    for role, address in zip(place.roles, place.addresses, strict=True):
        cluster.setdefault(role, []).append(address)
    return tf.train.ClusterSpec(cluster)


class Cluster:
    """The connected cluster, seen from its chief.

    Args:
        min_shard_bytes: variables are divided among parameter servers in shards of at least so
            many bytes; None leaves them whole.

    Raises:
        LaunchError: a task did not come up within ``start_timeout_s``.
    """

    def __init__(
        self,
        place: Topology,
        *,
        min_shard_bytes: int | None,
        start_timeout_s: float,
        stall_timeout_s: float,
    ):
        self.tasks = tasks_of(place)
        self._lines = Lines(meet_and_stay(place, timeout_s=start_timeout_s))
        self.watch = Watch(
            self._lines,
            self.tasks,
            stall_timeout_s=stall_timeout_s,
            first_timeout_s=stall_timeout_s + start_timeout_s,
        )
        atexit.register(self._leave_in_time)
        # Its errors reach the user as exceptions; those of lost workers are the engine's to mend. A
        # step is traced before it is scheduled, of which the strategy would warn.
        untold = ("cluster_coordinator.py", "parameter_server_strategy_v2.py")
        tf.get_logger().addFilter(lambda record: record.filename not in untold)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            _cluster_spec(place), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        partitioner = None
        if min_shard_bytes is not None:
            by_size = tf.distribute.experimental.partitioners.MinSizePartitioner(
                min_shard_bytes, max_shards=place.roles.count("ps")
            )

            def partitioner(shape: tf.TensorShape, dtype: tf.DType) -> list[int]:
                if shape.is_fully_defined():
                    return by_size(shape, dtype)
                return [1] * max(1, shape.rank or 0)  # Such as what Discretization has seen.

        def connect() -> tf.distribute.ParameterServerStrategy:
            return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)

        self.engine = self.watch.call(connect, "connecting the tasks", is_first=True)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.engine)

    @property
    def num_workers(self) -> int:
        return sum(task.role == "worker" for task in self.tasks)

    def say_goodbye(self) -> None:
        self._lines.say_goodbye()

    def _leave_in_time(self) -> None:
        """Ends this process with code 1 if it hangs while it ends, for a task that is gone."""
        if self.watch.broken is not None:
            # It acts even where another thread holds the interpreter; its traceback tells nothing.
            nowhere = open(os.devnull, "w")  # noqa: SIM115 (it must outlive this function)
            faulthandler.dump_traceback_later(_LEAVE_S, exit=True, file=nowhere)
