"""One process for each GPU or core, over MPI or Gloo: Horovod.

Sergeev and Del Balso 2018, arXiv:1802.05799.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from tfdist import topology
from tfdist.errors import EngineMissingError, LaunchError, OptionError, unknown_choice
from tfdist.strategies.base import ModelOrFn, Strategy, called, make_feed, save_atomically
from tfdist.topology import Topology

_OPS = ("average", "adasum")
_COMPRESSIONS = ("none", "fp16")


def choose_gpu(gpus: Sequence[str], local_rank: int) -> str | None:
    """Returns the GPU that a rank pins, None where there is none.

    Raises:
        OptionError: there are GPUs, but fewer than ranks on this host.
    """
    if not gpus:
        return None
    if local_rank >= len(gpus):
        raise OptionError(
            "each rank of a host needs a GPU of its own",
            received=f"local rank {local_rank} with {len(gpus)} visible GPUs",
            mend=f"Start at most {len(gpus)} workers on this host, or hide the GPUs: "
            "CUDA_VISIBLE_DEVICES=-1",
        )
    return gpus[local_rank]


def choose_threads(available_cores: int, bound: bool, local_size: int) -> int:
    """Returns how many threads a rank computes with, so that ranks of a host do not fight.

    Args:
        available_cores: cores that this process may run on.
        bound: whether the launcher gave them to this rank alone.
        local_size: ranks on this host.
    """
    return max(1, available_cores if bound else available_cores // local_size)


class Horovod(Strategy):
    """One rank for each GPU or core; gradients are averaged by ring all-reduce.

    Args:
        op: "average", or "adasum" (Maleki et al. 2020, arXiv:2006.02924), which is not exact.
        compression: "none", or "fp16": gradients travel as float16, which is not exact.
        backward_passes_per_step: batches whose gradients are averaged before one update.
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the ranks.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
        stall_timeout_s: seconds that a rank waits for the others before the job ends in an error.
        threads: threads that a rank computes with; None divides the cores among a host's ranks.
    """

    name = "horovod"

    def __init__(
        self,
        *,
        op: str = "average",
        compression: str = "none",
        backward_passes_per_step: int = 1,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
        stall_timeout_s: float = 120,
        threads: int | None = None,
    ):
        from tfdist.training.scaling import Scaling

        if op not in _OPS:
            raise unknown_choice("op", op, _OPS)
        if compression not in _COMPRESSIONS:
            raise unknown_choice("compression", compression, _COMPRESSIONS)
        for option, value in (
            ("backward_passes_per_step", backward_passes_per_step),
            ("stall_timeout_s", stall_timeout_s),
            ("threads", threads if threads is not None else 1),
        ):
            if not isinstance(value, (int, float)) or value < 1:
                raise OptionError(f"{option} must be at least 1", received=repr(value))
        Scaling(lr_scaling, warmup_epochs, num_replicas=1)
        self._op = op
        self._compression = compression
        self._passes = backward_passes_per_step
        self._lr_scaling = lr_scaling
        self._warmup_epochs = warmup_epochs
        self._stall_timeout_s = stall_timeout_s
        self._threads = threads
        self._hvd: Any = None

    def start(self) -> None:
        place = topology.current()
        _prepare_environment(os.environ, place, self._stall_timeout_s)
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise EngineMissingError(
                "strategy 'horovod' needs the package horovod, built for this TensorFlow",
                received=str(error).splitlines()[0],
                mend="Run make setup, or pip install tfdist[horovod]",
            ) from error
        hvd.init()
        self._hvd = hvd
        self._take_devices(place)

    def _take_devices(self, place: Topology) -> None:
        import tensorflow as tf

        try:
            gpus = tf.config.list_physical_devices("GPU")
            mine = choose_gpu([gpu.name for gpu in gpus], place.local_rank)
            if mine is not None:
                pinned = next(gpu for gpu in gpus if gpu.name == mine)
                tf.config.set_visible_devices(pinned, "GPU")
                tf.config.experimental.set_memory_growth(pinned, True)
            cores = len(os.sched_getaffinity(0))
            bound = cores < (os.cpu_count() or 1)
            threads = self._threads or choose_threads(cores, bound, place.local_size)
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(max(1, min(2, threads)))
        except RuntimeError as error:
            raise OptionError(
                "strategy 'horovod' takes its GPU and threads before TensorFlow is first used",
                received=str(error).splitlines()[0],
                mend="Enter the strategy at the start of the program",
            ) from error

    def close(self) -> None:
        """Leaves Horovod running: a process can start it once, and it ends with the process."""

    @property
    def topology(self) -> Topology:
        return topology.current()

    @property
    def num_replicas(self) -> int:
        assert self._hvd is not None, "start() comes first"
        return self._hvd.size()

    @property
    def scaling(self) -> Any:
        from tfdist.training.scaling import Scaling

        return Scaling(self._lr_scaling, self._warmup_epochs, self.num_replicas)

    @property
    def approximations(self) -> tuple[str, ...]:
        found = []
        if self._op == "adasum":
            found.append("op='adasum' is not the mean of the gradients")
        if self._compression == "fp16":
            found.append("compression='fp16' rounds gradients to float16")
        if self._passes > 1:
            found.append(f"backward_passes_per_step={self._passes} updates less often")
        return tuple(found)

    def build(self, model_fn: ModelOrFn) -> Any:
        from tfdist.strategies.horovod_ring import Ring
        from tfdist.training.fit import install

        return install(
            called(model_fn),
            Ring(self._hvd, self._op, self._compression, self._passes),
            scaling=self.scaling,
            strategy_name=self.name,
            dataset=self.dataset,
        )

    def dataset(
        self,
        source: Any,
        *,
        global_batch_size: int,
        training: bool = True,
        seed: int = 0,
        map_fn: Callable | None = None,
    ) -> Any:
        return make_feed(
            source,
            global_batch_size=global_batch_size,
            training=training,
            seed=seed,
            map_fn=map_fn,
            parts=self.num_replicas,
            part=self._hvd.rank(),
        )

    def from_chief(self, value: Any) -> Any:
        if self.num_replicas == 1:
            return value
        # Not broadcast_object: its chief returns before the others have come.
        return self._hvd.allgather_object(value, name="tfdist.from_chief")[0]

    def save(self, model: Any, path: str | os.PathLike) -> None:
        problem = None
        if self._hvd.rank() == 0:
            try:
                save_atomically(model, path)
            except Exception as error:
                problem = error
        # No rank returns before the file is there, and none waits for a file that does not come.
        reason = self.from_chief(None if problem is None else str(problem).splitlines()[0])
        if problem is not None:
            raise problem
        if reason is not None:
            raise LaunchError("rank 0 must save the model", received=reason)


def _prepare_environment(
    environ: MutableMapping[str, str], place: Topology, stall_timeout_s: float
) -> None:
    """Sets what Horovod reads when it starts; what the user has set stays."""
    stall = max(1, int(stall_timeout_s))
    environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, stall // 2)))
    environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(stall))
    if place.launcher == "none":  # One process without a launcher: MPI could not start.
        environ.setdefault("HOROVOD_CONTROLLER", "gloo")
        environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
