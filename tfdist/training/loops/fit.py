"""The ``fit``, ``evaluate`` and ``predict`` of a model that a strategy has built."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError, ModelError
from tfdist.training.checkpoints import callback_state
from tfdist.training.checkpoints.callback_state import growing_among
from tfdist.training.checkpoints.checkpoint import keepers_among, released_after
from tfdist.training.checkpoints.checkpoint_state import Start
from tfdist.training.engine.binding import Binding
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import is_given_in_batches
from tfdist.training.feed.keras_feed import GivenFeed
from tfdist.training.feed.rank_agreement import SameBatches
from tfdist.training.layers import eager_variables, loss_masks
from tfdist.training.layers.data_errors import check_given_labels, check_labels
from tfdist.training.loops import tracing
from tfdist.training.loops.batch_reader import BatchReader
from tfdist.training.loops.callbacks import JobCallbacks, for_process, have_stopped
from tfdist.training.loops.membership import Fit, membership_of
from tfdist.training.loops.noise_scale import at_rate_of_its_batch, check_growing
from tfdist.training.loops.opening import Opening
from tfdist.training.loops.preparation import Preparation
from tfdist.training.model import manual_updates
from tfdist.training.model.scaling import EffectiveLearningRate, Scaling


class Runs:
    """Keras' three loops, given a ``Feed`` where Keras takes data.

    Args:
        check: refuses a model that has been compiled anew as it cannot be trained.
        divides: whether losses see parts of a batch.
    """

    def __init__(
        self,
        binding: Binding,
        scaling: Scaling,
        strategy_name: str,
        dataset: Callable[..., Feed],
        check: Callable[[tf.keras.Model], None] | None,
        *,
        divides: bool,
    ):
        self._binding = binding
        self._results = binding.results
        model = self._model = binding.model
        self._collective = binding.collective
        self._membership = membership_of(binding)
        self._reader = BatchReader(binding)
        self._opening = Opening(binding, self._reader, strategy_name, dataset)
        self._preparation = Preparation(
            binding,
            self._membership,
            self._opening,
            self._reader,
            scaling,
            check,
            divides=divides,
        )
        self._keras_fit = model.fit
        self._keras_evaluate = model.evaluate
        self._keras_predict = model.predict

    # Keras' three methods -----------------------------------------------------------------------

    def fit(self, x: Any = None, *args: Any, **options: Any) -> tf.keras.callbacks.History:
        options = by_name(tf.keras.Model.fit, args) | options
        at_rate = at_rate_of_its_batch(self._binding, listed(options.get("callbacks")))
        try:
            with manual_updates.training(), self._results.carrying(None), at_rate:
                return self._fit(x, options)
        finally:
            if self._binding.noise is not None:  # Callbacks do not hear of a fit that fails.
                self._binding.noise = None
                self._model.train_function = None

    def _fit(self, x: Any, options: dict) -> tf.keras.callbacks.History:
        self._preparation.checks_rows = bool(options.pop("check_rows", True))
        keras.steps.forget_last_fit(self._model)
        if self._opening.is_plain_keras(x) and not self._needs_feed(options):
            check_given_labels(self._model, x, options)
            self._preparation.try_given(x, options)
            self._preparation.begin_slots()
            given = (x, options.get("validation_data"))
            with self._reader.given(*given, class_weight=options.get("class_weight")):
                return self._keras_fit(x, **options)
        feed = self._opening.opened(x, options)
        batch_size = 0 if isinstance(feed, GivenFeed) else feed.global_batch_size
        self._opening.open_validation(options, batch_size)
        both = (feed, options.get("validation_data"))
        seen = [one.seen for one in both if isinstance(one, GivenFeed)]
        if seen and self._collective.num_processes > 1:
            callbacks = listed(options.get("callbacks"))
            options["callbacks"] = [*callbacks, SameBatches(seen, self._collective)]
        return self._fit_feed(feed, **options)

    def evaluate(self, x: Any = None, *args: Any, **options: Any) -> Any:
        with self._results.carrying(None):  # It may be within a resumed epoch.
            return self._evaluate(x, by_name(tf.keras.Model.evaluate, args) | options)

    def _evaluate(self, x: Any, options: dict) -> Any:
        if options.get("_use_cached_eval_dataset"):  # The validation of a fit.
            return self._keras_evaluate(x, **options)
        if self._opening.is_plain_keras(x):
            check_given_labels(self._model, x, options)
            self._preparation.try_given_pass(x, options)
            with self._reader.given(x):
                return self._keras_evaluate(x, **options)
        return self._read(self._evaluate_feed, x, options)

    def predict(self, x: Any, *args: Any, **options: Any) -> Any:
        options = by_name(tf.keras.Model.predict, args) | options
        if self._opening.is_plain_keras(x):
            self._preparation.try_given_pass(x, options, predicts=True)
            with self._reader.given(x):
                return self._keras_predict(x, **options)
        return self._read(self._predict_feed, x, options)

    def _read(self, loop: Callable[..., Any], x: Any, options: dict) -> Any:
        if not is_given_in_batches(x):
            feed = self._opening.as_feed(x, options)
            explained = functools.partial(self._reader.steps, feed)
            return self._membership.run_again_if_lost(lambda: loop(feed, **options), explained)
        reads_on = keras.steps.steps_per_execution(self._model) == 1
        predicts = loop == self._predict_feed
        feed = self._opening.given_feed(x, options, "steps", predicts=predicts, reads_on=reads_on)
        results = loop(feed, **options)
        feed.seen.confirm(self._reader.gather)
        return results

    def _needs_feed(self, options: dict) -> bool:
        """Whether a fit asks for more than Keras can do with its own kinds of data."""
        return (
            self._preparation.scale is not None
            or isinstance(options.get("validation_data"), Feed)
            or bool(keepers_among(listed(options.get("callbacks"))))
            or growing_among(listed(options.get("callbacks"))) is not None
        )

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
        _check_own_fit(model)
        keras.steps.check_executions(model, feed.steps_per_epoch)
        if not self._binding.takes_body:
            check_labels(model, feed.records.element_spec)
        feed = self._membership.present(feed.weighted_by_class(class_weight))
        callbacks = listed(callbacks)
        growing = growing_among(callbacks)
        if growing is not None:
            check_growing(feed, callbacks, is_scaled=self._preparation.scale is not None)
        history = tf.keras.callbacks.History()
        history.on_train_begin()  # There may be nothing left to train.
        chain = self._chain(
            [*callbacks, history], feed, epochs, self._membership.verbosity(verbose)
        )

        def train(start: Start) -> None:
            if growing is not None:
                if start.callbacks:
                    growing.forget()
                    callback_state.restore([growing], start.callbacks)
                growing.begin(
                    feed.global_batch_size, feed.num_records, within_epoch=start.position.step > 0
                )
            next_epoch = start.position.epoch or initial_epoch
            feeds = [feed]
            if validation_data is not None:
                validation = self._validation_feed(validation_data)
                steps = validation.steps_per_epoch
                evaluated = validation.evaluated(is_masked=loss_masks.can_be(model))
                batches = self._reader.batches(evaluated, 0, 1)
                options["validation_data"] = keras.steps.repeatable(batches, steps)
                options["validation_steps"] = steps
                feeds.append(validation)

            def run(first: int, last: int, skip_steps: int = 0) -> None:
                sized = feed
                if growing is not None:
                    sized = dataclasses.replace(feed, global_batch_size=growing.batch)
                    chain.set_params({**chain.params, "steps": sized.steps_per_epoch})
                    for keeper in keepers_among(callbacks):
                        keeper.steps_of_epoch = sized.steps_per_epoch
                present = self._membership.present(sized)
                parts = start.parts if skip_steps else self._membership.parts(present)
                begun = present.begun_by(parts)
                told = start.steps_told if skip_steps else 0
                chain.begin_fit(is_last=last == epochs, steps_before=told)
                batches = self._reader.batches(begun, first, last, skip_steps, chain.callbacks)
                if not self._binding.takes_body:
                    eager_variables.make_known_metrics(model, feed.records.element_spec)
                keras.steps.forget_last_fit(model)
                with keras.optimizers.ended_by(chain.ends, model.optimizer, chain.end):
                    self._keras_fit(
                        batches,
                        epochs=last,
                        initial_epoch=first,
                        steps_per_epoch=sized.steps_per_epoch - skip_steps,
                        callbacks=chain,
                        shuffle=False,  # The feed does; Keras 3 would warn that it cannot.
                        **options,
                    )

            if self._preparation.scale is not None:
                self._preparation.scale.go_on(model.optimizer)
            for keeper in keepers_among(callbacks):
                keeper.go_on_at(start.position)
            if have_stopped(callbacks, self._collective):
                next_epoch = epochs
            if next_epoch >= epochs:
                for keeper in keepers_among(callbacks):
                    keeper.leave_as_ended(epochs)
            with self._reader.steps(*feeds) as watch:
                chain.watch_with(watch)
                if start.position.step and next_epoch < epochs:
                    # Keras' epochs have one length: the rest of the broken one is its own fit.
                    with self._results.carrying(start.metric_state):
                        run(next_epoch, next_epoch + 1, start.position.step)
                    next_epoch = epochs if model.stop_training else next_epoch + 1
                while next_epoch < epochs:
                    # Keras' epochs have one length, so those of growing batches are fits each.
                    last = epochs if growing is None else next_epoch + 1
                    run(next_epoch, last)
                    next_epoch = epochs if model.stop_training else last

        self._preparation.meet_rate()
        with released_after(callbacks), tracing.closing(chain.callbacks):
            self._membership.run(
                Fit(
                    feed=feed,
                    epochs=epochs,
                    chain=chain,
                    history=history,
                    explained=functools.partial(self._reader.steps, feed),
                    agree=lambda: self._reader.agree_on(self._membership.present(feed)),
                    prepare=functools.partial(self._preparation.prepare, feed, callbacks),
                    train=train,
                )
            )
        model.history = history
        return history

    def _evaluate_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        check_labels(self._model, feed.records.element_spec)
        self._preparation.try_pass(feed.records.element_spec)
        feed = self._membership.present(feed)
        with self._one_pass(feed, verbose, options) as told:
            is_masked = loss_masks.can_be(self._model)
            batches = self._reader.batches(feed.evaluated(is_masked=is_masked), 0, 1)
            eager_variables.make_known_metrics(self._model, feed.records.element_spec)
            return self._keras_evaluate(batches, **told)

    def _predict_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        """Returns one prediction for each record, in record order, on every process."""
        self._preparation.try_pass(feed.records.element_spec[:1])
        feed = self._membership.present(feed)
        with self._one_pass(feed, verbose, options) as told:
            local = self._keras_predict(self._reader.batches(feed.evaluated(), 0, 1), **told)
        return feed.in_order_of_records(self._collective.gather(local))

    @contextlib.contextmanager
    def _one_pass(self, feed: Feed, verbose: Any, options: dict) -> Iterator[dict[str, Any]]:
        """Encloses a loop that trains nothing; gives the options that Keras' own is told."""
        self._reader.agree_on(feed)
        notices = self._notices(verbose)
        told = keras.steps.told_steps(feed.steps_per_epoch)
        with self._reader.steps(feed) as watch, tracing.closing(notices), told as steps:
            callbacks = [*listed(options.get("callbacks")), *watch, *notices]
            shown = self._membership.verbosity(verbose)
            yield options | {"callbacks": callbacks, "steps": steps, "verbose": shown}

    def _chain(self, callbacks: list, feed: Feed, epochs: int, verbose: Any) -> JobCallbacks:
        # First: the user's loggers then see what it adds.
        own = [_EpochsAsTold(epochs), EffectiveLearningRate(), *self._notices(verbose)]
        if self._membership.shows_bar_by_callback and verbose != 0:
            callbacks = [*callbacks, keras.steps.steps_shown()]
        if self._preparation.scale is not None:
            own.append(self._preparation.scale)
        callbacks = for_process(
            callbacks,
            self._collective,
            gathers_slots=self._binding.sharded is not None,
            gathers_weights=self._binding.options.shards_weights,
        )
        return JobCallbacks(
            [*own, *callbacks],
            self._binding,
            add_progbar=verbose != 0 and not self._membership.shows_bar_by_callback,
            model=self._model,
            verbose=verbose,
            epochs=epochs,
            steps=feed.steps_per_epoch,
        )

    def _validation_feed(self, data: Any) -> Feed:
        if not isinstance(data, Feed):
            raise DataError(
                "validation_data beside a dataset of this strategy must come from it too",
                received=f"data of type {type(data).__name__}",
                mend="Write strategy.dataset(data, global_batch_size=..., training=False)",
            )
        feed = data.in_record_order()
        if not self._binding.takes_body:
            check_labels(self._model, feed.records.element_spec)
        feed = self._membership.present(feed)
        self._reader.agree_on(feed)
        return feed

    def _notices(self, verbose: Any) -> list[tracing.TracingNotice]:
        is_shown = self._collective.is_chief and self._membership.verbosity(verbose) != 0
        return [tracing.TracingNotice()] if is_shown else []


