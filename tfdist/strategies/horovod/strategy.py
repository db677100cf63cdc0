"""One process for each GPU or core, over MPI or Gloo: Horovod.

Sergeev and Del Balso 2018, arXiv:1802.05799.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist import topology
from tfdist.compat import import_horovod
from tfdist.errors import EngineMissingError, OptionError, first_line, unknown_choice
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.rank_devices import before_tensorflow, choose_gpus, take_threads
from tfdist.strategies.spec import Spec
from tfdist.topology import Topology
from tfdist.topology.values import whole
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.options import check_count, deadline

_OPS = ("average", "adasum")
_COMPRESSIONS = ("none", "fp16")


SPEC = Spec(
    name="horovod",
    path="tfdist.strategies.horovod.strategy:Horovod",
    summary="one process per GPU or core, over MPI or Gloo",
    launchers=("mpi", "gloo"),
    is_elastic=True,
    takes_keras_3=True,
    engine="horovod",
    sagemaker="mpi",
)


class Horovod(DataParallel):
    """One rank for each GPU or core; gradients are averaged by ring all-reduce.

    Args:
        op: "average", or "adasum" (Maleki et al. 2020, arXiv:2006.02924), which is not exact.
        compression: "none", or "fp16": gradients travel as float16, which is not exact.
        stall_timeout_s: seconds that a rank waits for the others before the job ends in an error;
            None takes those of the command that has started it, and more, else 300.
        threads: threads that a rank computes with; None divides the cores among a host's ranks.
        commit_every_steps: in an elastic job, steps between two copies of the training in memory:
            what the loss of a rank can cost.
        shared: the options of all data-parallel strategies; see ``DataParallel``.
    """

    name = "horovod"
    slots_can_be_offloaded = True
    divides_weights = True
    divides_by_speed = True

    def __init__(
        self,
        *,
        op: str = "average",
        compression: str = "none",
        stall_timeout_s: float | None = None,
        threads: int | None = None,
        commit_every_steps: int = 10,
        **shared: Any,
    ):
        super().__init__(**shared)
        if op not in _OPS:
            raise unknown_choice("op", op, _OPS)
        if compression not in _COMPRESSIONS:
            raise unknown_choice("compression", compression, _COMPRESSIONS)
        if op == "adasum" and self._step.divides_slots:
            raise OptionError(
                f"slots in parts ({self._step.dividing_option}) must have gradients that are "
                "averaged part by part",
                received="op='adasum', which looks at whole gradients",
                mend="Leave out op, or the other option",
            )
        if threads is not None:
            check_count("threads", threads)
        check_count("commit_every_steps", commit_every_steps)
        self._op = op
        self._compression = compression
        self._stall_timeout_s = deadline("stall_timeout_s", stall_timeout_s)
        self._threads = threads
        self._commit_every_steps = commit_every_steps
        self._hvd: Any = None
        self._world: Any = None
        self._driver: Any = None

    def start(self) -> None:
        if self._device_speeds is not None and topology.current().elastic_workers is not None:
            raise OptionError(
                "device_speeds must be of ranks that stay the same",
                received="an elastic job",
                mend="Leave out device_speeds, or --min-workers and --host-discovery",
            )
        self.start_ranks()
        self._find_speeds()

    def start_ranks(self, devices_each: int = 1) -> None:
        """Starts Horovod.

        Args:
            devices_each: what a rank computes on side by side: so many GPUs of its host, if there
                are any, or logical CPUs.
        """
        place = topology.current()
        _prepare_environment(os.environ, place, self._stall_timeout_s)
        try:
            hvd = import_horovod()
        except ImportError as error:
            raise EngineMissingError(
                "strategy 'horovod' must have the package horovod, built for this TensorFlow",
                received=f"an error: {first_line(error)}",
                mend="Run tfdist install horovod",
            ) from error
        if place.elastic_workers is None:
            hvd.init()
        else:
            from tfdist.strategies.horovod.elastic import Driver, meet

            self._driver = Driver(place.driver)
            meet(hvd, self._driver)
        if place.addresses and hvd.size() != place.world_size:
            raise OptionError(
                "Horovod's ranks must be started by mpirun or horovodrun, or by srun with MPI",
                received=f"{hvd.size()} ranks, where {place.launcher} names {place.world_size}",
                mend="Use tfdist launch --hosts, srun --mpi=pmix, or strategy 'multi_worker'",
            )
        from tfdist.strategies.horovod.ring import World

        self._hvd, self._world = hvd, World(hvd.size(), hvd.rank())
        self._take_devices(place, devices_each)

    @before_tensorflow("horovod")
    def _take_devices(self, place: Topology, devices_each: int) -> None:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        number = 0 if place.has_own_gpus else place.local_rank
        pinned = choose_gpus(gpus, number, devices_each)
        if pinned:
            tf.config.set_visible_devices(pinned, "GPU")
            for gpu in pinned:
                tf.config.experimental.set_memory_growth(gpu, True)
        threads = take_threads(self._threads, place)
        at_once = max(1, min(2, threads))
        if devices_each > 1:  # One occupies a thread while it computes.
            at_once = max(at_once, devices_each + 1)
        tf.config.threading.set_inter_op_parallelism_threads(at_once)

    def close(self) -> None:
        """Leaves Horovod running: a process can start it once, and it ends with the process."""

    def join_ranks(self) -> None:
        """Nothing is left to do: they have met in ``start_ranks``."""

    @property
    def topology(self) -> Topology:
        place = topology.current()
        if place.elastic_workers is None or self._world is None:
            return place
        return replace(place, world_size=self._world.size, rank=self._world.rank)

    @property
    def approximations(self) -> tuple[str, ...]:
        found = list(self._step.approximations)
        if self._op == "adasum":
            found.append("op='adasum' is not the mean of the gradients")
        if self._compression == "fp16":
            found.append("compression='fp16' rounds gradients to float16")
        return tuple(found)

    def connect(self) -> Collective:
        from tfdist.strategies.horovod.elastic import ElasticRing
        from tfdist.strategies.horovod.ring import Ring

        engine = self._entered(self._hvd)
        options = {
            "op": self._op,
            "compression": self._compression,
            "stall_timeout_s": self._stall_timeout_s,
        }
        place = topology.current()
        if place.elastic_workers is None:
            ring = Ring(engine, self._world, **options)
            ring.speeds = self._speeds
            return ring
        return ElasticRing(
            engine,
            self._world,
            driver=self._driver,
            planned=place.elastic_workers,
            commit_every_steps=self._commit_every_steps,
            kept=Path(place.kept),
            **options,
        )


def _prepare_environment(
    environ: MutableMapping[str, str], place: Topology, stall_timeout_s: float
) -> None:
    """Sets what Horovod reads when it starts; what the user has set stays."""
    stall = max(1, int(stall_timeout_s))
    environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, stall // 2)))
    environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(stall))
    for name in ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        whole(environ, name)  # Horovod takes what is none for 0: no deadline.
    # One process without a launcher: MPI could not start.
    if place.world_size == 1 and place.launcher not in ("mpi", "gloo"):
        environ.setdefault("HOROVOD_CONTROLLER", "gloo")
        environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
