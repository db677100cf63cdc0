"""One device: plain Keras, and the reference of every other strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.spec import Spec
from tfdist.training.engine.collective import Collective, OneProcess


class Alone(OneProcess):
    """One replica in one process: every reduction is the value itself."""

    num_replicas = 1
    steps_await_batches = True

    def sum(self, tensor: Any, name: str) -> Any:
        return tensor

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        return rows[0]

    def all_gather(self, row: Any, name: str) -> Any:
        return row[None]


SPEC = Spec(
    name="single",
    path="tfdist.strategies.single:Single",
    summary="one device; what all others must equal",
    takes_keras_3=True,
    engine="tensorflow",
)


class Single(DataParallel):
    """One device, one process.

    Args:
        shared: the options of all data-parallel strategies; see ``DataParallel``. There is no
            other replica to scale the learning rate by, or to synchronize BatchNormalization with.
    """

    name = "single"
    slots_can_be_offloaded = True

    def __init__(self, **shared: Any):
        super().__init__(**shared)

    @property
    def approximations(self) -> tuple[str, ...]:
        return replace(self._step, sync_batch_norm=True).approximations

    def connect(self) -> Collective:
        return Alone()
