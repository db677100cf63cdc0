"""The ``fit``, ``evaluate`` and ``predict`` of a model that a strategy has built."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError, OptionError
from tfdist.records.reading.reader import explain_read_error
from tfdist.records.reading.shape_errors import explain_shape_error
from tfdist.records.reading.source import fingerprint, spec_of_rows
from tfdist.training.checkpoints.checkpoint import keepers_among, released_after
from tfdist.training.checkpoints.checkpoint_state import ORDER, DataState, Start
from tfdist.training.engine.binding import Binding
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import (
    GivenData,
    as_array,
    is_bare_in_keras,
    is_given_in_batches,
    peeked,
)
from tfdist.training.feed.keras_feed import GivenFeed
from tfdist.training.feed.rank_agreement import SameBatches
from tfdist.training.feed.read_ahead import ReadAhead
from tfdist.training.layers import eager_variables, loss_masks
from tfdist.training.layers.data_errors import (
    check_free_lengths,
    check_given_labels,
    check_inputs,
    check_labels,
    explain_class_error,
    explain_id_error,
    explain_label_error,
    explain_loss_error,
)
from tfdist.training.loops import data_wait, tracing
from tfdist.training.loops.callbacks import JobCallbacks, for_process, have_stopped
from tfdist.training.loops.custom_fit import EpochsAsTold, check_own_fit
from tfdist.training.loops.membership import Fit, membership_of
from tfdist.training.memory.offload import explain_folder_error
from tfdist.training.model import manual_updates
from tfdist.training.model.lookup_vocabularies import check_vocabularies, follow_variables
from tfdist.training.model.scaling import EffectiveLearningRate, ScaleLearningRate, Scaling
from tfdist.training.model.stateful_rnn import check_batches
from tfdist.training.steps import layer_state, row_probe
from tfdist.training.steps.custom_steps import optimizers_of, own_steps
from tfdist.training.steps.row_probe_rows import ROWS, filled_up

# What Keras' loops take that a Feed has settled already.
_SETTLED_BY_FEED = ("steps", "steps_per_epoch")
_SETTLED_WITH_ARRAYS = ("y", "batch_size", "sample_weight", "shuffle", "validation_split")


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
        self._strategy_name = strategy_name
        self._dataset = dataset
        self._given = GivenData(self._collective, self._gather)
        self._check = check
        self._divides = divides
        self._tried: int | None = None  # Compilation whose losses divide, or are warned of.
        self._checks_rows = True
        self._keras_fit = model.fit
        self._keras_evaluate = model.evaluate
        self._keras_predict = model.predict
        self._scaling = scaling
        self._scale = None if scaling.is_off else ScaleLearningRate(scaling, model.optimizer)

    # Keras' three methods -----------------------------------------------------------------------

    def fit(self, x: Any = None, *args: Any, **options: Any) -> tf.keras.callbacks.History:
        with manual_updates.training():
            return self._fit(x, by_name(tf.keras.Model.fit, args) | options)

    def _fit(self, x: Any, options: dict) -> tf.keras.callbacks.History:
        self._checks_rows = bool(options.pop("check_rows", True))
        if self._is_plain_keras(x) and not self._needs_feed(options):
            check_given_labels(self._model, x, options)
            if self._divides and self._tried != self._binding.times_compiled:
                self._try_given(x, options)
            self._begin_slots()
            given = (x, options.get("validation_data"))
            with self._explaining_data(*given, class_weight=options.get("class_weight")):
                return self._keras_fit(x, **options)
        feed = self._opened(x, options)
        self._open_validation(options, 0 if isinstance(feed, GivenFeed) else feed.global_batch_size)
        both = (feed, options.get("validation_data"))
        seen = [one.seen for one in both if isinstance(one, GivenFeed)]
        if seen and self._collective.num_processes > 1:
            callbacks = _listed(options.get("callbacks"))
            options["callbacks"] = [*callbacks, SameBatches(seen, self._collective)]
        return self._fit_feed(feed, **options)

    def evaluate(self, x: Any = None, *args: Any, **options: Any) -> Any:
        options = by_name(tf.keras.Model.evaluate, args) | options
        if options.get("_use_cached_eval_dataset"):  # The validation of a fit.
            with self._results.without_carried():
                return self._keras_evaluate(x, **options)
        if self._is_plain_keras(x):
            check_given_labels(self._model, x, options)
            with self._explaining_data(x):
                return self._keras_evaluate(x, **options)
        return self._read(self._evaluate_feed, x, options)

    def predict(self, x: Any, *args: Any, **options: Any) -> Any:
        options = by_name(tf.keras.Model.predict, args) | options
        if self._is_plain_keras(x):
            with self._explaining_data(x):
                return self._keras_predict(x, **options)
        return self._read(self._predict_feed, x, options)

    def _read(self, loop: Callable[..., Any], x: Any, options: dict) -> Any:
        if not is_given_in_batches(x):
            return self._run_again_if_lost(loop, self._as_feed(x, options), options)
        reads_on = keras.steps.steps_per_execution(self._model) == 1
        feed = self._given_feed(x, options, "steps", reads_on=reads_on)
        results = loop(feed, **options)
        feed.seen.confirm(self._gather)
        return results

    @contextlib.contextmanager
    def _explaining_data(
        self, *given: Any, class_weight: dict[int, float] | None = None
    ) -> Iterator[None]:
        """Encloses what reads ``given`` data: explains what of its records cannot be."""
        try:
            yield
        except tf.errors.OpError as error:
            datasets = [data for data in given if isinstance(data, tf.data.Dataset)]
            spec = peeked(datasets[0])[1] if datasets else ()
            explained = (
                explain_shape_error(error, spec)
                or explain_class_error(error, class_weight)
                or self._explained_values(error)
            )
            if explained is None:
                raise
            keras.steps.forget_validation(self._model)  # The next fit brings data that was mended.
            raise explained from error

    # Data ---------------------------------------------------------------------------------------

    def _is_plain_keras(self, x: Any) -> bool:
        return not self._collective.shares_batches and not isinstance(x, Feed)

    def _try_given(self, x: Any, options: dict) -> None:
        """Does as ``_try_rows`` with what Keras takes itself, of which nothing is read before."""
        if isinstance(x, tf.data.Dataset):
            self._try_rows(peeked(x)[1], lambda count: None)
            return
        spec = None
        with contextlib.suppress(Exception):  # Keras takes more kinds than these.
            arrays = tf.nest.map_structure(np.asarray, self._arrays(x, dict(options)))
            spec = spec_of_rows(arrays)
        if spec is not None:
            self._try_rows(
                spec, lambda count: tf.nest.map_structure(lambda array: array[:count], arrays)
            )

    def _needs_feed(self, options: dict) -> bool:
        """Whether a fit asks for more than Keras can do with its own kinds of data."""
        return (
            self._scale is not None
            or isinstance(options.get("validation_data"), Feed)
            or bool(keepers_among(_listed(options.get("callbacks"))))
        )

    def _opened(self, x: Any, options: dict) -> Feed:
        """Returns what to train on; takes what it settles out of ``options``."""
        if isinstance(x, Feed):
            _refuse_settled(options)
            return x
        if is_given_in_batches(x):
            return self._given_feed(x, options, "steps_per_epoch", fits=True)
        arrays = self._arrays(x, options)
        validation_split = options.pop("validation_split", None)
        if validation_split:
            arrays, options["validation_data"] = _split(arrays, validation_split)
        batch_size = self._batch_size(options)
        shuffle = bool(options.pop("shuffle", True))
        return self._feed_of(arrays, batch_size, training=shuffle)

    def _given_feed(self, x: Any, options: dict, steps: str, **wanted: bool) -> GivenFeed:
        """Returns what ``GivenData.feed`` does, which may read all batches to count them."""
        with self._explaining_data(x):
            return self._given.feed(x, options, steps, **wanted)

    def _open_validation(self, options: dict, batch_size: int) -> None:
        """Makes feeds of what Keras takes for validation.

        Args:
            batch_size: of the fit, in which Keras evaluates arrays, too; 0 where it has its own.
        """
        data = options.get("validation_data")
        steps = options.pop("validation_steps", None)
        rows = options.pop("validation_batch_size", None)
        if is_given_in_batches(data):
            own = {"validation_steps": steps, "batch_size": rows}
            own |= ReadAhead.among(options)
            options["validation_data"] = self._given_feed(data, own, "validation_steps")
            return
        own = {"validation_steps": steps}
        if isinstance(data, Feed):
            own["validation_batch_size"] = rows
        _refuse_settled(own, tuple(own))
        rows = rows or batch_size or None
        if isinstance(data, (tuple, list)) and len(data) in (2, 3):
            x, *rest = data
            own = dict(zip(("y", "sample_weight"), rest, strict=False)) | {"batch_size": rows}
            options["validation_data"] = self._as_feed(x, own)

    def _gather(self, value: Any) -> list[Any]:
        with self._reading():
            return self._collective.gather(value)

    def _as_feed(self, x: Any, options: dict) -> Feed:
        """Returns ``x`` as a Feed in record order; takes what it settles out of ``options``."""
        if isinstance(x, Feed):
            _refuse_settled(options)
            return x.in_record_order()
        arrays = self._arrays(x, options)
        batch_size = self._batch_size(options)
        return self._feed_of(arrays, batch_size, training=False)

    def _feed_of(self, arrays: tuple[Any, ...], batch_size: int, *, training: bool) -> Feed:
        feed = self._dataset(arrays, global_batch_size=batch_size, training=training)
        if not own_steps(self._model) or not is_bare_in_keras(None, arrays):
            return feed
        return dataclasses.replace(feed, is_bare=True)

    def _arrays(self, x: Any, options: dict) -> tuple[Any, ...]:
        """Returns (x[, y[, sample_weight]]); takes them out of ``options``."""
        x = as_array(x)
        if not _are_arrays(x):
            raise DataError(
                f"a model of strategy '{self._strategy_name}' must be given what strategy.dataset "
                "returns",
                received=f"data of type {type(x).__name__}",
                mend="Write strategy.dataset(data, global_batch_size=...), data being a folder of "
                "shards, arrays, or a tf.data.Dataset",
            )
        y, sample_weight = (as_array(options.pop(name, None)) for name in ("y", "sample_weight"))
        arrays = [x] if y is None else [x, y] if sample_weight is None else [x, y, sample_weight]
        # Keras' users write several inputs or outputs as a list.
        return tuple(
            tuple(item) if isinstance(item, list) and _are_arrays(item) else item for item in arrays
        )

    def _batch_size(self, options: dict) -> int:
        if options.get("steps_per_epoch") is not None:
            raise OptionError(
                "arrays must be divided into batches by batch_size",
                received="the option steps_per_epoch",
                mend="Leave it out, or give batches: tf.data.Dataset.from_tensor_slices((x, y))"
                ".batch(size).repeat()",
            )
        _refuse_settled(options, _SETTLED_BY_FEED)
        return options.pop("batch_size", None) or max(32, self._collective.num_replicas)

    def _batches(
        self, feed: Feed, first: int, last: int, skip_steps: int = 0, watching: Sequence[Any] = ()
    ) -> Any:
        def batches() -> tf.data.Dataset:
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

        return self._collective.distribute(batches)

    def _agree_on(self, feed: Feed) -> None:
        """Processes that disagree about the data would wait for each other for ever."""
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
        with self._reading(feed):
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
    def _reading(self, *feeds: Feed) -> Iterator[list[Any]]:
        """Encloses steps: explains their errors; gives the callbacks that watch them."""
        try:
            with self._collective.watched() as watch:
                yield watch
        except (tf.errors.OpError, ValueError) as error:
            explained = self._explained(error, feeds)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, error: Exception, feeds: Sequence[Feed]) -> Exception | None:
        """Returns what an error of the engine or of Keras means; None when it is another."""
        specs = [feed.records.element_spec for feed in feeds]
        if isinstance(error, ValueError):
            found = (explain_loss_error(error, self._model, spec) for spec in specs)
            return next(filter(None, found), None)
        explained = self._explained_values(error)
        for feed, spec in zip(feeds, specs, strict=True):
            explained = (
                explained
                or explain_shape_error(error, spec)
                or explain_read_error(error, feed.records)
            )
        explained = explained or explain_folder_error(error, self._binding.options.offload_dir)
        return explained or self._collective.explain(error)

    def _explained_values(self, error: Exception) -> DataError | None:
        return explain_label_error(error) or explain_id_error(error, self._model)

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
        check_own_fit(model)
        if not self._binding.takes_body:
            check_labels(model, feed.records.element_spec)
        feed = self._membership.present(feed.weighted_by_class(class_weight))
        callbacks = _listed(callbacks)
        history = tf.keras.callbacks.History()
        history.on_train_begin()  # There may be nothing left to train.
        chain = self._chain(
            [*callbacks, history], feed, epochs, self._membership.verbosity(verbose)
        )

        def train(start: Start) -> None:
            present = self._membership.present(feed)
            next_epoch = start.position.epoch or initial_epoch
            feeds = [feed]
            if validation_data is not None:
                validation = self._validation_feed(validation_data)
                steps = validation.steps_per_epoch
                evaluated = validation.evaluated(is_masked=loss_masks.can_be(model))
                batches = self._batches(evaluated, 0, 1)
                options["validation_data"] = keras.steps.repeatable(batches, steps)
                options["validation_steps"] = steps
                feeds.append(validation)

            def run(first: int, last: int, skip_steps: int = 0) -> None:
                parts = start.parts if skip_steps else self._membership.parts(present)
                begun = present.begun_by(parts)
                told = start.steps_told if skip_steps else 0
                chain.begin_fit(is_last=last == epochs, steps_before=told)
                batches = self._batches(begun, first, last, skip_steps, chain.callbacks)
                if not self._binding.takes_body:
                    eager_variables.make_known_metrics(model, feed.records.element_spec)
                self._keras_fit(
                    batches,
                    epochs=last,
                    initial_epoch=first,
                    steps_per_epoch=feed.steps_per_epoch - skip_steps,
                    callbacks=chain,
                    shuffle=False,  # The feed does; Keras 3 would warn that it cannot.
                    **options,
                )

            for keeper in keepers_among(callbacks):
                keeper.go_on_at(start.position)
            if have_stopped(callbacks, self._collective):
                next_epoch = epochs
            if next_epoch >= epochs:
                for keeper in keepers_among(callbacks):
                    keeper.leave_as_ended()
            self._results.carried = None
            with self._reading(*feeds) as watch:
                chain.watch_with(watch)
                if start.position.step and next_epoch < epochs:
                    # Keras' epochs have one length: the rest of the broken one is its own fit.
                    self._results.carried = start.metric_state
                    run(next_epoch, next_epoch + 1, start.position.step)
                    self._results.carried = None
                    next_epoch = epochs if model.stop_training else next_epoch + 1
                if next_epoch < epochs:
                    run(next_epoch, epochs)

        with released_after(callbacks), tracing.closing(chain.callbacks):
            self._membership.run(
                Fit(
                    feed=feed,
                    epochs=epochs,
                    chain=chain,
                    history=history,
                    explained=functools.partial(self._reading, feed),
                    agree=lambda: self._agree_on(self._membership.present(feed)),
                    prepare=functools.partial(self._prepare, feed, callbacks),
                    train=train,
                )
            )
        model.history = history
        return history

    def _run_again_if_lost(self, loop: Callable[..., Any], feed: Feed, options: dict) -> Any:
        explained = functools.partial(self._reading, feed)
        return self._membership.run_again_if_lost(lambda: loop(feed, **options), explained)

    def _evaluate_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        check_labels(self._model, feed.records.element_spec)
        feed = self._membership.present(feed)
        self._agree_on(feed)
        notices = self._notices(verbose)
        told = keras.steps.told_steps(feed.steps_per_epoch)
        with self._reading(feed) as watch, tracing.closing(notices), told as steps:
            options["callbacks"] = [*_listed(options.get("callbacks")), *watch, *notices]
            is_masked = loss_masks.can_be(self._model)
            batches = self._batches(feed.evaluated(is_masked=is_masked), 0, 1)
            eager_variables.make_known_metrics(self._model, feed.records.element_spec)
            return self._keras_evaluate(
                batches,
                steps=steps,
                verbose=self._membership.verbosity(verbose),
                **options,
            )

    def _predict_feed(self, feed: Feed, *, verbose: Any = "auto", **options: Any) -> Any:
        """Returns one prediction for each record, in record order, on every process."""
        feed = self._membership.present(feed)
        self._agree_on(feed)
        notices = self._notices(verbose)
        told = keras.steps.told_steps(feed.steps_per_epoch)
        with self._reading(feed) as watch, tracing.closing(notices), told as steps:
            options["callbacks"] = [*_listed(options.get("callbacks")), *watch, *notices]
            local = self._keras_predict(
                self._batches(feed.evaluated(), 0, 1),
                steps=steps,
                verbose=self._membership.verbosity(verbose),
                **options,
            )
        return feed.in_order_of_records(self._collective.gather(local))

    # Before the first step ----------------------------------------------------------------------

    def _prepare(self, feed: Feed, callbacks: Any, begun_at: Start | None = None) -> Start:
        """Returns the first step; ``begun_at``: that of a fit which others are in the middle of."""
        model = self._model
        keras.steps.check_executions(model, feed.steps_per_epoch)
        if self._check is not None:
            self._check(model)
        if self._divides and self._tried != self._binding.times_compiled:
            self._try_rows(feed.records.element_spec, feed.first_rows, tells=begun_at is None)
        keepers = keepers_among(callbacks)
        restores = any(keeper.resume for keeper in keepers)
        in_parts = bool(keepers) and keepers[0].meet(self._binding)
        with self._binding.begun_slots(restores=restores, in_parts=in_parts):
            start = self._begin_alike(feed, callbacks, begun_at)
        if self._scale is not None:
            self._scale.prepare(model.optimizer, feed.steps_per_epoch)
            if self._collective.is_chief and begun_at is None:
                print(f"tfdist: {self._scaling.describe()}", flush=True)
        return start

    def _try_rows(
        self, element_spec: Any, first_rows: Callable[[int], Any], *, tells: bool = True
    ) -> None:
        """Tries what couples the rows of a batch, of which a line warns; see ``row_probe``.

        Args:
            element_spec: of a batch.
            first_rows: returns that many rows of the data, or fewer, or None.
            tells: whether this process has not been told in the same fit.
        """
        model = self._model
        moved = self._binding.moved = row_probe.moved_by(model, element_spec)
        layer_state.refuse_without_way(moved)
        self._binding.alike_look_ups = row_probe.looked_up_alike(model, element_spec)
        if tells and self._checks_rows:
            # On all processes: what a user's layer or loss does may need them all.
            options = self._binding.options
            by_microbatch = not self._collective.shares_batches or options.accumulate_steps > 1
            saves_memory = options.recomputes or options.offloads
            rows = None
            with contextlib.suppress(Exception):  # Reading tells what is wrong with data.
                rows = filled_up(first_rows(ROWS))
            # With other rows, a rank could do without what others need it for.
            sums = self._gather(None if rows is None else fingerprint(rows))
            rows = rows if sums == [sums[0]] * len(sums) else None
            found = [
                *row_probe.explained(model, element_spec, rows, gradients=not saves_memory),
                *layer_state.explained(moved, by_microbatch=by_microbatch),
            ]
            if found and self._collective.is_chief:
                print(f"tfdist: warning: {'; '.join(found)}", flush=True)
        self._tried = self._binding.times_compiled

    def _begin_slots(self) -> None:
        """Makes ready for steps that Keras' own loops take: slots may lie on the host."""
        with self._binding.begun_slots():
            pass

    def _begin_alike(self, feed: Feed, callbacks: Any, begun_at: Start | None) -> Start:
        """Gives all processes the chief's variables, those of a checkpoint if it resumes."""
        model = self._model
        if self._binding.sharded is None:
            eager_variables.make_slots(model)  # They must exist to be restored or sent.
        if self._collective.num_processes > 1 and optimizers_of(model) != [model.optimizer]:
            self._trace(feed)  # What a step gives to other optimizers is known when it is traced.
        start = Start()
        keepers = keepers_among(callbacks)
        if keepers:
            data = DataState(
                seed=feed.seed,
                num_records=feed.num_records,
                global_batch_size=feed.global_batch_size,
                steps_per_epoch=feed.steps_per_epoch,
                parts=self._membership.parts(feed),
                padding=feed.records.padding_code,
                order=ORDER,
            )
            confirm = getattr(feed.records, "confirm", None)
            start = keepers[0].bind(self._binding, data, begun_at=begun_at, confirm=confirm)
        if begun_at is None:
            optimizers = optimizers_of(model)
            optimizer_state = [v for one in optimizers for v in keras.optimizers.variables_of(one)]
            scale = keras.optimizers.loss_scale_state(model.optimizer)
            seeds = keras.layers.seeds_in(model)
            held = self._binding.engine.weights
            weights = keras.layers.variables_in(model) if held is None else held()
            variables = self._binding.held([*weights, *optimizer_state])
            self._collective.broadcast([*variables, *seeds, *scale])
            follow_variables(model)
            check_vocabularies(model, self._collective)
        return start

    def _trace(self, feed: Feed) -> None:
        model = self._model
        with model.distribute_strategy.scope():
            step = keras.steps.step_function(model, "train")
        if hasattr(step, "get_concrete_function"):  # Not in eager execution.
            specimen = feed.specimen() if isinstance(feed, GivenFeed) else feed
            step.get_concrete_function(iter(self._batches(specimen, 0, 1)))

    def _chain(self, callbacks: list, feed: Feed, epochs: int, verbose: Any) -> JobCallbacks:
        # First: the user's loggers then see what it adds.
        own = [EpochsAsTold(epochs), EffectiveLearningRate(), *self._notices(verbose)]
        divided = {
            "gathers_slots": self._binding.sharded is not None,
            "gathers_weights": self._binding.options.shards_weights,
        }
        if self._membership.shows_bar_by_callback and verbose != 0:
            callbacks = [*callbacks, keras.steps.steps_shown()]
        if self._scale is not None:
            own.append(self._scale)
        return JobCallbacks(
            [*own, *for_process(callbacks, self._collective, **divided)],
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
        self._agree_on(feed)
        return feed

    def _notices(self, verbose: Any) -> list[tracing.TracingNotice]:
        is_shown = self._collective.is_chief and self._membership.verbosity(verbose) != 0
        return [tracing.TracingNotice()] if is_shown else []


def by_name(method: Callable, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns positional arguments after ``x`` of one of Keras' loops by their names."""
    names = list(inspect.signature(method).parameters)[2:]
    return dict(zip(names, args, strict=False))


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _refuse_settled(
    options: dict, names: tuple[str, ...] = (*_SETTLED_WITH_ARRAYS, *_SETTLED_BY_FEED)
) -> None:
    settled = [name for name in names if options.get(name) is not None]
    if settled:
        raise OptionError(
            "what strategy.dataset has settled must not be given to fit, evaluate or predict again",
            received=f"the option {settled[0]}"
            if len(settled) == 1
            else f"the options {', '.join(settled)}",
            mend="Leave it out, or give it to strategy.dataset instead",
        )


def _are_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _split(arrays: tuple[Any, ...], validation_split: float) -> tuple[Any, Any]:
    """Divides as Keras does: validation takes the last rows, before any shuffling."""
    rows = len(tf.nest.flatten(arrays)[0])
    kept = int(rows * (1 - validation_split))
    if not 0 < kept < rows:
        raise OptionError(
            "validation_split must leave records on both sides",
            received=f"{validation_split} of {rows} records",
        )
    return (
        tf.nest.map_structure(lambda array: array[:kept], arrays),
        tf.nest.map_structure(lambda array: array[kept:], arrays),
    )
