"""What callbacks of Keras and tfdist remember, so that a resumed fit decides as an unbroken one."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CheckpointError
from tfdist.keras.callbacks import EXCHANGES, keep_averages
from tfdist.keras.optimizers import finalize
from tfdist.training.checkpoints.best_model import BestModel


class GrowingBatch(tf.keras.callbacks.Callback):
    """A callback that gives each epoch a global batch of its own, as a fit and checkpoints know it.

    Attributes:
        grows: whether it chooses; False leaves each epoch as the data was given.
        first_batch: as the data was given; None before a fit.
        batch: of the epoch that runs or comes.
        gain: what the learning rate is multiplied by for it.
    """

    grows = False
    first_batch: int | None = None
    batch: int | None = None
    gain: float | None = None

    def forget(self) -> None:
        """Has the next fit begin with the batch that its data is given with."""
        self.first_batch = self.batch = self.gain = None


def growing_among(callbacks: Sequence[Any]) -> GrowingBatch | None:
    """Returns the one of ``callbacks`` that chooses batches; None where none does."""
    return next((c for c in callbacks if isinstance(c, GrowingBatch) and c.grows), None)


# Numbers, and lists of arrays. Callbacks of a user's own are not looked into.
_REMEMBERED = {
    tf.keras.callbacks.EarlyStopping: (
        "wait",
        "best",
        "best_epoch",
        "stopped_epoch",
        "best_weights",
    ),
    tf.keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    tf.keras.callbacks.ModelCheckpoint: (
        "best",
        "epochs_since_last_save",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    BestModel: ("best", "best_epoch"),
    GrowingBatch: ("first_batch", "batch", "gain"),
    **EXCHANGES,
}


def written(callbacks: Sequence[Any]) -> bytes:
    """Returns what ``callbacks`` remember, as the bytes of a NumPy archive."""
    arrays = {}
    for key, callback, attribute in _places(callbacks):
        value = getattr(callback, attribute, None)
        if isinstance(value, list):
            arrays |= {f"{key}.{index}": _plain(array) for index, array in enumerate(value)}
        elif value is not None:
            arrays[key] = np.asarray(value)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def restore(callbacks: Sequence[Any], state: bytes) -> None:
    """Gives ``callbacks`` what those of the same classes, in the same order, remembered."""
    arrays = _read(state)
    for key, callback, attribute in _places(callbacks):
        if key in arrays:
            setattr(callback, attribute, arrays[key].item())
        elif parts := [name for name in arrays if name.startswith(f"{key}.")]:
            values = [arrays[f"{key}.{part}"] for part in range(len(parts))]
            if any(value is None for value in values):
                print(
                    f"tfdist: warning: {attribute} of {type(callback).__name__} were written by an "
                    "earlier version in a way that is not read: they begin anew",
                    flush=True,
                )
            else:
                setattr(callback, attribute, values)


def leave_as_ended(callbacks: Sequence[Any], model: tf.keras.Model, *, is_whole: bool) -> None:
    """Makes ``model`` what a fit that is over leaves, where nothing is left to train.

    Weights become their averages when a fit ends, and EarlyStopping puts the best ones back: after
    its last checkpoint.

    Args:
        is_whole: whether it had all its epochs.
    """
    if is_whole:
        keep_averages(callbacks)
    finalize(model)
    for callback in callbacks:
        if isinstance(callback, tf.keras.callbacks.EarlyStopping):
            callback.set_model(model)
            callback.on_train_end()


def restore_begun(callbacks: Sequence[Any], state: bytes) -> None:
    """Does as ``restore`` when a fit has begun: one that chooses batches was given its own before,
    and may have changed them."""
    restore([c for c in callbacks if not isinstance(c, GrowingBatch)], state)


def check_batch(callbacks: Sequence[Any], state: bytes) -> None:
    """Raises CheckpointError where the batch had grown, and none of ``callbacks`` knows of it."""
    if not state or growing_among(callbacks) is not None:
        return
    saved = GrowingBatch()
    saved.grows = True
    restore([saved], state)
    if saved.batch != saved.first_batch:
        raise CheckpointError(
            "a fit whose global batch has grown must be resumed with NoiseScale(apply=True)",
            received=f"none, where the batch had come from {saved.first_batch} to {saved.batch}",
            mend="Give it again, or train from the start in another folder",
        )


def check(state: bytes) -> None:
    """Raises whatever shows that ``state`` is not what ``written`` returned."""
    if state:
        _read(state)


def has_stopped(callbacks: Sequence[Any], state: bytes) -> bool:
    """Whether one of ``callbacks`` ended the training that ``state`` is of."""
    if not state:
        return False
    with _opened(state) as archive:  # Not all of it: it may hold weights.
        return any(
            attribute == "stopped_epoch" and key in archive and archive[key] > 0
            for key, _, attribute in _places(callbacks)
        )


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array that is written without pickle: the words of a lookup layer are objects, and
    bfloat16 is a type that NumPy reads back as bytes."""
    if array.dtype.hasobject:
        return array.astype(np.bytes_)
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array


def _read(state: bytes) -> dict[str, Any]:
    """Returns the arrays by name; None: one of objects, as earlier versions wrote words."""
    arrays: dict[str, Any] = {}
    with _opened(state) as archive:
        for name in archive.files:
            try:
                arrays[name] = archive[name]
            except ValueError:  # Damage is another error: the archive has sums of its own.
                arrays[name] = None
    return arrays


def _opened(state: bytes) -> Any:
    return np.load(io.BytesIO(state), allow_pickle=False)


def _places(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Gives (key, callback, attribute); the key counts the callbacks of a class."""
    for kind, attributes in _REMEMBERED.items():
        every = (getattr(c, "of_the_chief", c) for c in callbacks)  # See ``OfTheChief``.
        those = [c for c in every if isinstance(c, kind)]
        if kind is GrowingBatch:
            those = [c for c in those if c.grows]
        for number, callback in enumerate(those):
            for attribute in attributes:
                yield f"{kind.__name__}.{number}.{attribute}", callback, attribute
