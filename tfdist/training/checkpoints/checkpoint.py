"""Checkpoints of a whole training: weights, optimizer, metrics, and the place in the data.

Written by ``tf.train.CheckpointManager`` (temporary files, then renames; the last K are kept), or,
where replicas divide what is kept, in parts (``shared_checkpoints``). Read without unpickling
anything.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.errors import (
    CheckpointError,
    ModelError,
    OptionError,
    TfdistError,
    cannot_write,
    first_line,
)
from tfdist.keras.rates import fixed_rates_of, put_rates
from tfdist.keras.trackables import beside_model, saved, unknown_variables
from tfdist.records.buckets.urls import url_of
from tfdist.records.wording import listed
from tfdist.training.checkpoints import callback_state, checkpoint_files, last_call
from tfdist.training.checkpoints.bucket_checkpoints import BucketCheckpoints
from tfdist.training.checkpoints.checkpoint_state import (
    CheckpointState,
    DataState,
    Position,
    Start,
    has_words,
)
from tfdist.training.checkpoints.shared_checkpoints import (
    SharedCheckpoints,
    are_finite,
    on_all,
    seconds_of,
    tried,
)
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.engine.folder_lock import FolderLock
from tfdist.training.engine.metrics import is_finite
from tfdist.training.engine.options import check_count
from tfdist.training.model.lookup_vocabularies import learned_words, take_words
from tfdist.training.model.stateful_rnn import stateful_layers

# A writer that is being ended, as after the SIGKILL of its command, is waited for.
_PATIENCE_S = 6.0


class Checkpoints(tf.keras.callbacks.Callback):
    """Keeps checkpoints of a fit, and lets a later fit go on from the last one.

    Give it to ``model.fit(callbacks=[...])`` of a model from ``strategy.build``. With
    ``resume=True`` the fit starts where the last checkpoint was written, in the middle of an epoch
    too, and reaches the weights that an unbroken fit would have reached. A damaged checkpoint is
    named, and the one before it is taken. EarlyStopping, ReduceLROnPlateau and ModelCheckpoint go
    on from what they had seen. While the loss or weights are not finite nothing is
    written: the last finite ones stay. On SIGTERM one more is written, and the process ends. One
    fit at a time writes in a folder. Where replicas divide slots or weights (``shard``, but not on
    a mesh), each process writes and reads its part, all of them or none.

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
        steps_of_epoch: of the one that runs; a growing batch makes them fewer.

    Raises:
        OptionError: an option of another type, or too small; or the path of the directory has one
            of the characters ``* ? [ \\``.
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
        if not isinstance(directory, str | os.PathLike):
            raise OptionError(
                "directory must be a path", received=repr(directory), mend="Give that of a folder"
            )
        if every_steps is not None:
            check_count("every_steps", every_steps)
        check_count("keep", keep)
        if not isinstance(resume, bool):
            raise OptionError(
                "resume must be True or False",
                received=repr(resume),
                mend="Write resume=True, or leave it out",
            )
        url = url_of(directory)
        self._bucket = url and BucketCheckpoints(url)
        self.directory = self._bucket.folder if self._bucket else Path(directory)
        checkpoint_files.check_path(self.directory)
        self._told_as = url
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
        self._shared: SharedCheckpoints | None = None
        self._has_restored = False
        self.go_on_at(Position())

    # Called by the fit of a built model ---------------------------------------------------------

    def meet(self, binding: Binding) -> bool:
        """Returns whether all processes write and read parts of their own; all call it together."""
        self._shared = SharedCheckpoints.over(binding, self.directory, self._place)
        return self._shared is not None

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
        if collective.num_processes > 1:  # Others are told the whole path.
            checkpoint_files.check_path(self.directory.absolute())
        self._binding = binding
        self._collective = collective
        self._last_call = last_call.LastCall(collective)
        self._saving = binding.engine.saving
        self._confirm = confirm
        self._was_chief = collective.is_chief
        self.start = Start()
        self._has_restored = False
        self._state = CheckpointState(data, learned_words(model))
        self.steps_of_epoch = data.steps_per_epoch
        self._beside = beside_model(model)
        parts = {"model": model, **self._saving.beside(model), **self._beside}
        self._parts = {name: saved(part) for name, part in parts.items()}
        checkpoint = tf.train.Checkpoint(state=self._state.trackable(), **self._parts)
        # Made here, on every process: TensorFlow would make it in the first save, on the chief.
        checkpoint.save_counter  # noqa: B018
        if begun_at is not None:
            self.start = begun_at
            self._manager = self._managed(checkpoint)
            return begun_at
        problem, names = None, []
        if collective.is_chief:
            try:
                names = self._made_ready()
            except TfdistError as error:
                problem = error
        problem, *found = collective.gather((problem, names, str(self.directory.absolute())))[0]
        if problem is not None:
            raise problem
        if found[0]:
            self.start = self._restore(*found, checkpoint, data)
            self._has_restored = True
            callback_state.check_batch(self._others, self.start.callbacks)
            if own := unknown_variables(model, shared=True):
                collective.broadcast(own)
        words = collective.gather(self._state.words())[0]
        if self.start.position != Position():
            self._state.take_words(words)
            take_words(model, words)
        self._manager = self._managed(checkpoint)
        self.go_on_at(self.start.position)
        return self.start

    def enclose_writing(self, enclosing: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Has each checkpoint be written within the context that ``enclosing`` returns."""
        self._enclosing = enclosing

    def call(self, place: str) -> None:
        """Calls their folder ``place`` in errors, as where the caller takes what is in it."""
        self._told_as = place

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

    def _made_ready(self) -> list[str]:
        """Makes the folder one to write in; returns the names of what is there to go on from."""
        self._lock_folder()
        if self._bucket:
            self._bucket.fetch()
        checkpoint_files.remove_unfinished(self.directory)
        names = checkpoint_files.finished(self.directory)
        if names and not self.resume:
            raise CheckpointError(
                "a new fit must have a folder without checkpoints",
                received=f"{self._place} with {len(names)} of them",
                mend="Give resume=True to go on from the last one, or another folder",
            )
        if names and (stateful := stateful_layers(self._binding.model)):
            raise CheckpointError(
                "a resumed model must not have stateful recurrent layers, whose state between "
                "batches no checkpoint holds",
                received=f"layer '{stateful[0]}'",
                mend="Make it with stateful=False, or train from the start in another folder",
            )
        try:
            checkpoint_files.mend_list(self.directory)
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        return names

    def _restore(
        self, names: Sequence[str], folder: str, checkpoint: tf.train.Checkpoint, data: DataState
    ) -> Start:
        """Reads the newest of ``names`` that can be read, in the chief's ``folder``."""
        damaged = []
        seconds = seconds_of(checkpoint)
        for name in reversed(names):
            path = str((self.directory if self._collective.is_chief else Path(folder)) / name)
            own = self._tried(path, checkpoint, data)
            with self._collective.waiting(f"the reading of {name}", seconds):
                told = self._collective.gather(own)
            problems = [(rank, problem) for rank, (_, problem) in enumerate(told) if problem]
            for _, problem in problems:
                if isinstance(problem, TfdistError):
                    raise problem
            if not problems:
                return told[0][0]
            damaged.append(name)
            if self._collective.is_chief:
                rank, reason = problems[0]
                reason += f", says rank {rank}" if rank else ""
                print(f"tfdist: checkpoint {path} is damaged ({reason}); trying the one before it")
        raise CheckpointError(
            f"{self._place} must have a checkpoint that can be read",
            received=f"only damaged ones, {', '.join(damaged)}",
            mend=f"Remove {self._place} and train from the start",
        )

    def _tried(
        self, path: str, checkpoint: tf.train.Checkpoint, data: DataState
    ) -> tuple[Start | None, TfdistError | str | None]:
        """Reads one, where this process reads; returns where it was written, or what is wrong."""
        if not self._collective.is_chief and self._shared is None:
            return None, None
        try:
            checkpoint_files.check_regular(Path(path).parent, Path(path).name)
            with self._saving.restored():
                kept = self._as_written(path, checkpoint)
                if self._shared is None:
                    _read(kept, path)
                else:
                    self._shared.read(kept, path, _read)
            self._state.check()
            return self._state.start(data, path), None
        except (CheckpointError, ModelError, OptionError) as error:  # No damage.
            return None, error
        except Exception as error:  # TensorFlow's reader raises whatever it stumbles over.
            return None, first_line(error)

    def _as_written(self, path: str, checkpoint: tf.train.Checkpoint) -> tf.train.Checkpoint:
        """Returns what reads ``path``: those of earlier versions have no words, and of Keras 3
        nothing of ``beside_model``."""
        if not self._beside and not self._saving.unwritten and not self._state.words():
            return checkpoint
        written = [name for name, _ in tf.train.list_variables(path)]
        known = {name.partition("/")[0] for name in written}
        anew = {name: one for name, one in self._beside.items() if name not in known}
        lacking = {*anew, *(name for name in self._saving.unwritten if name not in known)}
        lacks_words = bool(self._state.words()) and not has_words(written)
        if not lacking and not lacks_words:
            return checkpoint
        if anew and self._collective.is_chief:
            kinds = (
                "the tf.Variables of layers"
                if name == "own"
                else f"the slots of {type(one).__name__}"
                for name, one in anew.items()
            )
            print(
                f"tfdist: warning: {path} lacks {', '.join(kinds)}, as an earlier version wrote "
                "it: they begin anew",
                flush=True,
            )
        parts = {name: part for name, part in self._parts.items() if name not in lacking}
        return tf.train.Checkpoint(state=self._state.trackable(has_words=not lacks_words), **parts)

    def remember(self, others: Sequence[tf.keras.callbacks.Callback]) -> None:
        """Keeps in each checkpoint what those of Keras' own callbacks know; they run before it."""
        self._others = others

    @property
    def has_stopped(self) -> bool:
        """Whether a callback that is there again ended the training that is resumed."""
        return callback_state.has_stopped(self._others, self.start.callbacks)

    def leave_as_ended(self, epochs: int) -> None:
        """Makes the model what the fit that is resumed left, where that was over.

        Args:
            epochs: that it is to have.
        """
        if self.start.callbacks:
            callback_state.restore_begun(self._others, self.start.callbacks)
            is_whole = self.start.position.epoch >= epochs
            callback_state.leave_as_ended(self._others, self.model, is_whole=is_whole)

    def go_on_at(self, position: Position) -> None:
        """Tells where the next call of Keras' fit begins, in an epoch that may have begun."""
        self._going_on_at = position
        self._last_step = position.step
        # Who joins has them of the others, and restored nothing.
        self._rates = fixed_rates_of(self._binding.model) if self._has_restored else []

    # Keras' hooks -------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self.start.callbacks:
            callback_state.restore_begun(self._others, self.start.callbacks)
        put_rates(self._rates)  # A callback may have set the first ones.

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._current_epoch = epoch
        origin, going_on = self.start.position, self._going_on_at
        self._steps_before = origin.step if epoch == origin.epoch else 0
        self._last_step = going_on.step if epoch == going_on.epoch else 0
        self._has_stopped_within = False
        if self._steps_before:  # A callback set the rate by the last one when this epoch began.
            put_rates(self._rates)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._has_restored:
            self._has_restored = False
            self._binding.results.check_carried()
            self._tell_of_draws()
        step = self._steps_before + batch + 1
        every = self._every_steps
        # An execution of several steps may pass over the one that was due.
        is_due = every is not None and step // every > self._last_step // every
        self._last_step = step
        is_last = self._last_call.after_step()
        # Keras ends the epoch here; jobs of several processes stop at its own end.
        stops = self.model.stop_training and self._collective.num_processes == 1
        if (is_due or is_last or stops) and step < self.steps_of_epoch:
            self._has_stopped_within = stops
            state = self._binding.results.merged_state()
            self._save(Position(self._current_epoch, step), state, logs)
            if is_last:
                self._leave()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not self._has_stopped_within:  # Else its other steps are still to come.
            self._save(Position(epoch + 1, 0), [], logs)
        if self._last_call.after_epoch():
            self._leave()

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._bucket and self._collective.is_chief:
            self._bucket.finish()

    def _tell_of_draws(self) -> None:
        """Tells, when the first step of a resumed fit is traced, what draws other numbers."""
        if self._binding.drawing:
            print(
                f"tfdist: {listed(self._binding.drawing)} draws random numbers that no checkpoint "
                "holds: as good ones, but not those of a training without a break",
                flush=True,
            )

    def _leave(self) -> NoReturn:
        self.on_train_end()
        newest = self.newest
        self._last_call.leave("none" if newest is None else f"{self._place}/{newest.name}")

    def _save(
        self, position: Position, metric_state: list[np.ndarray], logs: dict | None = None
    ) -> None:
        if position.step and self._confirm is not None:
            self._confirm()
        assert self._manager is not None, "bind() comes before the fit"
        origin = self.start
        is_rest = position.step and position.epoch == origin.position.epoch and origin.position.step
        self._state.assign(
            position,
            metric_state,
            parts=origin.parts if is_rest else self._state.data.parts,
            callbacks=callback_state.written(self._others),
        )
        # Counted on from the one before: epochs of another batch have other steps.
        epochs, steps = position.epoch - origin.position.epoch, position.step - origin.position.step
        number = origin.number + epochs * self._state.data.steps_per_epoch + steps
        is_sound = is_finite((logs or {}).get("loss", 0.0))
        with self._enclosing():
            if self._shared is None:
                self._write_whole(number, is_sound)
            else:
                self._write_parts(self._shared, number, is_sound)

    def _write_whole(self, number: int, is_sound: bool) -> None:
        """Has the chief write what all have; they wait for it."""
        collective, target = self._collective, self._target(number)

        def write() -> None:
            if not (collective.is_chief or collective.reads_together):
                with self._binding.whole_slots():  # The chief needs its part.
                    return
            self._take_over()
            try:
                with self._saving.written():
                    is_written = self._write_by_chief(number, is_sound)
            except (OSError, tf.errors.OpError) as error:
                if collective.is_chief and collective.explain(error) is None:
                    checkpoint_files.remove_unfinished(self.directory, failed=target.name)
                raise
            if is_written:
                self._send()
            else:
                self._warn_of_infinite()

        if collective.num_processes == 1 or isinstance(collective, ElasticCollective):
            # Ranks that go on without a lost one would lose, here, their callbacks' end of epoch.
            _, problem = tried(collective, write, target)
        else:
            seconds = seconds_of(self._manager.checkpoint)
            problems = [each for _, each in on_all(collective, write, target, seconds)]
            problem = next(filter(None, problems), None)
        if problem is not None:
            raise problem

    def _write_parts(self, shared: SharedCheckpoints, number: int, is_sound: bool) -> None:
        self._take_over()
        checkpoint, target = self._manager.checkpoint, self._target(number)
        with self._saving.written():
            is_written = shared.write(
                checkpoint, self.directory, target.name, keep=self._keep, is_sound=is_sound
            )
        if not is_written:
            self._warn_of_infinite()
        elif self._bucket:
            on_all(self._collective, self._send, target, seconds_of(checkpoint))

    def _target(self, number: int) -> Path:
        return self.directory / f"{checkpoint_files.PREFIX}-{number}"

    def _take_over(self) -> None:
        """Makes a chief of a process whose chief was lost, which has written before."""
        if self._collective.is_chief and not self._was_chief:
            self._was_chief = True
            self._lock_folder()
            self._manager = self._managed(self._manager.checkpoint)

    def _write_by_chief(self, number: int, is_sound: bool) -> bool:
        """Returns False where a loss or a weight is not finite: nothing is written."""
        with self._binding.whole_slots():
            # Those that are not trained may be infinite by design, as a mask of minus infinity.
            is_sound = is_sound and are_finite(self._binding.model.trainable_weights)
            if self._collective.is_chief and is_sound:
                self._manager.save(checkpoint_number=number)
            elif self._collective.reads_together:  # All must read, whatever they do with it.
                with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
                    self._manager.checkpoint.write(f"{folder}/checkpoint")
        return is_sound

    def _send(self) -> None:
        if self._bucket and self._collective.is_chief:
            self._bucket.send()

    def _warn_of_infinite(self) -> None:
        if self._collective.is_chief and not self._has_warned:
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
        return self._told_as or str(self.directory)

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
    keepers = keepers_among(callbacks)
    try:
        with last_call.listening() if keepers else contextlib.nullcontext():
            yield
    finally:
        for keeper in keepers:
            keeper.release()


def _read(checkpoint: tf.train.Checkpoint, path: str) -> None:
    try:
        status = checkpoint.read(path)
        status.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError) as error:
        raise CheckpointError(
            "a checkpoint must be resumed by the model that wrote it",
            received=f"{path}: {first_line(error)}",
            mend="Give the same model and optimizer, or start anew in another folder",
        ) from error
