"""What the shared training loop needs from an engine, and nothing more.

An engine joins by implementing ``Collective``; steps, metrics, checkpoints and ``fit`` are then
the same for all of them.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any


class Collective(abc.ABC):
    """The replicas that share one global batch, seen from one process."""

    #: Replicas that share a global batch, over all processes.
    num_replicas: int
    #: Processes in the job, and this one among them.
    num_processes: int
    process: int
    #: Speed of each process, by which they divide the batches of a fit; None: evenly.
    speeds: tuple[float, ...] | None = None
    #: Whether variables are read by all processes together, so that all write, and one file stays.
    reads_together: bool = False
    #: Whether steps take batches from the dataset itself, and not from what fetches them ahead.
    steps_await_batches: bool = False
    #: Whether TensorFlow fetches a batch for each replica onto devices, ahead of the steps.
    fetches_ahead: bool = False

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.process == 0

    @property
    def shares_batches(self) -> bool:
        """Whether each batch comes with the share that it is of a global one: ``Feed.shared``."""
        return self.num_replicas > 1

    @property
    def planned_replicas(self) -> int:
        """Replicas that the job was asked for: the learning rate's rule counts these."""
        return self.num_replicas

    def programs(self, model: Any) -> dict[str, Any]:
        """Returns what Keras' loops over ``model`` must call instead: name of a method -> that."""
        return {}

    def own_results(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Encloses what reads the results of metrics in a step: those of this process alone."""
        return contextlib.nullcontext()

    # Inside a step, on one replica --------------------------------------------------------------

    @abc.abstractmethod
    def sum(self, tensor: Any, name: str) -> Any:
        """Returns the sum of ``tensor`` over all replicas; differentiable.

        ``name`` is the same on all replicas, and no other sum of the step has it.
        """

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str = "gradient",
    ) -> None:
        """Reduces ``gradients`` over the replicas and lets ``optimizer`` update ``variables``.

        ``name`` is the same on all replicas, and no other call of the step has it.
        """
        reduced = self.reduced(gradients, variables, name)
        optimizer.apply_gradients(zip(reduced, variables, strict=True))

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """Returns ``gradients`` as ``apply`` reduces them: those of one replica as they are."""
        return list(gradients)

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        """Returns this replica's row of the gradients ``rows``, reduced as ``apply`` reduces.

        Args:
            rows: [num_replicas, elements], one for each replica.
            name: as of ``apply``.
        """
        raise NotImplementedError(type(self).__name__)

    def all_gather(self, row: Any, name: str) -> Any:
        """Returns the rows of all replicas, [num_replicas, elements].

        Args:
            row: [elements].
            name: as of ``apply``.
        """
        raise NotImplementedError(type(self).__name__)

    # Between steps, on one process --------------------------------------------------------------

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        """Returns what ``Model.fit`` iterates over: this process's part of each global batch."""
        return dataset_fn()

    def tell_waits(self, note: Callable[[float], None]) -> None:  # noqa: B027
        """Has ``note`` called with the seconds that each step waits for its batch, if known."""

    @abc.abstractmethod
    def explain(self, error: Exception) -> Exception | None:
        """Returns the error that a user can act on for one of the engine's, None if it is not."""

    @abc.abstractmethod
    def watched(self) -> contextlib.AbstractContextManager[list[Any]]:
        """Encloses a loop of Keras; gives the callbacks that watch its steps for a stall."""

    def waiting(self, place: str, more_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """Encloses, between the steps of a watched loop, what all processes do together.

        Args:
            place: what it is, for people.
            more_s: seconds that it may take beside what all such things may.
        """
        return contextlib.nullcontext()

    def apart(self, place: str, more_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """Encloses, on all processes, what each does in its own time, as the writing of a file.

        They go on together: what follows is enclosed by ``waiting`` with the same arguments.
        """
        # What a process does alone takes its time; where all read together, it may wait.
        return self.waiting(place, more_s) if self.reads_together else contextlib.nullcontext()

    @abc.abstractmethod
    def merge(self, values: list[Any]) -> list[Any]:
        """Returns the sums over processes of numpy arrays of equal shapes."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Returns one ``value`` for each process, in the order of ranks."""

    @abc.abstractmethod
    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives all processes the chief's values of ``variables``."""


class OneProcess(Collective):
    """Replicas that share one process: between steps there is nobody else."""

    num_processes = 1
    process = 0

    def explain(self, error: Exception) -> Exception | None:
        return None

    def watched(self) -> contextlib.AbstractContextManager[list[Any]]:
        return contextlib.nullcontext([])

    def merge(self, values: list[Any]) -> list[Any]:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, variables: Sequence[Any]) -> None:
        pass
