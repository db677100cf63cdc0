"""``train_on_batch``, ``test_on_batch`` and ``predict_on_batch`` of a built model."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.records.reading.source import fingerprint
from tfdist.training.engine.binding import Binding, metric_names
from tfdist.training.feed.feed import Feed
from tfdist.training.layers import eager_variables
from tfdist.training.layers.data_errors import check_given_labels, check_labels
from tfdist.training.loops.fit import Runs, by_name
from tfdist.training.loops.membership import ElasticMembership
from tfdist.training.model import manual_updates


class RunsAndBatches(Runs):
    """Keras' loops, and its steps on one batch, whose rows the replicas divide.

    Each process is given the same batch, and takes its part.
    """

    def __init__(self, binding: Binding, *args: Any, **options: Any):
        super().__init__(binding, *args, **options)
        model = binding.model
        self._keras_train_on_batch = model.train_on_batch
        self._keras_test_on_batch = model.test_on_batch
        self._keras_predict_on_batch = model.predict_on_batch
        self._prepared_as: int | None = None  # The compilation that the ranks agree on.

    def train_on_batch(self, x: Any, *args: Any, **options: Any) -> Any:
        """See ``Model.train_on_batch``; the results are those of all rows."""
        options = by_name(tf.keras.Model.train_on_batch, args) | options
        _refuse_feed(x, "train_on_batch", "fit")
        if self._preparation.scale is not None:
            raise OptionError(
                "a learning rate that is scaled or warmed up must be trained with model.fit, "
                "which counts epochs",
                received="train_on_batch",
                mend="Call model.fit, or leave lr_scaling out",
            )
        with manual_updates.training(), self._results.carrying(None):
            if self._opening.is_plain_keras(x):
                check_given_labels(self._model, x, options)
                self._preparation.begin_slots()
                with self._reader.given(class_weight=options.get("class_weight")):
                    return self._keras_train_on_batch(x, **options)
            feed = self._one_batch("train_on_batch", x, options)
            feed = feed.weighted_by_class(options.pop("class_weight", None))
            if self._prepared_as != self._binding.times_compiled:
                self._preparation.prepare(feed, [])
                self._prepared_as = self._binding.times_compiled
            return self._step(feed, "train", **options)

    def test_on_batch(self, x: Any, *args: Any, **options: Any) -> Any:
        """See ``Model.test_on_batch``; the results are those of all rows."""
        options = by_name(tf.keras.Model.test_on_batch, args) | options
        _refuse_feed(x, "test_on_batch", "evaluate")
        with self._results.carrying(None):
            if self._opening.is_plain_keras(x):
                check_given_labels(self._model, x, options)
                with self._reader.given():
                    return self._keras_test_on_batch(x, **options)
            return self._step(self._one_batch("test_on_batch", x, options), "test", **options)

    def predict_on_batch(self, x: Any) -> Any:
        """See ``Model.predict_on_batch``; one prediction for each row, on every process."""
        _refuse_feed(x, "predict_on_batch", "predict")
        if self._opening.is_plain_keras(x):
            with self._reader.given():
                return self._keras_predict_on_batch(x)
        return self._predict_feed(self._one_batch("predict_on_batch", x, {}), verbose=0)

    def _one_batch(self, method: str, x: Any, options: dict) -> Feed:
        """Returns the rows as one global batch; takes labels and weights out of ``options``.

        Raises:
            ModelError: processes may be lost, and only a loop can be mended.
            DataError: the processes were given different rows.
        """
        if isinstance(self._membership, ElasticMembership):
            raise ModelError(
                "an elastic job must train, evaluate and predict in model.fit, evaluate and "
                "predict, which go on when a process is lost",
                received=method,
                mend="Call one of these",
            )
        arrays = self._opening.arrays(x, options)
        rows = len(tf.nest.flatten(arrays)[0])
        size = max(rows, self._collective.num_replicas)
        feed = self._opening.dataset(arrays, global_batch_size=size, training=False)
        with self._reader.steps(feed):
            found = self._collective.gather(fingerprint(arrays))
        others = [rank for rank, own in enumerate(found) if own != found[0]]
        if others:
            raise DataError(
                f"all ranks must give the same batch to {method}, which divides its rows",
                received=f"other rows on rank {others[0]} than on rank 0",
                mend="Give each rank the whole batch, read in the same order",
            )
        self._reader.agree_on(feed)
        return feed

    def _step(
        self, feed: Feed, kind: str, *, reset_metrics: bool = True, return_dict: bool = False
    ) -> Any:
        model = self._model
        check_labels(model, feed.records.element_spec)
        if reset_metrics:
            model.reset_metrics()
        eager_variables.make_known_metrics(model, feed.records.element_spec)
        with self._reader.steps(feed) as watchers:
            batches = iter(self._reader.batches(feed, 0, 1))
            for watcher in watchers:
                watcher.on_train_batch_begin(0)
            with model.distribute_strategy.scope():
                own = keras.steps.step_function(model, kind)(batches)
            found = keras.steps.showing(model)(own)  # Metrics are those of all processes.
            for watcher in watchers:
                watcher.on_train_batch_end(0)
        results = tf.nest.map_structure(keras.tensors.as_number, found)
        if return_dict:
            return results
        if keras.losses.told_names(model) is None:
            return keras.losses.in_order(model, results)
        known = [name for name in metric_names(model) if name in results]
        listed = [results[name] for name in (*known, *sorted(set(results) - set(known)))]
        return listed[0] if len(listed) == 1 else listed


def _refuse_feed(x: Any, method: str, loop: str) -> None:
    if isinstance(x, Feed):
        raise DataError(
            f"{method} must be given the rows of one batch",
            received="what strategy.dataset returned",
            mend=f"Call model.{loop}, or give arrays",
        )
