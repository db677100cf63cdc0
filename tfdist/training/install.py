"""What a strategy replaces on a model that it has built: its steps, its loops, its writers.

They are the model's own, replaced on the instance: the model keeps its class and its file format.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training import batch_norm, keras_api, own_steps
from tfdist.training.by_hand import Watch
from tfdist.training.collective import Collective
from tfdist.training.compiled import check_scope, on_compile
from tfdist.training.elastic import ElasticCollective
from tfdist.training.feed import Feed
from tfdist.training.metrics import MergedResults
from tfdist.training.on_batch import RunsAndBatches
from tfdist.training.options import StepOptions
from tfdist.training.refusals import (
    refuse_late_slots,
    refuse_on_keras_3,
    refuse_own_steps,
    refuse_steps_within_steps,
    refuse_xla,
)
from tfdist.training.scaling import Scaling
from tfdist.training.stateful import refuse_stateful
from tfdist.training.steps import SharedSteps
from tfdist.training.text import warn_of_padding


def install(
    model: tf.keras.Model,
    collective: Collective,
    *,
    scaling: Scaling,
    strategy_name: str,
    dataset: Callable[..., Feed],
    options: StepOptions | None = None,
    divides: bool = False,
    by_hand: str | ModelError | None = None,
) -> tf.keras.Model:
    """Makes ``model`` train over ``collective``; returns it.

    Args:
        dataset: the strategy's own; arrays given to fit, evaluate or predict go through it.
        options: of the train step; None leaves it as it is.
        divides: whether a batch meets the loss in parts, other than those that ``collective`` and
            ``options`` make.
        by_hand: what a user's own loop over the model's optimizer means on this strategy, or the
            error that it is; None tells it from the replicas.
    """
    check_scope(model)
    options = options or StepOptions()
    model.get_metrics_result = MergedResults(model, collective)
    shares = collective.shares_batches
    check = _check_step if shares or options.changes_the_step else None
    is_elastic = isinstance(collective, ElasticCollective)
    refuse_on_keras_3(is_elastic=is_elastic, options=options)
    if is_elastic:
        refuse_late_slots(model)
    if check is not None:
        if shares and not is_elastic:
            own_steps.check(model, strategy_name, options)
        else:
            refuse_own_steps(model, strategy_name)
        check(model)
        refuse_stateful(
            model, "replicas that divide them" if shares else "microbatches or a second pass"
        )
        warn_of_padding(model, is_chief=collective.is_chief)
        keras_api.keep_losses_apart(model)
        keras_api.draw_by_replica(model)
        keras_api.build_nothing_from_data(model)
        batch_norm.install(model, collective, synchronized=options.sync_batch_norm)
        steps = SharedSteps(model, collective, options)
        model.train_step = steps.train_step
        if shares:
            model.test_step = steps.test_step
            model.predict_step = steps.predict_step
            own_steps.OwnSteps(model, collective, options, steps.replica).replace()
    divides = divides or shares or options.accumulate_steps > 1
    runs = RunsAndBatches(
        model, collective, scaling, strategy_name, dataset, check, divides=divides
    )
    model.fit = runs.fit
    model.evaluate = runs.evaluate
    model.predict = runs.predict
    model.train_on_batch = runs.train_on_batch
    model.test_on_batch = runs.test_on_batch
    model.predict_on_batch = runs.predict_on_batch
    _watch_compiling(model, collective, by_hand)
    if is_elastic or not collective.is_chief:
        for name in ("save", "save_weights", "export"):
            save = getattr(model, name)
            aside = collective.reads_together
            setattr(model, name, _written_aside(save) if aside else _by_chief(save, collective))
    return model


def _check_step(model: tf.keras.Model) -> None:
    refuse_xla(model)
    refuse_steps_within_steps(model)


def _watch_compiling(
    model: tf.keras.Model, collective: Collective, by_hand: str | ModelError | None
) -> None:
    replicas = collective.planned_replicas
    if by_hand is None and replicas > 1:
        by_hand = (
            f"one of {replicas} devices did all the work"
            if collective.num_processes == 1 and not isinstance(collective, ElasticCollective)
            else f"each of the {replicas} ranks trains a model of its own"
        )
    if by_hand is None:
        on_compile(model, lambda: None)
        return
    watch = Watch(by_hand, is_chief=collective.is_chief)
    watch.over(model.optimizer)
    on_compile(model, lambda: watch.over(model.optimizer))


def _by_chief(save: Callable, collective: Collective) -> Callable:
    """Returns ``save`` for a process that leaves it to another one for as long as that is chief."""

    @functools.wraps(save)
    def save_if_chief(*args: Any, **options: Any) -> None:
        if collective.is_chief:
            save(*args, **options)

    return save_if_chief


def _written_aside(save: Callable) -> Callable:
    """Returns ``save`` for a process that must read its part of the model, and keeps no file."""

    @functools.wraps(save)
    def aside(path: Any, *args: Any, **options: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            save(os.path.join(folder, os.path.basename(path)), *args, **options)

    return aside
