"""The processes of a job as a fit meets them: always the same ones, or some that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.keras.layers import replaced
from tfdist.training.checkpoints.checkpoint_state import Start
from tfdist.training.checkpoints.survival import Survival, repeat
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.feed.feed import Feed
from tfdist.training.layers import eager_variables
from tfdist.training.loops.callbacks import JobCallbacks

#: Encloses what an engine may end: turns its errors into those that a user can act on.
Explained = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit, in the parts that its processes go through.

    Attributes:
        feed: as it was given.
        epochs: number of the last one.
        chain: all callbacks.
        history: what the fit returns.
        explained: encloses the work.
        agree: makes sure that all processes have been given the same.
        prepare: makes ready, at the first step of a fit that other processes are in the middle of,
            if it is given; returns the first step.
        train: trains from a step to the end.
    """

    feed: Feed
    epochs: int
    chain: JobCallbacks
    history: tf.keras.callbacks.History
    explained: Explained
    agree: Callable[[], None]
    prepare: Callable[[Start | None], Start]
    train: Callable[[Start], None]


class FixedMembership:
    """Processes that stay."""

    shows_bar_by_callback = False

    def __init__(self, collective: Collective):
        self._collective = collective

    def present(self, feed: Feed) -> Feed:
        """Returns ``feed`` for the processes that there are now."""
        return feed

    def parts(self, feed: Feed) -> int:
        """Processes whose order of records a fit keeps, whatever their number is now."""
        return 1 if feed.is_in_order else self._collective.num_processes

    def verbosity(self, verbose: Any) -> Any:
        """Returns what this process shows of a loop."""
        if not self._collective.is_chief:
            return 0
        return 1 if verbose == "auto" else verbose

    def run(self, fit: Fit) -> None:
        """Trains to the end."""
        fit.agree()
        fit.train(fit.prepare(None))

    def run_again_if_lost(self, loop: Callable[[], Any], explained: Explained) -> Any:
        """Returns what a loop that trains nothing does."""
        return loop()


class ElasticMembership:
    """Processes that may be lost, and others that may join."""

    #: Whoever is the chief shows the bar, and that may become another.
    shows_bar_by_callback = True

    def __init__(self, binding: Binding):
        self._binding = binding
        self._collective: Any = binding.collective
        self._is_surviving = False  # Whether a fit takes care of losses, in its callbacks too.

    def present(self, feed: Feed) -> Feed:
        """See ``FixedMembership``.

        Raises:
            DataError: not every process can read all records.
        """
        if feed.held is not None or feed.records.is_sequential:
            raise DataError(
                "the processes of an elastic job must divide records that each of them can read",
                received="records that hosts hold apart, or that come through pipes",
                mend="Give each process all records as files or arrays, or use --max-restarts",
            )
        processes, process = self._collective.num_processes, self._collective.process
        return replace(feed, parts=processes, part=process, shared=True)

    def parts(self, feed: Feed) -> int:
        return self._collective.planned_replicas

    def verbosity(self, verbose: Any) -> Any:
        return 1 if verbose == "auto" else verbose

    def run(self, fit: Fit) -> None:
        """Trains on whatever processes there are, from the last commit after each change."""
        survival = Survival(
            self._binding, fit.chain.callbacks, fit.history, fit.epochs, fit.feed.steps_per_epoch
        )
        fit.chain.go_on_with(survival)

        def join(begun_at: Start) -> None:
            fit.prepare(begun_at)
            fit.chain.join()

        def agree_and_train(start: Start) -> None:
            fit.agree()
            fit.train(start)

        eager_variables.make_slots(self._binding.model)
        with replaced(self, _is_surviving=True):
            survival.run(
                fit.explained, begin=lambda: fit.prepare(None), join=join, train=agree_and_train
            )

    def run_again_if_lost(self, loop: Callable[[], Any], explained: Explained) -> Any:
        """Returns what a loop that trains nothing does; anew where a process is lost in it."""
        if self._is_surviving:
            return loop()
        return repeat(self._binding.model, self._collective, explained, loop)


def membership_of(binding: Binding) -> FixedMembership | ElasticMembership:
    """Returns the processes that the model of ``binding`` trains on."""
    if isinstance(binding.collective, ElasticCollective):
        return ElasticMembership(binding)
    return FixedMembership(binding.collective)
