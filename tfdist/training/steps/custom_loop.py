"""``strategy.run``: the body of a hand-written loop, on all replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError, OptionError
from tfdist.training.engine.binding import Binding, Engine, binding_of
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.feed.feed import Feed
from tfdist.training.layers.autograph import with_autograph
from tfdist.training.model.deferred_build import build_now
from tfdist.training.steps import custom_steps


def run(
    step: Callable[[Any], dict[str, Any]],
    data: Any,
    model: tf.keras.Model,
    strategy_name: str,
    **options: Any,
) -> tf.keras.callbacks.History:
    """See ``Strategy.run``."""
    if isinstance(data, Feed):
        build_now(model, data)
    binding = binding_of(model, needed_by="strategy.run")
    _check(step, binding, strategy_name)
    body = step if model.run_eagerly else with_autograph(step)
    if binding.own_steps is None:
        taken = {"train_step": lambda data: body(data)} | keras.steps.on_results(lambda logs: logs)
    else:
        taken = binding.own_steps.taking(body)
    # One body is traced once, however often it runs.
    of = (step, binding.times_compiled)
    known, traced = binding.traced_body
    taken["train_function"] = traced if known == of else None
    with binding.taking(taken):
        history = model.fit(data, **options)
        binding.traced_body = of, model.train_function
    return history


def _check(step: Any, binding: Binding, strategy_name: str) -> None:
    if not callable(step) or len(_parameters(step)) != 1:
        raise OptionError(
            "strategy.run must be given a function of one parameter, the batch",
            received=f"{getattr(step, '__name__', type(step).__name__)}"
            + (f"({', '.join(_parameters(step))})" if callable(step) else ""),
            mend="Write def step(batch): x, y = batch; ...; return {'loss': loss}",
        )
    if binding.engine != Engine() or isinstance(binding.collective, ElasticCollective):
        raise ModelError(
            "a loop of one's own must run where each replica holds the whole model, and stays",
            received=f"strategy '{strategy_name}'"
            + (" in an elastic job" if binding.engine == Engine() else ""),
            mend="Use strategy 'single', 'mirrored', 'horovod' or 'multi_worker'",
        )
    if binding.own_steps is not None or binding.options.changes_the_step:
        custom_steps.check(binding.model, strategy_name, binding.options, ["step"])


def _parameters(step: Callable[..., Any]) -> list[str]:
    """Returns the names of those without a default."""
    found = inspect.signature(step).parameters.values()
    return [one.name for one in found if one.default is inspect.Parameter.empty]
