"""Callbacks that every fit of tfdist gets, and the rule which of the user's run where."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import OptionError
from tfdist.keras.callbacks import EXCHANGES, keep_averages, never_at_last_epoch, note_best
from tfdist.keras.settings import WRITES_WHERE_TOLD
from tfdist.training.checkpoints.checkpoint import keepers_among
from tfdist.training.checkpoints.survival import Survival
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.engine.metrics import is_finite
from tfdist.training.loops import weight_agreement
from tfdist.training.loops.chief_only import is_on_chief
from tfdist.training.model.refusals import refuse_other_keras

# Writers of files: several processes would write the same one.
_CHIEF_ONLY = (tf.keras.callbacks.CSVLogger, tf.keras.callbacks.ProgbarLogger)
# These read the model too. Where all must read it together, Keras has all but the chief write
# into a folder that it removes.
_READERS = (tf.keras.callbacks.ModelCheckpoint, tf.keras.callbacks.TensorBoard)


def for_process(
    callbacks: Sequence[Any],
    collective: Collective,
    *,
    gathers_slots: bool = False,
    gathers_weights: bool = False,
) -> list[Any]:
    """Returns the callbacks that run on this process: writers of files only on the chief.

    So are those of W&B and MLflow, and what ``tfdist.on_chief`` was given. Where the chief may be
    lost, all have them, and they wait for their process to become it.

    All others run everywhere. They see the metrics of the whole job, so they decide alike.
    Checkpoints come last, and keep what the others have decided.

    Args:
        gathers_slots: whether all processes must meet where one saves the model.
        gathers_weights: whether they must where one reads weights, too.

    Raises:
        OptionError: a callback that cannot know where in its data a fit goes on, two that keep
            checkpoints, or one that would wait for processes that do not have it.
    """
    refuse_other_keras("a callback", *callbacks)
    for callback in callbacks:
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise OptionError(
                "a fit whose batches tfdist divides must go on from tfdist's own checkpoints",
                received="the callback BackupAndRestore",
                mend="Give tfdist.Checkpoints(folder, resume=True) instead",
            )
        if gathers_slots and isinstance(callback, tuple(EXCHANGES)):
            raise OptionError(
                "averages of weights must be whole where a callback exchanges them, and slots that "
                "are divided or lie on the host are not",
                received=f"the callback {type(callback).__name__}",
                mend="Leave it out, or shard and offload",
            )
        if gathers_slots and collective.num_processes > 1:
            _refuse_readers_of_the_chief(callback, reads_parts=gathers_weights)
    keepers = keepers_among(callbacks)
    if len(keepers) > 1:
        raise OptionError(
            "a fit must have one callback Checkpoints, to go on from what it has written",
            received=" and ".join(str(keeper.directory) for keeper in keepers),
            mend="Leave the others out, and copy the folder where it is wanted twice",
        )
    others = [callback for callback in callbacks if callback not in keepers]
    for keeper in keepers:
        keeper.remember(others)
    callbacks = [*others, *keepers]
    if isinstance(collective, ElasticCollective):
        written = (*_CHIEF_ONLY, tf.keras.callbacks.TensorBoard)
        return [
            OfTheChief(c, collective)
            if isinstance(c, written) or (is_on_chief(c) and not _knows_best(c))
            else c
            for c in callbacks
        ]
    if collective.is_chief:
        return list(callbacks)
    left_out = _CHIEF_ONLY if collective.reads_together else (*_CHIEF_ONLY, *_READERS)
    for callback in callbacks if collective.reads_together else ():
        _write_aside(callback)
    if gathers_slots:
        left_out = tuple(
            kind for kind in left_out if kind is not tf.keras.callbacks.ModelCheckpoint
        )
    return [c for c in callbacks if not isinstance(c, left_out) and not is_on_chief(c)]


def _knows_best(callback: Any) -> bool:
    """Whether a callback writes by the chief alone, and must know the best epoch on all ranks.

    One of a subclass may do more than save, and is the chief's.
    """
    return type(callback) is tf.keras.callbacks.ModelCheckpoint


def _write_aside(callback: Any) -> None:
    """Has a TensorBoard write into a folder that is removed, as that of Keras 2 does itself."""
    if WRITES_WHERE_TOLD and isinstance(callback, tf.keras.callbacks.TensorBoard):
        folder = tempfile.TemporaryDirectory(prefix="tfdist-")
        callback.log_dir = folder.name
        weakref.finalize(callback, folder.cleanup)


def _refuse_readers_of_the_chief(
    callback: tf.keras.callbacks.Callback, *, reads_parts: bool
) -> None:
    """Raises:
    OptionError: the chief alone would read what it has in parts, and wait for the others.
    """
    if isinstance(callback, tf.keras.callbacks.ModelCheckpoint) and is_on_chief(callback):
        raise OptionError(
            "a callback that saves a model whose slots are divided (shard='optimizer') must "
            "run on all processes, each of which gives its part",
            received=f"{type(callback).__name__} on the chief alone",
            mend="Give Keras' ModelCheckpoint itself, or leave out shard",
        )
    if isinstance(callback, tf.keras.callbacks.TensorBoard):
        # Embeddings are written as the whole model, its optimizer included.
        for name in ("histogram_freq", "embeddings_freq") if reads_parts else ("embeddings_freq",):
            if getattr(callback, name, 0):
                raise OptionError(
                    "TensorBoard must write no weights where replicas divide slots or weights "
                    "(shard), since it runs on rank 0 alone",
                    received=f"{name}={getattr(callback, name)}",
                    mend=f"Leave {name} out, or leave shard out",
                )


def have_stopped(callbacks: Sequence[Any], collective: Collective) -> bool:
    """Whether the training that is resumed has ended before its last epoch, and says so."""
    stopped = any(keeper.has_stopped for keeper in keepers_among(callbacks))
    if stopped and collective.is_chief:
        print("tfdist: EarlyStopping ended this training; leave it out to go on", flush=True)
    return stopped


def infinite_losses(logs: dict[str, Any]) -> list[str]:
    """Returns which of "loss" and "val_loss" are there, and no finite numbers."""
    return [n for n in ("loss", "val_loss") if n in logs and not is_finite(logs[n])]


def _of_the_chief(hook: str) -> Callable[..., None]:
    """Returns a method of ``OfTheChief`` that calls that of its callback."""

    def call(self: OfTheChief, *args: Any, **options: Any) -> None:
        if self._is_on():
            getattr(self.of_the_chief, hook)(*args, *options.values())  # Whatever it calls them.

    return call


class OfTheChief(tf.keras.callbacks.Callback):
    """Runs a callback on the chief alone; on a new one from where the old one was lost.

    Attributes:
        of_the_chief: the callback.
    """

    def __init__(self, callback: tf.keras.callbacks.Callback, collective: Collective):
        super().__init__()
        self.of_the_chief = callback
        self._collective = collective
        self._has_begun = False
        self._goes_on = False
        self._epoch: int | None = None

    def set_params(self, params: dict) -> None:
        self.of_the_chief.set_params(params)

    def set_model(self, model: tf.keras.Model) -> None:
        self.of_the_chief.set_model(model)

    def join(self) -> None:
        """Has it go on, on this process, with what another one has begun."""
        self._goes_on = True

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._collective.is_chief and not self._goes_on:
            self._has_begun = True
            self.of_the_chief.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        if self._is_on():
            self.of_the_chief.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._is_on():
            self.of_the_chief.on_epoch_end(epoch, logs)
        elif isinstance(self.of_the_chief, tf.keras.callbacks.ModelCheckpoint):
            note_best(self.of_the_chief, logs)  # This process may become the chief.
        self._epoch = None

    on_train_batch_begin = _of_the_chief("on_train_batch_begin")
    on_train_batch_end = _of_the_chief("on_train_batch_end")
    on_test_begin = _of_the_chief("on_test_begin")
    on_test_batch_begin = _of_the_chief("on_test_batch_begin")
    on_test_batch_end = _of_the_chief("on_test_batch_end")
    on_test_end = _of_the_chief("on_test_end")
    on_train_end = _of_the_chief("on_train_end")

    def _is_on(self) -> bool:
        if not self._collective.is_chief:
            return False
        if not self._has_begun:
            self._has_begun = True
            if isinstance(self.of_the_chief, tf.keras.callbacks.CSVLogger):
                self.of_the_chief.append = True  # After the rows of the chief before.
            self.of_the_chief.on_train_begin()
            if self._epoch is not None:
                self.of_the_chief.on_epoch_begin(self._epoch)
        return True


class JobCallbacks(tf.keras.callbacks.CallbackList):
    """The callbacks of one training of the whole job.

    Two calls of Keras' fit, the rest of a broken epoch and the epochs after it, are one training
    to them. In a job of several processes a callback that stops the training within an epoch
    (TerminateOnNaN, a limit of time) stops it at the epoch's end: the others cannot know before.
    """

    def __init__(self, callbacks: list[Any], binding: Binding, **options: Any):
        super().__init__(callbacks, **options)
        self._binding = binding
        self._collective = binding.collective
        self._begun = False
        self._stop_wanted = False
        self._epoch_begun: int | None = None
        self._epoch_ended: int | None = None
        self._survival: Survival | None = None
        self._watchers: list[Any] = []
        self._infinite: set[str] = set()
        self._is_last_fit = True
        self._steps_before = 0

    def begin_fit(self, *, is_last: bool, steps_before: int) -> None:
        """Tells of the call of Keras' fit that comes.

        Args:
            is_last: whether the training ends with it.
            steps_before: steps of its first epoch that the callbacks have been told of before it.
        """
        self._is_last_fit = is_last
        self._steps_before = steps_before

    def ends(self) -> bool:
        """Whether the training ends with the present call of Keras' fit."""
        return self._is_last_fit or self.model.stop_training

    def end(self) -> None:
        """Does what an end of the last epoch leaves for after its checkpoint."""
        if self._epoch_ended is not None and self._epoch_ended + 1 >= self.params["epochs"]:
            keep_averages(self.callbacks)

    def set_params(self, params: dict) -> None:
        super().set_params(params)
        never_at_last_epoch(self.callbacks, params)

    def go_on_with(self, survival: Survival) -> None:
        """Has it told of each step and epoch, after all callbacks."""
        self._survival = survival

    def join(self) -> None:
        """Begins in the middle of a training that other processes have begun."""
        for callback in self.callbacks:
            if isinstance(callback, OfTheChief):
                callback.join()
        self.on_train_begin()

    def watch_with(self, watchers: Sequence[Any]) -> None:
        """Adds callbacks that watch a call of Keras' fit; those of the call before leave."""
        for watcher in self._watchers:
            self.callbacks.remove(watcher)
        self._watchers = list(watchers)
        for watcher in watchers:
            self.callbacks.append(watcher)
            watcher.set_model(self.model)
        if watchers:  # Keras has asked before them whether anyone wants to hear of batches.
            self._should_call_train_batch_hooks = True
            self._should_call_test_batch_hooks = True

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self._begun:
            self._begun = True
            super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if epoch != self._epoch_begun:  # Else it goes on after a loss.
            self._epoch_begun = epoch
            super().on_epoch_begin(epoch, logs)
            if self._survival is not None:
                self._survival.epoch_begun(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        super().on_train_batch_begin(batch + self._steps_before, logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        super().on_train_batch_end(batch + self._steps_before, logs)
        if self._collective.num_processes > 1 and self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False
        if self._survival is not None:
            self._survival.step_done(self._epoch_begun, batch + self._steps_before + 1)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._survival is not None and self._survival.has_ended_before(epoch):
            self._survival.take_rates()
            self._epoch_ended = epoch
            self._stop_wanted = self._stop_wanted or self._survival.has_stopped_before
        if epoch != self._epoch_ended:  # Else its end was told, and a process lost, before all met.
            self._epoch_ended = epoch
            self._warn_of_infinite(epoch, logs or {})
            super().on_epoch_end(epoch, logs)
            self._stop_wanted = self._stop_wanted or self.model.stop_training
        with self._collective.waiting(f"the end of epoch {epoch + 1}"):
            own = self._stop_wanted, *weight_agreement.state_of(self._binding)
            wanted, *state = zip(*self._collective.gather(own), strict=True)
        self.model.stop_training = any(wanted)
        weight_agreement.check(*state, epoch)
        if self._survival is not None:
            self._survival.epoch_done(epoch, self.model.stop_training)

    def _warn_of_infinite(self, epoch: int, logs: dict[str, Any]) -> None:
        """Says once of each loss that it is no finite number any more."""
        new = [name for name in infinite_losses(logs) if name not in self._infinite]
        self._infinite.update(new)
        for name in new if self._collective.is_chief else ():
            bad = next(each for each in tf.nest.flatten(logs[name]) if not is_finite(each))
            print(
                f"tfdist: WARNING: {name} is {np.mean(bad)} in epoch {epoch + 1}. Lower the "
                "learning rate, clip the gradients, or look for such values in the data",
                flush=True,
            )

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.ends():
            super().on_train_end(logs)