def by_name(method: Callable, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns positional arguments after ``x`` of one of Keras' loops by their names."""
    names = list(inspect.signature(method).parameters)[2:]
    return dict(zip(names, args, strict=False))


def listed(callbacks: Any) -> list[Any]:
    """Returns the callbacks that Keras' loops are given, as a list."""
    if callbacks is None:
        return []
    if type(callbacks) is tf.keras.callbacks.CallbackList:
        callbacks = callbacks.callbacks
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _check_own_fit(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the model's class has a fit that cannot be given batches.
    """
    try:
        inspect.signature(type(model).fit).bind(model, None, epochs=1)
    except TypeError as error:
        raise ModelError(
            "a fit of a model's own class must take what Keras' fit takes, since it is given "
            "batches of x and y together",
            received=f"{type(model).__name__}.fit, {error}",
            mend="Write fit(self, x=None, y=None, **options), or move what it does into a callback",
        ) from None


class _EpochsAsTold(tf.keras.callbacks.Callback):
    """Ends a fit that goes on behind the epochs it was told, for which there are no batches.

    Args:
        epochs: the last one.
    """

    def __init__(self, epochs: int):
        super().__init__()
        self._epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Raises:
        ModelError: the epoch is one too many.
        """
        if epoch >= self._epochs:
            raise ModelError(
                "a fit of a model's own class must train for the epochs that it is told",
                received=f"{type(self.model).__name__}.fit, which begins epoch {epoch + 1} of "
                f"{self._epochs}",
                mend="Give model.fit the epochs, and change them nowhere else",
            )
