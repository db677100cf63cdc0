"""A ``fit`` of a model's own class, which tfdist calls where it calls that of Keras."""

from __future__ import annotations

import inspect

import tensorflow as tf

from tfdist.errors import ModelError


def check_own_fit(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the model's class has a fit that cannot be given batches.
    """
    try:
        inspect.signature(type(model).fit).bind(model, None, epochs=1)
    except TypeError as error:
        raise ModelError(
            "a fit of a model's own class must take what Keras' fit takes, since it is given "
            "batches of x and y together",
            received=f"{type(model).__name__}.fit, {error}",
            mend="Write fit(self, x=None, y=None, **options), or move what it does into a callback",
        ) from None


class EpochsAsTold(tf.keras.callbacks.Callback):
    """Ends a fit that goes on behind the epochs it was told, for which there are no batches.

    Args:
        epochs: the last one.
    """

    def __init__(self, epochs: int):
        super().__init__()
        self._epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Raises:
        ModelError: the epoch is one too many.
        """
        if epoch >= self._epochs:
            raise ModelError(
                "a fit of a model's own class must train for the epochs that it is told",
                received=f"{type(self.model).__name__}.fit, which begins epoch {epoch + 1} of "
                f"{self._epochs}",
                mend="Give model.fit the epochs, and change them nowhere else",
            )
