"""Several devices of one machine in one process: ``tf.distribute.MirroredStrategy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.errors import OptionError
from tfdist.strategies.base import ModelOrFn, made_here
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.spec import Spec
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.options import check_count

_DEFAULT_LOGICAL_CPUS = 2
#: TensorFlow makes threads and memory for each.
_MOST_LOGICAL_CPUS = 256


def choose_devices(gpus: Sequence[str], devices: int | None, option: str = "devices") -> list[str]:
    """Returns the devices to train on: GPUs where there are any, logical CPUs otherwise.

    Args:
        gpus: names of the visible GPUs, such as "GPU:0".
        devices: how many are wanted; None takes all GPUs, or two logical CPUs.
        option: what the user calls that number.

    Raises:
        OptionError: fewer than one device, more than there are GPUs, or more logical CPUs than a
            machine holds.
    """
    if devices is not None:
        check_count(option, devices)
    if not gpus:
        if devices is not None and devices > _MOST_LOGICAL_CPUS:
            raise OptionError(
                f"{option} must be at most {_MOST_LOGICAL_CPUS} where no GPU is visible",
                received=f"{option}={devices}",
                mend="Logical CPUs share the cores of this machine: choose about as many",
            )
        return [f"CPU:{i}" for i in range(devices or _DEFAULT_LOGICAL_CPUS)]
    if devices is not None and devices > len(gpus):
        raise OptionError(
            f"{option} must be at most the number of visible GPUs",
            received=f"{option}={devices} with {len(gpus)} GPUs",
            mend=f"Choose {option}={len(gpus)} or fewer, or hide the GPUs: CUDA_VISIBLE_DEVICES=-1",
        )
    return list(gpus[:devices])


SPEC = Spec(
    name="mirrored",
    path="tfdist.strategies.mirrored:Mirrored",
    summary="all GPUs of one machine (or logical CPUs), in one process",
    takes_keras_3=True,
    engine="mirrored",
    example={"devices": 2},
)


class Mirrored(DataParallel):
    """All GPUs of this machine, or logical CPUs where there is none, in one process.

    Args:
        devices: how many devices; None takes all GPUs, or two logical CPUs.
        shared: the options of all data-parallel strategies; see ``DataParallel``.
    """

    name = "mirrored"

    def __init__(self, *, devices: int | None = None, **shared: Any):
        super().__init__(**shared)
        choose_devices([], devices)
        self._devices = devices
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

    def connect(self) -> Collective:
        from tfdist.strategies.replica_sum import Mirrors

        return Mirrors(self._entered(self._strategy))

    def make_model(self, model_fn: ModelOrFn) -> Any:
        with self._entered(self._strategy).scope():
            return made_here(model_fn, may_be_unbuilt=True)


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
        # Not all logical devices: a cluster's TensorFlow knows those of the other processes, too.
        have = len(tf.config.get_logical_device_configuration(cpu) or [None])
        if have < count:
            raise OptionError(
                f"{count} logical CPUs must be made before TensorFlow is first used",
                received=f"a process that has {have} already",
                mend="Enter the strategy at the start of the program",
            ) from error
