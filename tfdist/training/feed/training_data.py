"""What ``strategy.dataset`` returns to train on, whichever the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

_Data = TypeVar("_Data", bound="TrainingData")


@runtime_checkable
class TrainingData(Protocol):
    """Data as ``fit`` of the same strategy reads it: a ``Feed`` of batches, or clients' records.

    Attributes:
        num_records: all there are.
        num_replicas: that share a global batch; of federated learning, clients in a round.
        global_batch_size: records of one step over all replicas.
        seed: of the order of records.
    """

    seed: int

    @property
    def num_records(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def global_batch_size(self) -> int: ...

    @property
    def records_per_epoch(self) -> int:
        """Records that an epoch computes on."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def callback_steps(self) -> int:
        """Times that callbacks are told of a step in an epoch."""

    @property
    def tail(self) -> int:
        """Rows of the uneven last batch; 0 when there is none."""

    def __len__(self) -> int:
        """Returns ``steps_per_epoch``."""

    def weighted_by_class(self: _Data, class_weight: Mapping[int, float] | None) -> _Data:
        """Returns the same data with a weight for each class: see ``Model.fit``."""

    def limited(self: _Data, steps: int) -> _Data:
        """Returns the first ``steps`` steps of an epoch, the last of them uneven."""

    def on_one_device(self) -> Any:
        """Returns what one device would train on: it has ``epochs(first, last)``."""
