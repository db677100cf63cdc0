"""Ranks that train alike have one learning rate and the same weights, which is looked at.

A callback that sets either on one rank alone would have the ranks part, and nobody be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.rates import rate_of_last_step
from tfdist.keras.tensors import raw
from tfdist.training.engine.binding import Binding

# Of the sum of a weight's absolute values: another order of summation is 1e-6 of it, and more on
# processors of another kind. What one rank alone has set is far more.
_TOLERANCE = 1e-3
# Of a learning rate, which a schedule may round otherwise on another processor.
_ROUNDED = 1e-6

#: Of each weight, whose names may be alike, its name and the sum of its absolute values.
Sums = Sequence[tuple[str, float]]


def state_of(binding: Binding) -> tuple[float | None, Sums]:
    """Returns the learning rate of the last step, and of each weight the sum of absolute values.

    Of those that are trained, where all ranks hold them whole; nothing on one rank.
    """
    if binding.collective.num_processes == 1:
        return None, ()
    rate = rate_of_last_step(binding.model.optimizer)
    rate = None if rate is None else float(tf.convert_to_tensor(rate))
    if binding.sharded is not None or binding.engine.weights is not None:
        return rate, ()
    weights = [raw(variable) for variable in binding.model.trainable_variables]
    return rate, [(w.name, float(tf.reduce_sum(tf.abs(tf.cast(w, tf.float32))))) for w in weights]


def check(rates: Sequence[float | None], sums: Sequence[Sums], epoch: int) -> None:
    """Raises:
    ModelError: a rank has another learning rate than the first one, or another weight.

    Args:
        rates: of each rank in the last step; None: not known.
        sums: of each rank.
    """
    for rank, (rate, own) in enumerate(zip(rates, sums, strict=True)):
        if None not in (rate, rates[0]) and not _is_close(rate, rates[0], _ROUNDED):
            raise _parted(f"learning_rate {rate} on rank {rank} and {rates[0]} on rank 0", epoch)
        for (name, first), (_, here) in zip(sums[0], own, strict=False):
            if not _is_close(first, here, _TOLERANCE):
                raise _parted(f"other values of weight '{name}' on rank {rank} than on 0", epoch)


def _is_close(one: float, other: float, most: float) -> bool:
    """Whether they differ by less than a part of them; what is no number is told of elsewhere."""
    return not math.isfinite(one + other) or math.isclose(one, other, rel_tol=most)


def _parted(received: str, epoch: int) -> ModelError:
    return ModelError(
        "all ranks must train with one learning rate and the same weights",
        received=f"{received} after epoch {epoch + 1}",
        mend="Have a callback that sets them do so on all ranks, from metrics, which all see alike",
    )
