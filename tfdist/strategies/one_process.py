"""What the strategies share that divide one model, not batches, inside of one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tfdist.strategies.base import Strategy, save_atomically
from tfdist.topology import Topology
from tfdist.training.engine.options import check_precision

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.training.model.scaling import Scaling


class OneProcessStrategy(Strategy):
    """A strategy whose whole job is this process, so that there is nobody to agree with.

    Args:
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the replicas.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
        num_replicas: that share a global batch.
        precision: what the layers that model_fn makes compute in; see ``StepOptions``.
    """

    def __init__(
        self,
        lr_scaling: str | None,
        warmup_epochs: float,
        num_replicas: int,
        precision: str | None = None,
    ):
        from tfdist.training.model.scaling import Scaling

        check_precision(precision)
        self.precision = precision
        self._scaling = Scaling(lr_scaling, warmup_epochs, num_replicas=num_replicas)

    @property
    def topology(self) -> Topology:
        return Topology()

    @property
    def num_replicas(self) -> int:
        return self._scaling.num_replicas

    @property
    def scaling(self) -> Scaling:
        return self._scaling

    def from_chief(self, value: Any) -> Any:
        return value

    def save(self, model: tf.keras.Model, path: str | os.PathLike) -> None:
        save_atomically(model, path)
