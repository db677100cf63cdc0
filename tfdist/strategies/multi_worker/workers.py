"""The workers of a MultiWorkerMirroredStrategy as a ``Collective``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import OptionError
from tfdist.strategies.multi_worker.cluster import OF_PARTS, Cluster, launcher
from tfdist.strategies.rendezvous import check_port, meet
from tfdist.strategies.replica_sum import TfReplicas
from tfdist.topology import Topology

# This process's connection, and what it was asked for: TensorFlow makes one, which ends with it.
_connection: tuple[tuple[Any, ...], tf.distribute.MultiWorkerMirroredStrategy] | None = None

# glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX, of malloc.h.
_KEEPING_MEMORY = {-1: 2**31 - 1, -2: 128 << 20, -4: 0}


def connect(
    place: Topology, communication: str, bytes_per_pack: int | None, *, timeout_s: float
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns TensorFlow's strategy once all workers of the cluster have come up.

    Raises:
        LaunchError: some did not within ``timeout_s``.
        OptionError: this process has connected with other options before.
    """
    global _connection
    asked = (place, communication, bytes_per_pack)
    if _connection is None:
        _connection = asked, _connected(*asked, timeout_s=timeout_s)
    before, strategy = _connection
    if before != asked:
        raise OptionError(
            "strategy 'multi_worker' must have the same communication and bytes_per_pack each time "
            "that a program enters it, for its workers are connected once",
            received=f"communication={communication!r}, bytes_per_pack={bytes_per_pack}",
            mend=f"Give {before[1]!r} and {before[2]} as before, or start another program",
        )
    return strategy


def _connected(
    place: Topology, communication: str, bytes_per_pack: int | None, *, timeout_s: float
) -> tf.distribute.MultiWorkerMirroredStrategy:
    experimental = tf.distribute.experimental
    options = experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack or 0,
        implementation=experimental.CommunicationImplementation[communication.upper()],
    )
    if place.world_size > 1:
        check_port(place)
        meet(place, timeout_s=timeout_s)
        if not tf.config.get_visible_devices("GPU"):
            _keep_memory()
    return tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=_resolver(place), communication_options=options
    )


def _keep_memory() -> None:
    """Has this process keep what a step frees, for the next one.

    Beside TensorFlow's server glibc gives tensors of megabytes back to the system in each step, and
    the next one waits for fresh pages: a third of the processor time of a small convnet's steps.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # Other systems have none.
    for option, value in _KEEPING_MEMORY.items() if set_option is not None else ():
        set_option(option, value)


def _resolver(place: Topology) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Tells TensorFlow of the cluster, whatever it was found from; it knows TF_CONFIG alone.

    Every rank is a "worker", a chief too: rank and number of the task are then the same.
    """
    is_alone = place.world_size == 1
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({} if is_alone else {"worker": list(place.addresses)}),
        task_type=None if is_alone else "worker",
        task_id=None if is_alone else place.rank,
        # Unlike that of TF_CONFIG this one does not count them.
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )


class Tasks(Cluster, TfReplicas):
    """The workers of a cluster; each may have several replicas (GPUs).

    Args:
        strategy: which has connected them.
        place: of this worker among them.
        deadlines: see ``Cluster``.
    """

    # BatchNormalization's moving statistics and metrics are read as a mean or sum of all workers.
    reads_together = True

    def __init__(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        place: Topology,
        **deadlines: float,
    ):
        Cluster.__init__(self, place, **deadlines)
        TfReplicas.__init__(self, strategy)
        # Of parts, between workers of one device; those of several, or on GPUs, send whole sums.
        is_plain = self.num_replicas == place.world_size > 1
        is_plain = is_plain and not tf.config.get_visible_devices("GPU")
        self._launcher = launcher(OF_PARTS, place, "CPU") if is_plain else None
        self._all_gather = tf.function(self._gather_rows, reduce_retracing=True)

    # Models -------------------------------------------------------------------------------------

    def programs(self, model: tf.keras.Model) -> dict[str, Any]:
        """See ``Collective``. The bar shows this worker's results.

        Predictions of all workers are gathered once, in order, when the loop is over.
        """
        return keras.steps.reducing_nothing(model, self.strategy, self._own_rows)

    def own_results(self, model: tf.keras.Model) -> contextlib.AbstractContextManager[None]:
        is_one = self.num_replicas == self.num_processes
        return keras.losses.unmerged_results(model) if is_one else contextlib.nullcontext()

    def _own_rows(self, value: Any) -> tf.Tensor:
        return tf.concat(self.strategy.experimental_local_results(value), axis=0)

    # Inside a step ------------------------------------------------------------------------------

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        if self._launcher is None:
            return super().reduce_scatter(rows, name)
        return self._launcher.row_of_sum(rows)

    def all_gather(self, row: Any, name: str) -> Any:
        if self._launcher is None:
            return super().all_gather(row, name)
        return self._launcher.all_rows(row)

    # Between steps ------------------------------------------------------------------------------

    @property
    def steps_await_batches(self) -> bool:
        return self.num_replicas == self.num_processes

    @property
    def fetches_ahead(self) -> bool:
        return not self.steps_await_batches

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        if self.steps_await_batches:
            # TensorFlow's own wrapper asks all workers before each batch whether there is one more,
            # which takes milliseconds; here they have agreed on the number of steps before.
            return keras.steps.Batches(dataset_fn())
        return super().distribute(dataset_fn)

    def merge(self, values: list[Any]) -> list[Any]:
        return values  # They were read as the sum of all workers already.

    def _rows_of_all(self, rows: np.ndarray) -> list[np.ndarray]:
        sizes = self._all_gather(tf.constant([rows.size])).numpy()
        of_replicas = np.split(self._all_gather(tf.constant(rows)).numpy(), np.cumsum(sizes)[:-1])
        return of_replicas[:: self.num_replicas // self.num_processes]

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        def run(rows: tf.Tensor) -> tf.Tensor:
            # Made anew within the replica: a collective needs the device of what it sends.
            return tf.distribute.get_replica_context().all_gather(tf.identity(rows), axis=0)

        return self.strategy.experimental_local_results(self.strategy.run(run, args=(rows,)))[0]

    def broadcast(self, variables: Sequence[Any]) -> None:
        own = [self.strategy.experimental_local_results(v)[0].numpy() for v in variables]
        chiefs = self.gather(own if self.is_chief else None)[0]
        for variable, value in zip(variables, chiefs, strict=True):
            variable.assign(value)
