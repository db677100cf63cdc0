"""Several devices of one machine in one process: ``tf.distribute.MirroredStrategy``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.errors import OptionError
from tfdist.strategies.base import ModelOrFn, Strategy, called, clone, make_feed, save_atomically
from tfdist.topology import Topology
from tfdist.training.collective import Collective

_DEFAULT_LOGICAL_CPUS = 2


def choose_devices(gpus: Sequence[str], devices: int | None, option: str = "devices") -> list[str]:
    """Returns the devices to train on: GPUs where there are any, logical CPUs otherwise.

    Args:
        gpus: names of the visible GPUs, such as "GPU:0".
        devices: how many are wanted; None takes all GPUs, or two logical CPUs.
        option: what the user calls that number.

    Raises:
        OptionError: fewer than one device, or more than there are GPUs.
    """
    if devices is not None and (not isinstance(devices, int) or devices < 1):
        raise OptionError(f"{option} must be a whole number of at least 1", received=repr(devices))
    if not gpus:
        return [f"CPU:{i}" for i in range(devices or _DEFAULT_LOGICAL_CPUS)]
    if devices is not None and devices > len(gpus):
        raise OptionError(
            f"{option} can be at most the number of visible GPUs",
            received=f"{option}={devices} with {len(gpus)} GPUs",
            mend=f"Choose {option}={len(gpus)} or fewer, or hide the GPUs: CUDA_VISIBLE_DEVICES=-1",
        )
    return list(gpus[:devices])


class _Mirrors(Collective):
    """The replicas of a MirroredStrategy, in one process."""

    num_processes = 1
    process = 0
    gradients_are_averaged = False  # Keras divides the loss, and the optimizer adds gradients up.

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync

    def sum(self, tensor: Any, name: str) -> Any:
        import tensorflow as tf

        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], rows: Any
    ) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def finish_epoch(self, optimizer: Any) -> None:
        pass

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        # One element for each replica in turn: the feed has divided the global batch already.
        return self._strategy.distribute_datasets_from_function(lambda _: dataset_fn())

    def explain(self, error: Exception) -> Exception | None:
        return None

    def merge(self, values: list[Any]) -> list[Any]:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, variables: Sequence[Any]) -> None:
        pass


class Mirrored(Strategy):
    """All GPUs of this machine, or logical CPUs where there is none, in one process.

    Args:
        devices: how many devices; None takes all GPUs, or two logical CPUs.
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) ``devices``.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
    """

    name = "mirrored"

    def __init__(
        self,
        *,
        devices: int | None = None,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
    ):
        from tfdist.training.scaling import Scaling

        choose_devices([], devices)
        Scaling(lr_scaling, warmup_epochs, num_replicas=1)
        self._devices = devices
        self._lr_scaling = lr_scaling
        self._warmup_epochs = warmup_epochs
        self._strategy: Any = None

    def start(self) -> None:
        import tensorflow as tf

        gpus = [f"GPU:{i}" for i, _ in enumerate(tf.config.list_physical_devices("GPU"))]
        devices = choose_devices(gpus, self._devices)
        if gpus:
            self._strategy = tf.distribute.MirroredStrategy(devices)
            return
        make_logical_cpus(len(devices))
        # Collectives on CPUs abort when a process makes a second strategy; a plain sum does not.
        self._strategy = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
        )

    def close(self) -> None:
        self._strategy = None

    @property
    def topology(self) -> Topology:
        return Topology()

    @property
    def num_replicas(self) -> int:
        assert self._strategy is not None, "start() comes first"
        return self._strategy.num_replicas_in_sync

    @property
    def scaling(self) -> Any:
        from tfdist.training.scaling import Scaling

        return Scaling(self._lr_scaling, self._warmup_epochs, self.num_replicas)

    @property
    def approximations(self) -> tuple[str, ...]:
        return ()

    def build(self, model_fn: ModelOrFn) -> Any:
        import tensorflow as tf

        from tfdist.training.fit import install

        with self._strategy.scope():
            model = called(model_fn)
            if isinstance(model_fn, tf.keras.Model):
                model = clone(model)
        return install(
            model,
            _Mirrors(self._strategy),
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
            splits=self.num_replicas,
        )

    def from_chief(self, value: Any) -> Any:
        return value

    def save(self, model: Any, path: str | os.PathLike) -> None:
        save_atomically(model, path)


def make_logical_cpus(count: int) -> None:
    """Divides the CPU into ``count`` logical devices.

    Raises:
        OptionError: TensorFlow was used already, with fewer of them.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:  # TensorFlow has made its devices already.
        have = len(tf.config.list_logical_devices("CPU"))
        if have < count:
            raise OptionError(
                f"{count} logical CPUs must be made before TensorFlow is first used",
                received=f"a process that has {have} already",
                mend="Enter the strategy at the start of the program",
            ) from error
