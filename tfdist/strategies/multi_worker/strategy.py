"""Workers on one or several machines: ``tf.distribute.MultiWorkerMirroredStrategy``."""

from __future__ import annotations

import contextlib
from typing import Any

from tfdist import topology
from tfdist.errors import OptionError, notice, unknown_choice
from tfdist.strategies.base import ModelOrFn, made_here
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.rank_devices import before_tensorflow, choose_gpus, take_threads
from tfdist.strategies.spec import Spec
from tfdist.topology import Topology
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.options import check_count, deadline

_COMMUNICATIONS = ("auto", "ring", "nccl")


def check_place(place: Topology) -> None:
    """Refuses a place whose workers do not know each other; warns where srun was forgotten.

    Raises:
        OptionError: a cluster with parameter servers, or one of several ranks without addresses.
    """
    if "ps" in place.roles:
        raise OptionError(
            "a cluster of strategy 'multi_worker' must have workers only",
            received="a TF_CONFIG with parameter servers",
            mend="Leave ps out of the cluster in TF_CONFIG",
        )
    if place.world_size > 1 and not place.addresses:
        raise OptionError(
            "the workers of strategy 'multi_worker' must know each other's addresses",
            received=f"rank {place.rank} of {place.world_size}, started by {place.launcher}",
            mend="Start them with tfdist launch --strategy multi_worker (of a mesh or pipeline: "
            "with -o replicas=multi_worker), or with Slurm's srun",
        )
    if topology.lacks_srun():
        notice(
            "warning: this Slurm job has several tasks, but srun did not start this "
            "process: it trains alone. Start it with srun",
        )


SPEC = Spec(
    name="multi_worker",
    path="tfdist.strategies.multi_worker.strategy:MultiWorker",
    summary="one process per machine or core, connected by TensorFlow, in step",
    launchers=("tasks",),
    takes_keras_3=True,
    engine="multi-worker",
    sagemaker="multi_worker_mirrored_strategy",
)


class MultiWorker(DataParallel):
    """One worker for each machine or core; gradients are added up by ring all-reduce or NCCL.

    A worker finds the others in TF_CONFIG, which ``tfdist launch`` and ``tfdist train`` write, or
    in what Slurm's srun or SageMaker tells: see ``tfdist.topology``.

    Args:
        communication: "ring" (gRPC), "nccl" (GPUs), or "auto".
        bytes_per_pack: gradients travel in packs of about so many bytes; None leaves it to
            TensorFlow.
        start_timeout_s: seconds that a worker waits for the others to come up; None takes those of
            the command that has started it, else 120.
        stall_timeout_s: seconds that a step waits for the others before the job ends in an error;
            None takes those of the command, and more, else 300.
        threads: threads that a worker computes with; None divides the cores among a host's workers.
        shared: the options of all data-parallel strategies; see ``DataParallel``.
    """

    name = "multi_worker"
    divides_weights = True
    divides_by_speed = True

    def __init__(
        self,
        *,
        communication: str = "auto",
        bytes_per_pack: int | None = None,
        start_timeout_s: float | None = None,
        stall_timeout_s: float | None = None,
        threads: int | None = None,
        **shared: Any,
    ):
        super().__init__(**shared)
        if communication not in _COMMUNICATIONS:
            raise unknown_choice("communication", communication, _COMMUNICATIONS)
        for option, value in (("bytes_per_pack", bytes_per_pack), ("threads", threads)):
            if value is not None:
                check_count(option, value)
        if self._step.shards_weights and (communication != "auto" or bytes_per_pack is not None):
            raise OptionError(
                "communication and bytes_per_pack must be left out with shard='weights', which "
                "sends the weights of one block at a time, by a way that TensorFlow chooses",
                received=f"communication={communication!r}, bytes_per_pack={bytes_per_pack}",
                mend="Leave them out, or leave shard='weights' out",
            )
        self._communication = communication
        self._bytes_per_pack = bytes_per_pack
        self._start_timeout_s = deadline("start_timeout_s", start_timeout_s)
        self._stall_timeout_s = deadline("stall_timeout_s", stall_timeout_s)
        self._threads = threads
        self._collective: Any = None

    def start(self) -> None:
        from tfdist.strategies.multi_worker.workers import Tasks

        holds_parts = self._step.shards_weights
        self.start_ranks(1 if holds_parts else 0)
        if holds_parts:
            self.join_ranks()
        else:
            place = topology.current()
            self._collective = Tasks(self._connected(place), place, **self._deadlines)
        self._find_speeds()
        self._collective.speeds = self._speeds

    def start_ranks(self, devices_each: int) -> None:
        """Takes the devices of a rank that holds a model which another strategy divides.

        Args:
            devices_each: what a rank computes on side by side: so many GPUs of its host, if there
                are any, or logical CPUs; 0: its part of the host's.
        """
        place = topology.current()
        check_place(place)
        self._take_devices(place, devices_each)

    def join_ranks(self) -> None:
        """Connects those ranks, when the devices of each are made: TensorFlow adds none later."""
        from tfdist.strategies.multi_worker.holders import Holders
        from tfdist.strategies.single import Alone

        place = topology.current()
        if place.world_size == 1:
            self._collective = Alone()
            return
        self._connected(place)
        self._collective = Holders(place, **self._deadlines)

    def _connected(self, place: Topology) -> Any:
        from tfdist.strategies.multi_worker.workers import connect

        options = (self._communication, self._bytes_per_pack)
        return connect(place, *options, timeout_s=self._start_timeout_s)

    @property
    def _deadlines(self) -> dict[str, float]:
        return {
            "start_timeout_s": self._start_timeout_s,
            "stall_timeout_s": self._stall_timeout_s,
        }

    @before_tensorflow("multi_worker")
    def _take_devices(self, place: Topology, devices_each: int) -> None:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus and devices_each:
            number = 0 if place.has_own_gpus else place.local_rank
            mine = choose_gpus(gpus, number, devices_each)
            tf.config.set_visible_devices(mine, "GPU")
        elif place.local_size > 1 and gpus and not place.has_own_gpus:
            # As many for each, since TensorFlow counts the replicas of all by its own.
            each = max(1, len(gpus) // place.local_size)
            mine = choose_gpus(gpus, place.local_rank, each)
            tf.config.set_visible_devices(mine, "GPU")
        threads = take_threads(self._threads, place)
        # Collectives occupy threads while they wait for the others, devices while they compute.
        at_once = max(4, threads, devices_each + 2)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)

    def close(self) -> None:
        """Leaves the workers connected: a process connects once, and it ends with the process."""

    @property
    def topology(self) -> Topology:
        return topology.current()

    def connect(self) -> Collective:
        return self._entered(self._collective)

    def make_model(self, model_fn: ModelOrFn) -> Any:
        # TensorFlow's own strategy would make whole weights, and mirror them.
        is_mirrored = not self._step.shards_weights
        collective = self.connect()
        with collective.strategy.scope() if is_mirrored else contextlib.nullcontext():
            return made_here(model_fn, may_be_unbuilt=True)
