"""Ranks that train alike have one learning rate and the same weights, which is looked at.

A callback that sets either on one rank alone would have the ranks part, and nobody be told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.binding import Binding
from tfdist.training.keras_api import rate_of_last_step, raw

# Of the sum of a weight's absolute values: another order of summation is 1e-6 of it, and more on
# processors of another kind. What one rank alone has set is far more.
_TOLERANCE = 1e-3


def state_of(binding: Binding) -> tuple[float | None, dict[str, float]]:
    """Returns the learning rate of the last step, and of each weight the sum of absolute values.

    Of those that are trained, where all ranks hold them whole; nothing on one rank.
    """
    if binding.collective.num_processes == 1:
        return None, {}
    rate = float(tf.convert_to_tensor(rate_of_last_step(binding.model.optimizer)))
    if binding.sharded is not None or binding.engine.weights is not None:
        return rate, {}
    weights = [raw(variable) for variable in binding.model.trainable_variables]
    return rate, {w.name: float(tf.reduce_sum(tf.abs(tf.cast(w, tf.float32)))) for w in weights}


def check(rates: Sequence[float | None], sums: Sequence[Mapping[str, float]], epoch: int) -> None:
    """Raises:
    ModelError: a rank has another learning rate than the first one, or another weight.

    Args:
        rates: of each rank in the last step; None: not known.
        sums: of each rank.
    """
    for rank, (rate, own) in enumerate(zip(rates, sums, strict=True)):
        is_known = rate is not None and rates[0] is not None
        if is_known and rate != rates[0] and not math.isnan(rate):
            raise _parted(f"learning_rate {rate} on rank {rank} and {rates[0]} on rank 0", epoch)
        for name, first in sums[0].items():
            here = own.get(name, first)
            largest = max(abs(first), abs(here))
            if math.isfinite(largest) and abs(first - here) > _TOLERANCE * largest:
                raise _parted(f"other values of weight '{name}' on rank {rank} than on 0", epoch)


def _parted(received: str, epoch: int) -> ModelError:
    return ModelError(
        "all ranks must train with one learning rate and the same weights",
        received=f"{received} after epoch {epoch + 1}",
        mend="Have a callback that sets them do so on all ranks, from metrics, which all see alike",
    )
