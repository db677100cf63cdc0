"""BatchNormalization in a pipeline: statistics of the whole batch, or of each microbatch.

With those of the whole batch each such layer stands in a chunk that takes the batch whole, so it is
called as on one device; where ranks share a batch, the sums of all of them are added up. This is
about both, about layers of microbatches, and about forward passes that run once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.keras import step_context
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import batch_norm, batch_statistics


def of_part(*, is_real: Any, moves: bool) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass in training that is not the only one of its batch.

    Args:
        is_real: bool, False when the microbatch is padding.
        moves: whether layers move their moving statistics; a forward pass that is computed once
            more must not.
    """
    return step_context.within(norms=_Part(is_real, moves))


@dataclass(frozen=True)
class _Part:
    """See ``of_part``."""

    is_real: Any
    moves: bool

    def normalized(self, norm: batch_norm.Norm, inputs: tf.Tensor) -> tf.Tensor:
        own = batch_statistics.local_sums(norm.layer, inputs)
        output = batch_statistics.normalized(norm.layer, inputs, own)

        def move() -> bool:
            batch_statistics.move_statistics(norm.layer, own)
            return True

        if self.moves:  # Last: sums and output are around the moving mean.
            tf.cond(tf.convert_to_tensor(self.is_real), move, lambda: False)
        return output


class OverRanks:
    """The BatchNormalizations of a chunk that takes whole batches, which ranks share.

    Args:
        number: of the chunk, the same on all ranks.
    """

    def __init__(self, number: int):
        self._number = number
        self._statistics = batch_norm.Repeatable()

    @contextlib.contextmanager
    def first(self, is_real: Any) -> Iterator[None]:
        """Encloses the forward pass of a step; ``is_real``: as for ``of_part``."""
        step = batch_norm.shared_step(is_real=is_real, microbatch=self._number)
        with step, self._statistics.first():
            yield

    def again(self) -> contextlib.AbstractContextManager:
        """Returns what encloses the same pass, computed once more."""
        return self._statistics.again()


def put_on(binding: Binding) -> None:
    """Lets every BatchNormalization of a model follow ``of_part``, or ``OverRanks``."""
    if binding.collective.shares_batches:
        batch_norm.put_on(binding, synchronized=True)
        return
    for layer in batch_norm.layers_of(binding.model):
        batch_norm.follow(binding, layer, synchronized=True)
