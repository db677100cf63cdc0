"""What the strategies share that divide one model among the devices of a process.

One process is their whole job, or each rank of another strategy holds such a model: ``replicas``.
The ranks then share global batches, as those of that strategy do.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist import topology
from tfdist.errors import OptionError
from tfdist.strategies.base import Strategy
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.horovod.strategy import Horovod
from tfdist.strategies.multi_worker.strategy import MultiWorker
from tfdist.strategies.single import Single
from tfdist.strategies.spec import REPLICAS, check_replicas
from tfdist.topology import Topology
from tfdist.training.engine.options import check_precision

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.training.engine.collective import Collective


_RANKS: dict[str, type[Horovod | MultiWorker]] = {
    kind.name: kind for kind in (Horovod, MultiWorker)
}
assert tuple(_RANKS) == REPLICAS, "spec.py names them for those that import no engine"


@dataclass(frozen=True)
class Place:
    """Where a rank has its model.

    Attributes:
        host: its name.
        rank: 0 where one process is all.
        devices: of the process, in the order of the model's parts.
    """

    host: str
    rank: int
    devices: tuple[str, ...]


class ModelParallel(Strategy):
    """A strategy that divides one model inside of a process, or of each rank.

    Args:
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the replicas.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
        shares_of_each: parts that a process divides its rows into.
        replicas: the strategy of which each rank holds a model; None: one process is all.
        precision: what the layers that model_fn makes compute in; see ``DataParallel``.
    """

    def __init__(
        self,
        lr_scaling: str | None,
        warmup_epochs: float,
        *,
        shares_of_each: int = 1,
        replicas: str | None = None,
        precision: str | None = None,
    ):
        check_precision(precision)
        check_replicas(replicas)
        self._take_scaling(lr_scaling, warmup_epochs)
        self.precision = precision
        self._shares_of_each = shares_of_each
        self._replicas = _RANKS[replicas]() if replicas is not None else None
        #: Those of all ranks; empty before ``start``.
        self._places: tuple[Place, ...] = ()

    def _start_ranks(self, num_devices: int) -> None:
        """Meets the other ranks, before TensorFlow is first used.

        Args:
            num_devices: that each rank needs.

        Raises:
            OptionError: ranks may be lost.
        """
        if self._replicas is None:
            return
        if topology.current().elastic_workers is not None:
            raise OptionError(
                "an elastic job must have strategy horovod alone, whose ranks hold whole models",
                received=f"strategy '{self.name}' with replicas='{self._replicas.name}'",
                mend="Start it without --min-workers; --max-restarts starts all again when a "
                "process is lost",
            )
        self._replicas.start_ranks(num_devices)

    def _join_ranks(self, devices: tuple[str, ...]) -> None:
        """Connects the ranks, and learns where they have their models; all call it together.

        Args:
            devices: of this process, which are made by now.
        """
        if self._replicas is not None:
            self._replicas.join_ranks()
        place = Place(socket.gethostname(), self.topology.rank, devices)
        self._places = tuple(self.connect().gather(place))

    @property
    def _ranks(self) -> DataParallel:
        return self._replicas or Single()

    def connect(self) -> Collective:
        """Returns the ranks, for one model; can be called from ``start`` on."""
        return self._ranks.connect()

    def _share(self) -> dict[str, Any]:
        ranks = self.connect()
        return {"parts": ranks.num_processes, "part": ranks.process, "gather": ranks.gather}

    @property
    def topology(self) -> Topology:
        return self._ranks.topology

    @property
    def num_replicas(self) -> int:
        return self._shares_of_each * self._ranks.num_replicas

    def from_chief(self, value: Any) -> Any:
        return self._ranks.from_chief(value)

    def save(self, model: tf.keras.Model, path: str | os.PathLike) -> None:
        self._ranks.save(model, path)
