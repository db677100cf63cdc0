"""One device: plain Keras, and the reference of every other strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.strategies.base import ModelOrFn, called
from tfdist.strategies.data_parallel import DataParallel
from tfdist.topology import Topology
from tfdist.training.collective import Collective, OneProcess


class Alone(OneProcess):
    """One replica in one process: every reduction is the value itself."""

    num_replicas = 1

    def sum(self, tensor: Any, name: str) -> Any:
        return tensor

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], rows: Any
    ) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        return dataset_fn()


class Single(DataParallel):
    """One device, one process.

    Args:
        lr_scaling: accepted as by the other strategies; one replica leaves the rate as it is.
        warmup_epochs: epochs in which the learning rate climbs to its value.
    """

    name = "single"

    def __init__(self, *, lr_scaling: str | None = None, warmup_epochs: float = 0):
        super().__init__(lr_scaling, warmup_epochs)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def topology(self) -> Topology:
        return Topology()

    @property
    def approximations(self) -> tuple[str, ...]:
        return ()

    def connect(self) -> Collective:
        return Alone()

    def make_model(self, model_fn: ModelOrFn) -> Any:
        return called(model_fn)
