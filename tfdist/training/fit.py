"""The ``fit``, ``evaluate`` and ``predict`` of a model that a strategy has built.

They are the model's own, replaced on the instance: the model keeps its class and its file format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.records.reader import explain_read_error
from tfdist.training import callbacks as fit_callbacks
from tfdist.training.batch_norm import synchronize
from tfdist.training.checkpoint import Checkpoints, DataState, Start
from tfdist.training.collective import Collective
from tfdist.training.feed import Feed
from tfdist.training.metrics import MergedResults
from tfdist.training.scaling import EffectiveLearningRate, ScaleLearningRate, Scaling
from tfdist.training.steps import SharedSteps

# What Keras' loops take that a Feed has settled already.
_SETTLED_BY_FEED = (
    "y",
    "batch_size",
    "sample_weight",
    "shuffle",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_split",
    "validation_steps",
)


def install(
    model: tf.keras.Model,
    collective: Collective,
    *,
    scaling: Scaling,
    strategy_name: str,
    dataset: Callable[..., Feed],
) -> tf.keras.Model:
    """Makes ``model`` train over ``collective``; returns it.

    Args:
        dataset: the strategy's own; arrays given to fit, evaluate or predict go through it.
    """
    model.get_metrics_result = MergedResults(model, collective)
    if collective.num_replicas > 1:
        _refuse_custom_steps(model, strategy_name)
        synchronize(model, collective)
        steps = SharedSteps(model, collective)
        model.train_step = steps.train_step
        model.test_step = steps.test_step
        model.predict_step = steps.predict_step
    runs = _Runs(model, collective, scaling, strategy_name, dataset)
    model.fit = runs.fit
    model.evaluate = runs.evaluate
    model.predict = runs.predict
    return model


def _refuse_custom_steps(model: tf.keras.Model, strategy_name: str) -> None:
    for step in ("train_step", "test_step", "predict_step"):
        if getattr(type(model), step) is not getattr(tf.keras.Model, step):
            raise ModelError(
                f"strategy '{strategy_name}' brings its own {step}: it makes the shares of the "
                "replicas add up to one device's batch",
                received=f"{type(model).__name__} with a {step} of its own",
                mend="Move the custom part into compute_loss or a loss, or use strategy 'single'",
            )


class _Runs:
    """Keras' three loops, given a ``Feed`` where Keras takes data."""

    def __init__(
        self,
        model: tf.keras.Model,
        collective: Collective,
        scaling: Scaling,
        strategy_name: str,
        dataset: Callable[..., Feed],
    ):
        self._model = model
        self._collective = collective
        self._strategy_name = strategy_name
        self._dataset = dataset
        self._keras_fit = model.fit
        self._keras_evaluate = model.evaluate
        self._keras_predict = model.predict
        self._scaling = scaling
        self._scale = None if scaling.is_off else ScaleLearningRate(scaling, model.optimizer)

    # Keras' three methods -----------------------------------------------------------------------

    def fit(self, x: Any = None, *args: Any, **options: Any) -> tf.keras.callbacks.History:
        if self._is_plain_keras(x):
            return self._keras_fit(x, *args, **options)
        x, args, options = self._as_feed(x, args, options, training=True)
        return self._fit_feed(x, *args, **options)

    def evaluate(self, x: Any = None, *args: Any, **options: Any) -> Any:
        if options.get("_use_cached_eval_dataset") or self._is_plain_keras(x):
            return self._keras_evaluate(x, *args, **options)
        feed, _, options = self._as_feed(x, args, options, training=False)
        return self._evaluate_feed(feed, **options)

    def predict(self, x: Any = None, *args: Any, **options: Any) -> Any:
        if self._is_plain_keras(x):
            return self._keras_predict(x, *args, **options)
        if not isinstance(x, Feed):
            rows = len(tf.nest.flatten(x)[0])
            options = {"y": np.zeros(rows, np.int64), **options}
        feed, _, options = self._as_feed(x, args, options, training=False)
        return self._predict_feed(feed, **options)

    # Data ---------------------------------------------------------------------------------------

    def _is_plain_keras(self, x: Any) -> bool:
        return self._collective.num_replicas == 1 and not isinstance(x, Feed)

    def _as_feed(self, x: Any, args: tuple, options: dict, *, training: bool) -> tuple:
        """Turns arrays into a Feed; a Feed stays as it is and refuses what it settles itself."""
        if isinstance(x, Feed):
            settled = [name for name in _SETTLED_BY_FEED if options.get(name) is not None]
            if args or settled:
                raise OptionError(
                    "a dataset from strategy.dataset has its batches, weights and order already",
                    received=", ".join(settled) or f"{len(args)} more positional arguments",
                    mend="Give them to strategy.dataset, and the rest by name",
                )
            return x, (), options
        if isinstance(x, tf.data.Dataset) or not _are_arrays(x):
            raise DataError(
                f"a model of strategy '{self._strategy_name}' reads what strategy.dataset returns",
                received=type(x).__name__,
                mend="Write strategy.dataset(data, global_batch_size=...), data being a folder of "
                "shards, arrays, or an unbatched tf.data.Dataset",
            )
        options = dict(zip(("y", "batch_size"), args, strict=False)) | options
        arrays = (x, options.pop("y", None))
        sample_weight = options.pop("sample_weight", None)
        if sample_weight is not None:
            arrays = (*arrays, sample_weight)
        batch_size = options.pop("batch_size", None) or max(32, self._collective.num_replicas)
        options.pop("shuffle", None) if training else None
        return self._dataset(arrays, global_batch_size=batch_size, training=training), (), options

    def _batches(self, feed: Feed, first: int, last: int, skip_steps: int = 0) -> Any:
        return self._collective.distribute(lambda: feed.epochs(first, last, skip_steps=skip_steps))

    def _agree_on(self, feed: Feed) -> None:
        """Processes that disagree about the data would wait for each other for ever."""
        plan = (feed.num_records, feed.global_batch_size, feed.seed, feed.shuffle)
        plans = self._collective.gather(plan)
        if any(other != plans[0] for other in plans):
            listed = "; ".join(
                f"rank {rank}: {records} records, global_batch_size {size}, seed {seed}"
                for rank, (records, size, seed, _) in enumerate(plans)
            )
            raise DataError(
                "all ranks must give the same records, global_batch_size and seed to "
                "strategy.dataset; tfdist divides them",
                received=listed,
                mend="Give each rank the whole data",
            )

    @contextlib.contextmanager
    def _reading(self, feed: Feed) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            explained = explain_read_error(error, feed.records) or self._collective.explain(error)
            if explained is None:
                raise
            raise explained from error

    # The loops ----------------------------------------------------------------------------------

    def _fit_feed(
        self,
        feed: Feed,
        *,
        epochs: int = 1,
        initial_epoch: int = 0,
        callbacks: Any = None,
        validation_data: Any = None,
        verbose: Any = "auto",
        class_weight: dict[int, float] | None = None,
        **options: Any,
    ) -> tf.keras.callbacks.History:
        model = self._model
        feed = feed.weighted_by_class(class_weight)
        self._agree_on(feed)
        start = self._prepare(feed, callbacks or ())
        initial_epoch = start.position.epoch or initial_epoch
        chain = self._callback_list(callbacks, feed, epochs, self._verbosity(verbose))
        if validation_data is not None:
            validation = self._validation_feed(validation_data)
            options["validation_data"] = self._batches(validation, 0, 1)
            options["validation_steps"] = validation.steps_per_epoch

        def run(first: int, last: int, skip_steps: int = 0) -> None:
            chain.is_last_fit = last == epochs
            self._keras_fit(
                self._batches(feed, first, last, skip_steps),
                epochs=last,
                initial_epoch=first,
                steps_per_epoch=feed.steps_per_epoch - skip_steps,
                callbacks=chain,
                **options,
            )

        with self._reading(feed):
            if start.position.step and initial_epoch < epochs:
                # Keras' epochs have one length: the rest of the broken one is a fit of its own.
                model.get_metrics_result.carried = start.metric_state
                run(initial_epoch, initial_epoch + 1, start.position.step)
                model.get_metrics_result.carried = None
                initial_epoch += 1
                if model.stop_training and initial_epoch < epochs:
                    chain.is_last_fit = True
                    chain.on_train_end()
                    initial_epoch = epochs
            if initial_epoch < epochs:
                run(initial_epoch, epochs)
        return model.history

    def _evaluate_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        feed = feed.in_record_order()
        self._agree_on(feed)
        with self._reading(feed):
            return self._keras_evaluate(
                self._batches(feed, 0, 1),
                steps=feed.steps_per_epoch,
                verbose=self._verbosity(verbose),
                **options,
            )

    def _predict_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        """Returns one prediction for each record, in record order, on every process."""
        feed = feed.in_record_order()
        self._agree_on(feed)
        with self._reading(feed):
            local = self._keras_predict(
                self._batches(feed, 0, 1),
                steps=feed.steps_per_epoch,
                verbose=self._verbosity(verbose),
                **options,
            )
        # Each process has a range of records, so the ranges in the order of ranks are all records.
        parts = self._collective.gather(local)
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    # Before the first step ----------------------------------------------------------------------

    def _prepare(self, feed: Feed, callbacks: Any) -> Start:
        model = self._model
        with model.distribute_strategy.scope():
            if hasattr(model.optimizer, "build"):  # The slots must exist to be restored or sent.
                model.optimizer.build(model.trainable_variables)
        start = Start()
        keepers = [c for c in callbacks if isinstance(c, Checkpoints)]
        if keepers:
            data = DataState(
                feed.seed, feed.num_records, feed.steps_per_epoch, self._collective.num_processes
            )
            start = keepers[0].bind(model, self._collective, data)
        variables = model.optimizer.variables
        optimizer_state = variables() if callable(variables) else variables
        self._collective.broadcast([*model.variables, *optimizer_state])
        if self._scale is not None:
            updates = max(1, feed.steps_per_epoch // self._collective.batches_per_update)
            self._scale.prepare(model.optimizer, updates)
            if self._collective.is_chief:
                print(f"tfdist: {self._scaling.describe()}", flush=True)
        return start

    def _callback_list(
        self, callbacks: Any, feed: Feed, epochs: int, verbose: Any
    ) -> fit_callbacks.ContinuedCallbacks:
        own = [EffectiveLearningRate()]  # First: the user's loggers then see what it adds.
        if self._scale is not None:
            own.append(self._scale)
        users = fit_callbacks.for_process(callbacks, self._collective.is_chief)
        return fit_callbacks.ContinuedCallbacks(
            [*own, *users],
            add_history=True,
            add_progbar=verbose != 0,
            model=self._model,
            verbose=verbose,
            epochs=epochs,
            steps=feed.steps_per_epoch,
        )

    def _validation_feed(self, data: Any) -> Feed:
        if not isinstance(data, Feed):
            if self._is_plain_keras(data) and not isinstance(data, tuple):
                raise DataError(
                    "validation_data beside a dataset of this strategy comes from it too",
                    received=type(data).__name__,
                    mend="Write strategy.dataset(data, global_batch_size=..., training=False)",
                )
            x, *rest = data
            names = ("y", "sample_weight")
            data, _, _ = self._as_feed(x, (), dict(zip(names, rest, strict=False)), training=False)
        feed = data.in_record_order()
        self._agree_on(feed)
        return feed

    def _verbosity(self, verbose: Any) -> Any:
        if not self._collective.is_chief:
            return 0
        return 1 if verbose == "auto" else verbose


def _are_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)
