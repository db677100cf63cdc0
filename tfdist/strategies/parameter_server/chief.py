"""Parameter servers as the ``Collective`` of the chief's process, which is alone in its program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.strategies.parameter_server.steps import AsynchronousSteps
from tfdist.training.engine.collective import Collective


class Servers(Collective):
    """One model's steps: each global batch goes to one worker, so nothing in a step is shared."""

    num_replicas = 1
    num_processes = 1
    process = 0

    def __init__(self, steps: AsynchronousSteps):
        self._steps = steps

    def sum(self, tensor: Any, name: str) -> Any:
        raise AssertionError("a step of one replica has nothing to sum")

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str = "gradient",
    ) -> None:
        raise AssertionError("workers take Keras' own steps")

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        return dataset_fn()

    def tell_waits(self, note: Callable[[float], None]) -> None:
        self._steps.note_wait = note

    def explain(self, error: Exception) -> Exception | None:
        return None  # The steps explain theirs themselves.

    def watched(self) -> contextlib.AbstractContextManager[list[Any]]:
        return contextlib.nullcontext([])  # They watch themselves, too.

    def merge(self, values: list[Any]) -> list[Any]:
        return self._steps.metric_state(values)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, variables: Sequence[Any]) -> None:
        pass
