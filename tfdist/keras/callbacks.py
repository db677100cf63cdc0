"""What Keras' own callbacks do at an epoch's end, where a fit of tfdist has it done otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.version import IS_KERAS_3

#: Callbacks of Keras 3 that exchange weights and their averages -> what says where these are.
EXCHANGES = (
    {tf.keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",)}
    if IS_KERAS_3 and hasattr(tf.keras.callbacks, "SwapEMAWeights")
    else {}
)


def never_at_last_epoch(callbacks: Sequence[Any], params: dict[str, Any]) -> None:
    """Has those that exchange weights and averages give up the weights at no epoch's end, where a
    checkpoint is to have both: see ``keep_averages``.

    Args:
        params: of all callbacks.
    """
    for callback in callbacks:
        if isinstance(callback, tuple(EXCHANGES)):
            callback.set_params(params | {"epochs": 0})


def keep_averages(callbacks: Sequence[Any]) -> None:
    """Has averages that callbacks have put in the place of weights stay there, when a fit has
    trained all epochs: as their end of the last one does, for ``optimizers.finalize`` to find."""
    for callback in callbacks:
        exchanges = isinstance(callback, tuple(EXCHANGES)) and callback.swap_on_epoch
        if exchanges and callback._ema_weights_in_model:
            callback._finalize_ema_values()


def note_best(saver: tf.keras.callbacks.ModelCheckpoint, logs: Mapping[str, Any] | None) -> None:
    """Has one that saves the best epoch alone know of an epoch that another process may save."""
    value = (logs or {}).get(saver.monitor)
    if not saver.save_best_only or saver.save_freq != "epoch" or value is None:
        return
    if IS_KERAS_3 and saver.monitor_op is None:
        saver._set_monitor_op()
    if saver.best is None or saver.monitor_op(value, saver.best):
        saver.best = value
