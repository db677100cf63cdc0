"""Checkpoints of a whole training: weights, optimizer, metrics, and the place in the data.

Written by ``tf.train.CheckpointManager`` (temporary files, then renames; the last K are kept) and
read without unpickling anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CheckpointError, OptionError, TfdistError, cannot_write
from tfdist.records.buckets.urls import url_of
from tfdist.training import callback_state, checkpoint_files
from tfdist.training.adapted import learned_words, take_words
from tfdist.training.binding import Binding
from tfdist.training.bucket_checkpoints import BucketCheckpoints
from tfdist.training.folder_lock import FolderLock
from tfdist.training.keras_api import saved
from tfdist.training.stateful import stateful_layers

# A writer that is being ended, as after the SIGKILL of its command, is waited for.
_PATIENCE_S = 6.0


@dataclass(frozen=True)
class Position:
    """How far a training has come: ``step`` steps into ``epoch``, both counted from 0."""

    epoch: int = 0
    step: int = 0


class Checkpoints(tf.keras.callbacks.Callback):
    """Keeps checkpoints of a fit, and lets a later fit go on from the last one.

    Give it to ``model.fit(callbacks=[...])`` of a model from ``strategy.build``. With
    ``resume=True`` the fit starts where the last checkpoint was written, in the middle of an epoch
    too, and reaches the weights that an unbroken fit would have reached. A damaged checkpoint is
    named, and the one before it is taken. EarlyStopping, ReduceLROnPlateau and ModelCheckpoint go
    on from what they had seen. While the loss or weights are not finite nothing is
    written: the last finite ones stay. One fit at a time writes in a folder.

    Args:
        directory: folder of the checkpoints, made when missing; or a URL, s3:// or gs://, which
            each checkpoint is taken to when it is whole.
        every_steps: also write after this many steps within an epoch; each epoch's end always is.
        keep: the last so many are kept.
        resume: go on from the last checkpoint, if there is one.

    Attributes:
        directory: where they are written on this machine.
        resume: as given.
        start: where the fit has begun, once it has.

    Raises:
        CheckpointError: in the fit, when no checkpoint can be read, or it is of another model.
        InUseError: in the fit, when that of another program writes in the folder.
        WriteError: in the fit, when a checkpoint cannot be written, as on a full disk; at its end,
            when one could not be taken to the URL.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every_steps: int | None = None,
        keep: int = 3,
        resume: bool = False,
    ):
        super().__init__()
        if every_steps is not None and every_steps < 1:
            raise OptionError("every_steps must be at least 1", received=every_steps)
        if keep < 1:
            raise OptionError("keep must be at least 1", received=keep)
        url = url_of(directory)
        self._bucket = url and BucketCheckpoints(url)
        self.directory = self._bucket.folder if self._bucket else Path(directory)
        self.resume = resume
        self.start = Start()
        self._enclosing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self._every_steps = every_steps
        self._keep = keep
        self._manager: tf.train.CheckpointManager | None = None
        self._lock: FolderLock | None = None
        self._has_warned = False
        self._others: Sequence[tf.keras.callbacks.Callback] = ()
        self._confirm: Callable[[], None] | None = None
        self.go_on_at(Position())

    # Called by the fit of a built model ---------------------------------------------------------

    def bind(
        self,
        binding: Binding,
        data: DataState,
        *,
        begun_at: Start | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> Start:
        """Makes ready to save a built model, and restores the last checkpoint when asked to.

        The chief reads; the caller hands weights and optimizer state on to the other processes.

        Args:
            begun_at: the first step of a fit that other processes are in the middle of; nothing is
                restored, and none of them takes part in this.
            confirm: raises when what was read of the epoch so far must not be kept.

        Raises:
            CheckpointError: no checkpoint can be read, or it is of another model or other data.
        """
        model, collective = binding.model, binding.collective
        self._collective = collective
        self._whole_slots = binding.whole_slots
        self._fitted = model
        self._results = binding.results
        self._confirm = confirm
        self._was_chief = collective.is_chief
        self.start = Start()
        self._state = _State(data, learned_words(model))
        beside = collective.saving.beside(model)
        parts = {name: saved(part) for name, part in {"model": model, **beside}.items()}
        checkpoint = tf.train.Checkpoint(state=self._state.trackable(), **parts)
        self._without_words = tf.train.Checkpoint(
            state=self._state.trackable(has_words=False), **parts
        )
        # Made here, on every process: TensorFlow would make it in the first save, on the chief.
        checkpoint.save_counter  # noqa: B018
        if begun_at is not None:
            self.start = begun_at
            self._manager = self._managed(checkpoint)
            return begun_at
        problem = None
        if collective.is_chief:
            try:
                self._lock_folder()
                if self._bucket:
                    self._bucket.fetch()
                checkpoint_files.remove_unfinished(self.directory)
                self.start = self._restore(checkpoint, data)
            except TfdistError as error:
                problem = error
        told = problem, self.start, self._state.words()
        problem, self.start, words = collective.gather(told)[0]
        if problem is not None:
            raise problem
        if self.start.position != Position():
            self._state.take_words(words)
            take_words(model, words)
        self._manager = self._managed(checkpoint)
        self.go_on_at(self.start.position)
        return self.start

    def enclose_writing(self, enclosing: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Has each checkpoint be written within the context that ``enclosing`` returns."""
        self._enclosing = enclosing

    def move(self, directory: Path) -> None:
        """Goes on in another folder, into which the caller has moved what was in this one."""
        if directory != self.directory:
            self.directory = directory
            if self._manager is not None:
                self._manager = self._managed(self._manager.checkpoint)

    def release(self) -> None:
        """Lets other fits write in the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _lock_folder(self) -> None:
        self.release()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        lock = self._bucket.lock if self._bucket else self.directory / checkpoint_files.LOCK
        self._lock = FolderLock(lock, _PATIENCE_S)

    def _managed(self, checkpoint: tf.train.Checkpoint) -> tf.train.CheckpointManager:
        return tf.train.CheckpointManager(
            checkpoint,
            str(self.directory),
            max_to_keep=self._keep,
            checkpoint_name=checkpoint_files.PREFIX,
        )

    def _restore(self, checkpoint: tf.train.Checkpoint, data: DataState) -> Start:
        names = checkpoint_files.finished(self.directory)
        if not names:
            self._mend_list()
            return Start()
        if not self.resume:
            raise CheckpointError(
                "a new fit must have a folder without checkpoints",
                received=f"{self._place} with {len(names)} of them",
                mend="Give resume=True to go on from the last one, or another folder",
            )
        if stateful := stateful_layers(self._fitted):
            raise CheckpointError(
                "a resumed model must not have stateful recurrent layers, whose state between "
                "batches no checkpoint holds",
                received=f"layer '{stateful[0]}'",
                mend="Make it with stateful=False, or train from the start in another folder",
            )
        self._mend_list()
        damaged = []
        for name in reversed(names):
            path = str(self.directory / name)
            try:
                checkpoint_files.check_regular(self.directory, name)
                with self._collective.saving.restored():
                    # Those of earlier versions have no words.
                    is_older = self._state.words() and not _has_words(path)
                    _read(self._without_words if is_older else checkpoint, path)
                self._state.check()
            except CheckpointError:
                raise
            except Exception as error:  # TensorFlow's reader raises whatever it stumbles over.
                damaged.append(name)
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                print(f"tfdist: checkpoint {path} is damaged ({reason}); trying the one before it")
                continue
            return self._state.start(data, path)
        raise CheckpointError(
            f"{self._place} must have a checkpoint that can be read",
            received=f"only damaged ones, {', '.join(damaged)}",
            mend=f"Remove {self._place} and train from the start",
        )

    def _mend_list(self) -> None:
        try:
            checkpoint_files.mend_list(self.directory)
        except OSError as error:
            raise cannot_write(self.directory, error) from error

    def remember(self, others: Sequence[tf.keras.callbacks.Callback]) -> None:
        """Keeps in each checkpoint what those of Keras' own callbacks know; they run before it."""
        self._others = others

    @property
    def has_stopped(self) -> bool:
        """Whether a callback that is there again ended the training that is resumed."""
        return callback_state.has_stopped(self._others, self.start.callbacks)

    def leave_as_ended(self) -> None:
        """Makes the model what the fit that is resumed left, where that was over."""
        if self.start.callbacks:
            callback_state.restore(self._others, self.start.callbacks)
            callback_state.leave_as_ended(self._others, self.model)

    def go_on_at(self, position: Position) -> None:
        """Tells where the next call of Keras' fit begins, in an epoch that may have begun."""
        self._going_on_at = position
        self._last_step = position.step

    # Keras' hooks -------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self.start.callbacks:
            callback_state.restore(self._others, self.start.callbacks)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._current_epoch = epoch
        origin, going_on = self.start.position, self._going_on_at
        self._steps_before = origin.step if epoch == origin.epoch else 0
        self._last_step = going_on.step if epoch == going_on.epoch else 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._every_steps is None:
            return
        step = self._steps_before + batch + 1
        # An execution of several steps may pass over the one that was due.
        is_due = step // self._every_steps > self._last_step // self._every_steps
        self._last_step = step
        if is_due and step < self._state.data.steps_per_epoch:
            state = self._results.merged_state()
            self._save(Position(self._current_epoch, step), state, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._save(Position(epoch + 1, 0), [], logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._bucket and self._collective.is_chief:
            self._bucket.finish()

    def _save(
        self, position: Position, metric_state: list[np.ndarray], logs: dict | None = None
    ) -> None:
        if position.step and self._confirm is not None:
            self._confirm()
        if not self._collective.is_chief and not self._collective.reads_together:
            with self._whole_slots():  # The chief needs its part.
                return
        assert self._manager is not None, "bind() comes before the fit"
        origin = self.start
        is_rest = position.step and position.epoch == origin.position.epoch and origin.position.step
        self._state.assign(
            position,
            metric_state,
            parts=origin.parts if is_rest else self._state.data.parts,
            callbacks=callback_state.written(self._others),
        )
        number = position.epoch * self._state.data.steps_per_epoch + position.step
        try:
            with self._enclosing():
                self._write(number, is_sound=math.isfinite((logs or {}).get("loss", 0.0)))
        except TfdistError:
            raise
        except (OSError, tf.errors.OpError) as error:
            if self._collective.explain(error) is not None:
                raise  # A rank was lost while all were reading the weights.
            name = f"{checkpoint_files.PREFIX}-{number}"
            if self._collective.is_chief:
                checkpoint_files.remove_unfinished(self.directory, failed=name)
            raise cannot_write(self.directory / name, error) from error

    def _write(self, number: int, is_sound: bool) -> None:
        is_chief = self._collective.is_chief
        if is_chief and not self._was_chief:  # A chief that was lost has written before.
            self._was_chief = True
            self._lock_folder()
            self._manager = self._managed(self._manager.checkpoint)
        with self._collective.saving.written(), self._whole_slots():
            is_sound = is_sound and _is_finite(self._fitted)
            if is_chief and is_sound:
                self._manager.save(checkpoint_number=number)
                if self._bucket:
                    self._bucket.send()
                return
            if self._collective.reads_together:  # All must read, whatever they do with it.
                with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
                    self._manager.checkpoint.write(f"{folder}/checkpoint")
        if is_chief:
            self._warn_of_infinite()

    def _warn_of_infinite(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            last = self.newest
            kept = f"the last one before is {last}" if last else "there is none before"
            print(
                f"tfdist: no checkpoint is kept of a loss or weights that are not finite; {kept}",
                flush=True,
            )

    @property
    def _place(self) -> str:
        """Where the checkpoints are, as the user has named it."""
        return self._bucket.url if self._bucket else str(self.directory)

    @property
    def newest(self) -> Path | None:
        """The checkpoint that was written last; None when there is none."""
        names = checkpoint_files.finished(self.directory)
        return self.directory / names[-1] if names else None


def keepers_among(callbacks: Sequence[Any]) -> list[Checkpoints]:
    """Returns those of ``callbacks`` that keep checkpoints."""
    return [callback for callback in callbacks if isinstance(callback, Checkpoints)]


@contextlib.contextmanager
def released_after(callbacks: Sequence[Any]) -> Iterator[None]:
    """Encloses a fit: however it ends, others may write in the folders of its checkpoints."""
    try:
        yield
    finally:
        for keeper in keepers_among(callbacks):
            keeper.release()


@dataclass(frozen=True)
class DataState:
    """The data of a fit; a resumed one must agree in all but ``parts``, the processes that read.

    Attributes:
        padding: of records of several lengths, see ``Records.padding_code``.
    """

    seed: int
    num_records: int
    global_batch_size: int
    steps_per_epoch: int
    parts: int
    padding: int = 0


@dataclass(frozen=True)
class Start:
    """Where a fit begins.

    Attributes:
        position: the first step.
        metric_state: of the steps before it in the same epoch.
        parts: processes that read those steps.
        steps_told: steps of the epoch that callbacks have been told of, here or elsewhere.
        callbacks: what Keras' own remembered, see ``callback_state``; empty when nothing was.
    """

    position: Position = Position()
    metric_state: np.ndarray | None = None
    parts: int = 1
    steps_told: int = 0
    callbacks: bytes = b""


class _State:
    """The variables beside model and optimizer in a checkpoint."""

    def __init__(self, data: DataState, words: Sequence[np.ndarray] = ()):
        self.data = data
        self._words = [
            tf.Variable(_as_tensor(each), shape=[None], trainable=False) for each in words
        ]
        self._position = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        # Those of earlier versions have no padding.
        row = self._as_row(data)
        self._data = tf.Variable(row, shape=[None], dtype=tf.int64, trainable=False)
        self._metrics = tf.Variable(np.zeros(0), shape=[None], dtype=tf.float64, trainable=False)
        self._callbacks = tf.Variable(b"", dtype=tf.string, trainable=False)

    @staticmethod
    def _as_row(data: DataState) -> list[int]:
        return list(astuple(data))

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
        """Returns those of the model's lookup layers, see ``adapted.learned_words``."""
        return [each.numpy() for each in self._words]

    def take_words(self, words: Sequence[np.ndarray]) -> None:
        for own, chiefs in zip(self._words, words, strict=True):
            own.assign(_as_tensor(chiefs))

    def assign(
        self, position: Position, metric_state: list[np.ndarray], parts: int, callbacks: bytes
    ) -> None:
        self._position.assign([position.epoch, position.step])
        self._data.assign(self._as_row(replace(self.data, parts=parts)))
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
        self._data.assign(self._as_row(data))
        # Between epochs only the records and their order matter; within one, the steps do too.
        if step == 0:
            saved = replace(data, seed=saved.seed, num_records=saved.num_records)
        if replace(saved, parts=data.parts) != data:
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
        )


def _has_words(path: str) -> bool:
    return any(name.startswith("state/words_") for name, _ in tf.train.list_variables(path))


def _as_tensor(words: np.ndarray) -> tf.Tensor:
    # Of none, TensorFlow would not know that they are texts.
    return tf.constant(words, tf.string if words.dtype == object else words.dtype)


def _is_finite(model: tf.keras.Model) -> bool:
    # Those that are not trained may be so by design, as a mask of minus infinity.
    values = (tf.convert_to_tensor(weight).numpy() for weight in model.trainable_weights)
    return all(bool(np.all(np.isfinite(value))) for value in values)


def _read(checkpoint: tf.train.Checkpoint, path: str) -> None:
    try:
        status = checkpoint.read(path)
        status.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError) as error:
        raise CheckpointError(
            "a checkpoint must be resumed by the model that wrote it",
            received=f"{path}: {str(error).splitlines()[0]}",
            mend="Give the same model and optimizer, or start anew in another folder",
        ) from error
