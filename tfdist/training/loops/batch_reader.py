"""Batches as the steps of a built model read them, and what an error in them means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError
from tfdist.records.reading.reader import explain_read_error
from tfdist.records.reading.shape_errors import explain_shape_error
from tfdist.training.engine.binding import Binding
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import peeked
from tfdist.training.layers.data_errors import (
    check_free_lengths,
    check_inputs,
    explain_class_error,
    explain_loss_error,
    explain_value_error,
)
from tfdist.training.loops import data_wait
from tfdist.training.memory.offload import explain_folder_error
from tfdist.training.model.stateful_rnn import check_batches
from tfdist.training.steps.custom_steps import own_steps


class BatchReader:
    """Reads batches for the steps of a model; all processes read together."""

    def __init__(self, binding: Binding):
        self._binding = binding
        self._model = binding.model
        self._collective = binding.collective

    def batches(
        self, feed: Feed, first: int, last: int, skip_steps: int = 0, watching: Sequence[Any] = ()
    ) -> Any:
        """Returns the batches of some epochs as the engine hands them to its steps.

        Args:
            first: epoch.
            last: epoch, not included.
            skip_steps: of the first epoch.
            watching: callbacks; one of them may measure the waits for data.
        """

        def opened() -> tf.data.Dataset:
            epochs = feed.epochs(first, last, skip_steps=skip_steps)
            wait = data_wait.among(watching)
            collective = self._collective
            if wait is None or keras.steps.steps_per_execution(self._model) > 1:
                return epochs
            if collective.fetches_ahead:
                wait.watch_steps(self._binding)
                return wait.watched(epochs, feed.steps_per_epoch, feed.splits)
            if collective.steps_await_batches:
                return wait.watched(epochs, feed.steps_per_epoch)
            collective.tell_waits(wait.note)
            return epochs

        return self._collective.distribute(opened)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes."""
        with self.steps():
            return self._collective.gather(value)

    def agree_on(self, feed: Feed) -> None:
        """Checks that the model takes this data, and that all processes were given the same.

        Processes that disagree would wait for each other for ever.
        """
        if not own_steps(self._model) and not self._binding.takes_body:  # They know what x is.
            check_inputs(self._model, feed.records.element_spec)
        if feed.records.padding is not None:
            check_free_lengths(self._model, feed.records.element_spec)
        check_batches(self._model, feed)
        if feed.num_replicas != self._collective.num_replicas:
            raise DataError(
                "a dataset must come from the strategy that built the model",
                received=f"a dataset for {feed.num_replicas} replicas, a model on "
                f"{self._collective.num_replicas}",
                mend="Make both with the same strategy object",
            )
        content = feed.records.fingerprint if feed.held is None else None
        content = (content, feed.records.padding_code)
        plan = (feed.num_records, feed.global_batch_size, feed.seed, feed.shuffle, content)
        with self.steps(feed):
            plans = self._collective.gather(plan)
        if any(other != plans[0] for other in plans):
            listed = "; ".join(
                f"rank {rank}: {records} records, global_batch_size {size}, seed {seed}"
                for rank, (records, size, seed, *_) in enumerate(plans)
            )
            if len({plan[:-1] for plan in plans}) == 1:
                other = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
                listed = f"other records, order or padding on rank {other} than on rank 0"
            raise DataError(
                "all ranks must give the same records, global_batch_size and seed to "
                "strategy.dataset, which divides them",
                received=listed,
                mend="Give each rank the whole data in one order: where it is drawn or shuffled, "
                "with a fixed seed",
            )

    @contextlib.contextmanager
    def steps(self, *feeds: Feed) -> Iterator[list[Any]]:
        """Encloses steps: explains their errors; gives the callbacks that watch them."""
        try:
            with self._collective.watched() as watch:
                yield watch
        except (tf.errors.OpError, ValueError) as error:
            explained = self._explained(error, feeds)
            if explained is None:
                raise
            raise explained from error

    @contextlib.contextmanager
    def given(self, *given: Any, class_weight: dict[int, float] | None = None) -> Iterator[None]:
        """Encloses what reads ``given`` data: explains what of its records cannot be."""
        try:
            yield
        except tf.errors.OpError as error:
            datasets = [data for data in given if isinstance(data, tf.data.Dataset)]
            spec = peeked(datasets[0])[1] if datasets else ()
            explained = (
                explain_shape_error(error, spec)
                or explain_class_error(error, class_weight)
                or explain_value_error(error, self._model)
            )
            if explained is None:
                raise
            raise explained from error

    def _explained(self, error: Exception, feeds: Sequence[Feed]) -> Exception | None:
        """Returns what an error of the engine or of Keras means; None when it is another."""
        specs = [feed.records.element_spec for feed in feeds]
        if isinstance(error, ValueError):
            found = (explain_loss_error(error, self._model, spec) for spec in specs)
            return next(filter(None, found), None)
        explained = explain_value_error(error, self._model)
        for feed, spec in zip(feeds, specs, strict=True):
            explained = (
                explained
                or explain_shape_error(error, spec)
                or explain_read_error(error, feed.records)
            )
        explained = explained or explain_folder_error(error, self._binding.options.offload_dir)
        return explained or self._collective.explain(error)
