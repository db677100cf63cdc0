"""Mixed precision: layers compute in 16 bits, weights and sums stay in 32.

Micikevicius et al. 2018, arXiv:1710.03740; Keras' policies, its optimizer with a loss scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import layers_in
from tfdist.keras.settings import set_policy


@contextlib.contextmanager
def policy(precision: str | None) -> Iterator[None]:
    """Encloses the making of a model, whose layers then compute in ``precision``.

    None leaves Keras' own policy.
    """
    if precision is None:
        yield
        return
    before = tf.keras.mixed_precision.global_policy()
    set_policy(precision)
    try:
        yield
    finally:
        # A policy that was not set follows floatx.
        set_policy(None if before.name == tf.keras.backend.floatx() else before)


def check_follows(model: tf.keras.Model, precision: str | None) -> None:
    """Raises:
    ModelError: no layer of ``model`` computes in ``precision``: it was made before, or chooses
        the types of its layers itself.
    """
    if precision is None:
        return
    layers = [e for e in layers_in(model) if e.weights and not isinstance(e, tf.keras.Model)]
    found = sorted({layer.dtype_policy.name for layer in layers})
    if layers and precision not in found:
        raise ModelError(
            "precision must be chosen for a function that makes the model's layers",
            received=f"precision={precision!r} and model '{model.name}', whose layers compute in "
            f"{', '.join(found)}",
            mend="Give a function that makes the model, with layers that choose no dtype, or "
            "leave precision out",
        )


def in_full(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a loss in at least 32 bits: bfloat16 cannot even count the rows of a batch."""
    return tf.cast(tensor, full_type(tensor.dtype))


def full_type(dtype: tf.DType) -> tf.DType:
    return tf.float64 if dtype == tf.float64 else tf.float32
