"""What a step tells the layers, losses, metrics and optimizers that Keras calls in it.

Keras hands them data alone, so the rest stands here while the step is traced, or runs eagerly. It
belongs to a thread: replicas of one process run in threads of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The step that this thread is in; all are empty outside of one.

    Attributes:
        part: of the global batch that the step has, float []: what a metric counts one number as.
            Losses are means of the step's own rows then, whatever replicas there are, and metrics
            give this process's results, not those of all.
        own_step: the user's own step, a ``replica_step.RunningStep``.
        norms: how BatchNormalization normalizes: a forward pass over replicas, of ``batch_norm``,
            or one of a microbatch, of ``strategies.pipeline.functions``.
        repeatable: seed and microbatch of a forward pass that may run again, of ``recompute``.
        draws: seed and count of the random numbers drawn, of ``randomness``.
        seeds: what draws a seed in Keras 3 -> the one that a layer gets: see ``keras.layers``.
        gathered: whole weights of the block that runs, of ``weight_blocks``.
    """

    part: Any = None
    own_step: Any = None
    norms: Any = None
    repeatable: Any = None
    draws: Any = None
    seeds: Callable[[Callable[[], Any]], Any] | None = None
    gathered: Any = None


_NOWHERE = StepContext()
_of_thread = threading.local()


def current() -> StepContext:
    """Returns what holds in this thread."""
    return getattr(_of_thread, "context", _NOWHERE)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Encloses a part of a step; ``changes`` are fields of ``StepContext``."""
    before = current()
    _of_thread.context = replace(before, **changes)
    try:
        yield
    finally:
        _of_thread.context = before
