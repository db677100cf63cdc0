"""A fit that goes on when processes are lost, or when others join.

Each process keeps a copy of the training in memory, taken every few steps at the same step by all
(a *commit*). After a loss those that are left take the last commit and meet anew. Whoever has come
furthest gives its commit to all others, and so also to a process that joins, which has built its
model and called ``fit`` like the first ones did.

Whatever the number of processes, the global batches stay those of the number that the job was
asked to work with, and so do the learning rate and its rule: the weights are those of a training
that nothing happened to.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.keras.layers import variables_in
from tfdist.keras.loss_scale import loss_scale_state
from tfdist.keras.rates import fixed_rates_of, put_rates, variables_but_rates
from tfdist.keras.seeds import seeds_in
from tfdist.keras.steps import forget_functions, forget_validation
from tfdist.keras.trackables import unknown_variables
from tfdist.training.checkpoints import callback_state, elastic_snapshot
from tfdist.training.checkpoints.checkpoint_state import Position, Start
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.elastic_collective import (
    ElasticCollective,
    ProcessesChanged,
    ProcessLost,
)

# More losses than this without a commit between them have a cause in the step itself.
_MOST_LOSSES_IN_PLACE = 5
_fits = itertools.count()
# What processes tell that meet outside of a fit.
_OUTSIDE = "outside"


@dataclass(frozen=True)
class _Commit:
    """A training at one step.

    Attributes:
        start: the next step.
        origin: the first step of the whole fit.
        variables: of model and optimizer, but for learning rates.
        is_over: whether no step is left.
    """

    start: Start
    origin: Start
    variables: list[tf.Tensor]
    is_over: bool = False

    @property
    def reached(self) -> tuple[int, int, bool]:
        return self.start.position.epoch, self.start.position.step, self.is_over


@dataclass(frozen=True)
class _Notes:
    """What has been seen so far, for a process that joins.

    Attributes:
        callbacks: see ``callback_state.written``.
        epochs: that are over.
        history: name -> value in each of them.
        rates: the learning rates that are no schedules. No commit has them: callbacks that set one
            when an epoch begins are not asked again where the epoch is gone on with.
        begun: the epoch whose beginning callbacks were told of last; None before the first.
    """

    callbacks: bytes
    epochs: list[int]
    history: dict[str, list[float]]
    rates: list[float]
    begun: int | None


def _written(commit: _Commit) -> dict[str, Any]:
    """Returns a commit without its variables, for a file."""
    return asdict(replace(commit, variables=[]))


def _read(written: dict[str, Any], variables: list[tf.Tensor]) -> _Commit:
    def start(fields: dict[str, Any]) -> Start:
        return Start(**{**fields, "position": Position(**fields["position"])})

    fields = {**written, "variables": variables}
    return _Commit(
        **{**fields, "start": start(written["start"]), "origin": start(written["origin"])}
    )


class Survival:
    """Keeps one fit going.

    Args:
        binding: of the model that trains, on processes that may change; its optimizer has all its
            variables.
        callbacks: of the fit. What Keras' own have noted, as the best loss so far, is given to a
            process that joins.
        history: that the fit returns; given to a process that joins, too.
        epochs: number of the last one.
        steps_per_epoch: of the data.
    """

    def __init__(
        self,
        binding: Binding,
        callbacks: Sequence[Any],
        history: tf.keras.callbacks.History,
        epochs: int,
        steps_per_epoch: int,
    ):
        self._model = binding.model
        self._results = binding.results
        self._collective: Any = binding.collective
        self._callbacks = callbacks
        self._history = history
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._number = next(_fits)
        self._origin = Start()
        self._last: _Commit | None = None
        self._notes: _Notes | None = None
        self._is_ready = False  # Else this process has begun the fit after others.
        self._begun: int | None = None
        #: What layers have made of TensorFlow itself, which Keras 3 does not count among its own.
        self._unknown = unknown_variables(binding.model, shared=True)

    def run(
        self,
        explained: Callable[[], contextlib.AbstractContextManager],
        *,
        begin: Callable[[], Start],
        join: Callable[[Start], None],
        train: Callable[[Start], None],
    ) -> None:
        """Trains to the end, whatever happens to other processes.

        Args:
            explained: encloses what follows: turns the engine's errors into ``ProcessLost``.
            begin: makes ready where all processes are new; returns the first step.
            join: makes this process ready to go on with what others began, at the first step of
                the whole fit.
            train: trains from a step to the end.
        """
        self._take_kept()
        losses_in_place = 0
        while True:
            before = self._last
            try:
                with explained():
                    start = self._agree()
                    if start is None:
                        start = self._origin = begin()
                        self._is_ready = True
                        self._commit(start.position, start.metric_state)
                    elif not self._is_ready:
                        join(self._origin)
                        self._take_notes()
                        self._is_ready = True
                    elif len(self._notes.epochs) > len(self._history.epoch):
                        self.take_rates()  # Others were told of an end that this one was not.
                if self._last.is_over:
                    is_whole = self._last.start.position.epoch >= self._epochs
                    callback_state.leave_as_ended(self._callbacks, self._model, is_whole=is_whole)
                else:
                    train(start)
                self._keep()
                return
            except ProcessesChanged:
                losses_in_place = 0
            except ProcessLost:
                has_moved = self._last is not None and (
                    before is None or self._last.reached != before.reached
                )
                losses_in_place = 0 if has_moved else losses_in_place + 1
                if losses_in_place == _MOST_LOSSES_IN_PLACE:
                    raise
            forget_traces(self._model)
            self._keep()
            self._collective.meet()

    def step_done(self, epoch: int, steps_told: int) -> None:
        """Commits when it is time to, within an epoch.

        Args:
            epoch: of the step, counted from 0.
            steps_told: steps of this epoch that callbacks have been told of.

        Raises:
            ProcessesChanged: see ``epoch_done``.
        """
        origin, last = self._origin.position, self._last.start.position
        step = steps_told + (origin.step if epoch == origin.epoch else 0)
        every = self._collective.commit_every_steps
        # An execution of several steps may pass over the one that was due.
        is_due = step // every > (last.step if epoch == last.epoch else 0) // every
        if is_due and step < self._steps_per_epoch:
            state = self._results.merged_state()
            flat = np.concatenate([np.ravel(array).astype(np.float64) for array in state])
            self._commit(Position(epoch, step), flat)

    def epoch_done(self, epoch: int, is_over: bool) -> None:
        """Commits at the end of an epoch; all processes call it.

        Args:
            epoch: that has ended.
            is_over: whether a callback has stopped the training.

        Raises:
            ProcessesChanged: the commit is there, and processes are about to join or to leave.
        """
        self._commit(Position(epoch + 1, 0), None, is_over or epoch + 1 >= self._epochs)

    def _commit(
        self, position: Position, metric_state: np.ndarray | None, is_over: bool = False
    ) -> None:
        will_change = not is_over and self._collective.will_change()
        start = self._start_at(position, metric_state)
        copies = [tf.identity(variable) for variable in self._variables()]
        self._last = _Commit(start, self._origin, copies, is_over)
        if will_change:
            raise ProcessesChanged

    def _start_at(self, position: Position, metric_state: np.ndarray | None) -> Start:
        origin, parts, told = self._origin, self._collective.planned_replicas, position.step
        if position.step and position.epoch == origin.position.epoch:
            told -= origin.position.step
            if origin.position.step:  # The rest of an epoch that others began, in their order.
                parts = origin.parts
        return Start(position, metric_state, parts, told)

    def _agree(self) -> Start | None:
        """Returns where all go on, None where nobody has begun."""
        mine = self._last.reached if self._last is not None else None
        told = self._collective.gather((self._number, mine))
        if _OUTSIDE in told or max(number for number, _ in told) > self._number:
            raise LaunchError(
                "a worker must join an elastic job during its first fit",
                received="a job that is past it",
                mend="Do nothing: the others go on without this one",
            )
        if min(number for number, _ in told) < self._number:
            raise ProcessLost("a process must leave a job that it cannot join")
        known = [reached for _, reached in told]
        if all(reached is None for reached in known):
            return None
        root = known.index(max(reached for reached in known if reached is not None))
        self._receive(root)
        return self._last.start

    def _receive(self, root: int) -> None:
        """Takes over the commit of process ``root``, and puts its values into the variables."""
        variables = self._variables()
        told = None
        if self._collective.process == root:
            told = (replace(self._last, variables=[]), self._present_notes())
        last, self._notes = self._collective.gather(told)[root]
        have = self._last.variables if self._last is not None else variables
        arrays = self._collective.hand_on([tensor.numpy() for tensor in have], root)
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)
        self._origin = last.origin
        self._last = replace(last, variables=[tf.identity(variable) for variable in variables])

    def _present_notes(self) -> _Notes:
        if not self._is_ready:  # What it has kept from before it was started anew.
            return self._notes
        seen = callback_state.written(self._callbacks)
        rates = [rate for _, rate in fixed_rates_of(self._model)]
        epochs = list(self._history.epoch)
        return _Notes(seen, epochs, self._history.history, rates, self._begun)

    def _keep(self) -> None:
        """Writes down the last commit, for a process in place of this one."""
        if self._last is not None:
            elastic_snapshot.write(
                self._collective.kept,
                [self._number, _written(self._last), asdict(self._present_notes())],
                self._last.variables,
            )

    def _take_kept(self) -> None:
        """Takes over what the process before this one has written of this fit, if there was one."""
        if not self._collective.kept.exists():
            return
        (number, last, notes), variables = elastic_snapshot.read(
            self._collective.kept, [variable.dtype for variable in self._variables()]
        )
        if number == self._number:
            self._last, self._notes = _read(last, variables), _Notes(**notes)

    def epoch_begun(self, epoch: int) -> None:
        """Notes that callbacks were told of an epoch's beginning, after those of others perhaps."""
        self._begun = epoch
        if self._notes is not None and self._notes.begun == epoch:
            self.take_rates()  # Those of others have set them already.

    def has_ended_before(self, epoch: int) -> bool:
        """Whether callbacks of others were told of an epoch's end."""
        return self._notes is not None and epoch in self._notes.epochs

    @property
    def has_stopped_before(self) -> bool:
        """Whether a callback had stopped the training by then."""
        return callback_state.has_stopped(self._callbacks, self._notes.callbacks)

    def _take_notes(self) -> None:
        self._begun = self._notes.begun  # Another loss may come before the next epoch begins here.
        callback_state.restore(self._callbacks, self._notes.callbacks)
        self._history.epoch = list(self._notes.epochs)
        self._history.history = {name: list(v) for name, v in self._notes.history.items()}
        self.take_rates()

    def take_rates(self) -> None:
        """Takes the learning rates of others, whose callbacks may have set them."""
        optimizers = [optimizer for optimizer, _ in fixed_rates_of(self._model)]
        put_rates(list(zip(optimizers, self._notes.rates, strict=True)))

    def _variables(self) -> list[tf.Variable]:
        optimizer = self._model.optimizer
        more = [*self._unknown, *seeds_in(self._model), *loss_scale_state(optimizer)]
        return [*variables_in(self._model), *variables_but_rates(optimizer), *more]


def repeat(
    model: tf.keras.Model,
    collective: ElasticCollective,
    explained: Callable[[], contextlib.AbstractContextManager],
    task: Callable[[], Any],
) -> Any:
    """Returns what ``task`` does, which changes no weight: anew whenever a process is lost.

    Args:
        explained: see ``Survival.run``.
    """
    for _ in range(_MOST_LOSSES_IN_PLACE):
        try:
            with explained():
                return task()
        except ProcessLost:
            forget_traces(model)
            collective.meet()
            # One that has joined now would begin with the fit: it hears this, and leaves.
            with contextlib.suppress(ProcessLost), explained():
                collective.gather(_OUTSIDE)
    return task()


def forget_traces(model: tf.keras.Model) -> None:
    """Graphs hold the number of processes."""
    forget_functions(model)
    forget_validation(model)
    model.reset_metrics()
