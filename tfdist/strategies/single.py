"""One device: plain Keras, and the reference of every other strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.strategies.base import ModelOrFn, Strategy, called, make_feed, save_atomically
from tfdist.topology import Topology
from tfdist.training.collective import Collective


class Alone(Collective):
    """One replica in one process: every reduction is the value itself."""

    num_replicas = 1
    num_processes = 1
    process = 0
    gradients_are_averaged = False

    def sum(self, tensor: Any, name: str) -> Any:
        return tensor

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], rows: Any
    ) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def finish_epoch(self, optimizer: Any) -> None:
        pass

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        return dataset_fn()

    def explain(self, error: Exception) -> Exception | None:
        return None

    def merge(self, values: list[Any]) -> list[Any]:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, variables: Sequence[Any]) -> None:
        pass


class Single(Strategy):
    """One device, one process.

    Args:
        lr_scaling: None; there is nothing to scale by, any rule leaves the rate as it is.
        warmup_epochs: epochs in which the learning rate climbs to its value.
    """

    name = "single"

    def __init__(self, *, lr_scaling: str | None = None, warmup_epochs: float = 0):
        from tfdist.training.scaling import Scaling

        self._scaling = Scaling(lr_scaling, warmup_epochs, num_replicas=1)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def topology(self) -> Topology:
        return Topology()

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def scaling(self) -> Any:
        return self._scaling

    @property
    def approximations(self) -> tuple[str, ...]:
        return ()

    def build(self, model_fn: ModelOrFn) -> Any:
        from tfdist.training.fit import install

        return install(
            called(model_fn),
            Alone(),
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
        )

    def from_chief(self, value: Any) -> Any:
        return value

    def save(self, model: Any, path: str | os.PathLike) -> None:
        save_atomically(model, path)
