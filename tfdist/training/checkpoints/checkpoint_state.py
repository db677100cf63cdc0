"""What a checkpoint holds beside a model and its optimizer: the place in the data, and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist.errors import CheckpointError
from tfdist.training.checkpoints import callback_state, checkpoint_files

# Counted up when records come in another order than before for the same seed.
ORDER = 1


@dataclass(frozen=True)
class Position:
    """How far a training has come: ``step`` steps into ``epoch``, both counted from 0."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class DataState:
    """The data of a fit; a resumed one must agree in all but ``parts``, the processes that read.

    Attributes:
        padding: of records of several lengths, see ``Records.padding_code``.
        order: how several processes shuffle; 0 of earlier versions, which gave all the same key.
    """

    seed: int
    num_records: int
    global_batch_size: int
    steps_per_epoch: int
    parts: int
    padding: int = 0
    order: int = 0


@dataclass(frozen=True)
class Start:
    """Where a fit begins.

    Attributes:
        position: the first step.
        metric_state: of the steps before it in the same epoch.
        parts: processes that read those steps.
        steps_told: steps of the epoch that callbacks have been told of, here or elsewhere.
        callbacks: what Keras' own remembered, see ``callback_state``; empty when nothing was.
        number: of the checkpoint, "ckpt-12", that the fit goes on from; 0 without one.
    """

    position: Position = Position()
    metric_state: np.ndarray | None = None
    parts: int = 1
    steps_told: int = 0
    callbacks: bytes = b""
    number: int = 0


class CheckpointState:
    """The variables beside model and optimizer in a checkpoint."""

    def __init__(self, data: DataState, words: Sequence[np.ndarray] = ()):
        self.data = data
        self._words = [
            tf.Variable(_as_tensor(each), shape=[None], trainable=False) for each in words
        ]
        self._position = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        # Those of earlier versions have no padding and no order.
        row = astuple(data)
        self._data = tf.Variable(row, shape=[None], dtype=tf.int64, trainable=False)
        self._metrics = tf.Variable(np.zeros(0), shape=[None], dtype=tf.float64, trainable=False)
        self._callbacks = tf.Variable(b"", dtype=tf.string, trainable=False)

    def trackable(self, *, has_words: bool = True) -> tf.train.Checkpoint:
        words = {f"words_{number}": each for number, each in enumerate(self._words)}
        return tf.train.Checkpoint(
            position=self._position,
            data=self._data,
            metrics=self._metrics,
            callbacks=self._callbacks,
            **(words if has_words else {}),
        )

    def words(self) -> list[np.ndarray]:
        """Returns those of the model's lookup layers, see ``lookup_vocabularies.learned_words``."""
        return [each.numpy() for each in self._words]

    def take_words(self, words: Sequence[np.ndarray]) -> None:
        for own, chiefs in zip(self._words, words, strict=True):
            own.assign(_as_tensor(chiefs))

    def assign(
        self, position: Position, metric_state: list[np.ndarray], parts: int, callbacks: bytes
    ) -> None:
        self._position.assign([position.epoch, position.step])
        self._data.assign(astuple(replace(self.data, parts=parts)))
        self._callbacks.assign(callbacks)
        flat = [np.ravel(array).astype(np.float64) for array in metric_state]
        self._metrics.assign(np.concatenate(flat) if flat else np.zeros(0))

    def check(self) -> None:
        """Raises whatever shows that these are not values that a fit has written."""
        epoch, step = (int(number) for number in self._position.numpy())
        assert epoch >= 0 <= step, "a place before the first step"
        DataState(*(int(number) for number in self._data.numpy()))
        callback_state.check(self._callbacks.numpy())

    def start(self, data: DataState, path: str) -> Start:
        epoch, step = (int(number) for number in self._position.numpy())
        saved = DataState(*(int(number) for number in self._data.numpy()))
        self._data.assign(astuple(data))
        # Between epochs only the records and their order matter; within one, the steps do too.
        if step == 0:
            saved = replace(data, seed=saved.seed, num_records=saved.num_records)
        if step and saved.parts > 1 and saved.order != data.order:
            raise CheckpointError(
                "an epoch of several processes must go on in the order in which it began",
                received=f"{Path(path).name}, of a version of tfdist that shuffles otherwise",
                mend="Resume from a checkpoint at the end of an epoch, or with that version",
            )
        if replace(saved, parts=data.parts, order=data.order) != data:
            raise CheckpointError(
                f"a fit resumed from {Path(path).name} must have the data of the fit that wrote it",
                received=f"{data} where it was {saved}",
                mend="Resume with the same records, seed, global_batch_size, pad_to and "
                "bucket_by_length",
            )
        state = self._metrics.numpy()
        return Start(
            Position(epoch, step),
            state if state.size else None,
            saved.parts,
            callbacks=self._callbacks.numpy(),
            number=checkpoint_files.number_of(Path(path).name),
        )


def has_words(written: Iterable[str]) -> bool:
    """Whether a checkpoint has words, by the names of what is written in it."""
    return any(name.startswith("state/words_") for name in written)


def _as_tensor(words: np.ndarray) -> tf.Tensor:
    # Of none, TensorFlow would not know that they are texts.
    return tf.constant(words, tf.string if words.dtype == object else words.dtype)
