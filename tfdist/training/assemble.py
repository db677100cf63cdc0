"""Puts on a model, in one order, what makes it train on a strategy: see ``binding``."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.keras.trackables import optimizers_of
from tfdist.training.engine.binding import LOOPS, Binding, Engine
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.engine.options import StepOptions
from tfdist.training.feed.feed import Feed
from tfdist.training.layers import batch_norm
from tfdist.training.layers.hugging_face import shared_loss
from tfdist.training.layers.randomness import Draws
from tfdist.training.loops.batch_methods import RunsAndBatches
from tfdist.training.memory.sharded_slots import ShardedSlots
from tfdist.training.memory.sharded_weights import ShardedWeights
from tfdist.training.model.compiled import check_scope, watched
from tfdist.training.model.manual_updates import Watch
from tfdist.training.model.padding_warning import warn_of_padding
from tfdist.training.model.refusals import (
    refuse_float8,
    refuse_late_slots,
    refuse_nadam,
    refuse_own_steps,
    refuse_steps_within_steps,
    refuse_undivided,
    refuse_xla,
)
from tfdist.training.model.scaling import Scaling
from tfdist.training.model.stateful_rnn import refuse_stateful
from tfdist.training.steps.custom_steps import STEPS, OwnSteps
from tfdist.training.steps.custom_steps import check as check_own_steps
from tfdist.training.steps.shared_steps import SharedSteps

_WRITERS = ("save", "save_weights", "export")


def assemble(
    binding: Binding,
    *,
    scaling: Scaling,
    strategy_name: str,
    dataset: Callable[..., Feed],
    options: StepOptions | None = None,
    engine: Engine | None = None,
    divides: bool = False,
    by_hand: str | ModelError | None = None,
) -> tf.keras.Model:
    """Makes the model of ``binding`` train over its replicas; returns it.

    Args:
        dataset: the strategy's own; arrays given to fit, evaluate or predict go through it.
        options: of the train step; None leaves it as it is.
        engine: what the engine has of its own.
        divides: whether a batch meets the loss in parts, other than those that the replicas and
            ``options`` make.
        by_hand: what a user's own loop over the model's optimizer means on this strategy, or the
            error that it is; None tells it from the replicas.
    """
    model, collective = binding.model, binding.collective
    engine = binding.engine = engine or Engine()
    options = binding.options = options or StepOptions()
    binding.sharded = engine.sharded
    check_scope(model)
    is_elastic = isinstance(collective, ElasticCollective)
    has_parts = is_elastic or collective.num_replicas > 1 or options.offloads_slots
    if options.divides_slots and has_parts:
        refuse = functools.partial(refuse_undivided, model, options, is_elastic=is_elastic)
        refuse()
        kind = ShardedWeights if options.shards_weights else ShardedSlots
        binding.sharded = kind(binding)
        binding.when_compiled(refuse)
    if is_elastic:
        refuse_late_slots(model)
    binding.enclose(engine.within)
    programs = collective.programs(model) | dict(engine.programs)
    binding.put(model, programs | {"get_metrics_result": binding.results})
    binding.put(model, keras.steps.knowing_results(model))
    shares = collective.shares_batches
    takes_shared_steps = (shares and not engine.takes_shares) or options.changes_the_step
    if takes_shared_steps:
        _put_shared_steps(binding, strategy_name, options)
    if engine.steps is not None:
        binding.put(model, {name: getattr(engine.steps, name) for name in STEPS})
    elif not takes_shared_steps:
        binding.enclose([(("train_step",), Draws(binding).told())])
    runs = RunsAndBatches(
        binding,
        scaling,
        strategy_name,
        dataset,
        _check_step if takes_shared_steps else None,
        divides=divides or shares or options.accumulate_steps > 1,
    )
    binding.put(model, {name: getattr(runs, name) for name in LOOPS} | dict(engine.loops))
    binding.enclose(engine.around)
    _watch_loops_by_hand(binding, by_hand)
    if engine.compiled is not None:
        binding.when_compiled(engine.compiled)
    binding.put(model, {"compile": watched(binding)})
    binding.enclose([(("load_weights",), functools.partial(_with_arrays, binding=binding))])
    if is_elastic or not collective.is_chief:
        by_chief = functools.partial(_by_chief, collective=collective)
        binding.enclose([(_WRITERS, _written_aside if collective.reads_together else by_chief)])
    if isinstance(binding.sharded, ShardedSlots):
        binding.enclose(binding.sharded.enclosures())
    if binding.sharded is not None:
        binding.enclose([(_WRITERS, binding.sharded.whole())])
    return model


def _put_shared_steps(binding: Binding, strategy_name: str, options: StepOptions) -> None:
    """Puts on the steps that all data-parallel engines share, and what layers do in them."""
    model, collective = binding.model, binding.collective
    shares = collective.shares_batches
    if shares and not isinstance(collective, ElasticCollective):
        check_own_steps(model, strategy_name, options)
    else:
        refuse_own_steps(model, strategy_name)
    _check_step(model)
    if shares or options.accumulate_steps > 1 or options.divides_slots:
        refuse_float8(model)
    refuse_stateful(
        model, "replicas that divide them" if shares else "microbatches or a second pass"
    )
    warn_of_padding(model, is_chief=collective.is_chief)
    for owner, values in (
        *keras.layers.losses_apart(model),
        *keras.seeds.draws_by_step(model),
        (model, keras.steps.building_nothing_from_data()),
    ):
        binding.put(owner, values)
    batch_norm.put_on(binding, synchronized=options.sync_batch_norm)
    steps = SharedSteps(binding, options)
    taken = {name: getattr(steps, name) for name in (STEPS if shares else ("train_step",))}

    def refuse_nadams() -> None:
        for optimizer in optimizers_of(model):
            refuse_nadam(optimizer, strategy_name)

    refuse_nadams()
    binding.when_compiled(refuse_nadams)
    if shares:
        binding.own_steps = OwnSteps(binding, options, steps.replica)
        taken |= binding.own_steps.in_place() | shared_loss(binding)
    binding.put(model, taken)


def _check_step(model: tf.keras.Model) -> None:
    refuse_xla(model)
    refuse_steps_within_steps(model)


def _watch_loops_by_hand(binding: Binding, by_hand: str | ModelError | None) -> None:
    collective, model = binding.collective, binding.model
    replicas = collective.planned_replicas
    if by_hand is None and replicas > 1:
        by_hand = (
            f"one of {replicas} devices did all the work"
            if collective.num_processes == 1 and not isinstance(collective, ElasticCollective)
            else f"each of the {replicas} ranks trains a model of its own"
        )
    if by_hand is not None:
        watch = Watch(binding, by_hand)
        watch.over(model.optimizer)
        binding.when_compiled(lambda: watch.over(model.optimizer))


def _with_arrays(load: Callable, binding: Binding) -> Callable:
    """Returns ``load``, in which metrics are given arrays.

    One of h5py cannot be divided among replicas, as TensorFlow does with sums.
    """

    @functools.wraps(load)
    def load_weights(*args: Any, **options: Any) -> Any:
        for metric in keras.losses.metrics_in_files(binding.model):
            binding.around(metric, "load_own_variables", _given_arrays)
        return load(*args, **options)

    return load_weights


def _given_arrays(_metric: Any, load: Callable, store: Any) -> None:
    load({name: np.asarray(store[name]) for name in store})


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
    def aside(*args: Any, **options: Any) -> None:
        path, *rest = args or [options.pop("filepath")]
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            save(os.path.join(folder, os.path.basename(path)), *rest, **options)

    return aside
