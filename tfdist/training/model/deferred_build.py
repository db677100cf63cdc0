"""Models whose weights data makes: a Sequential without Input, one of a class of its own.

What a strategy puts on a model goes on its layers, too, and a step is traced over variables that
are there. So such a model is built from what the first loop is given, before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.records.reading.source import spec_of_rows
from tfdist.training.engine.binding import LOOPS
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import as_array, is_given_in_batches, peeked

# Where a model keeps what builds it.
_PLACE = "_tfdist_build_for"


def can_be_built(model: tf.keras.Model) -> bool:
    """Whether a batch tells what the weights of ``model`` are."""
    return keras.steps.CAN_BE_BUILT_LATE and keras.layers.can_be_called(model)


def build_with_first_data(
    model: tf.keras.Model, build: Callable[[Callable[[], None]], None]
) -> tf.keras.Model:
    """Has the first loop of ``model`` build it; returns it.

    Args:
        build: calls what it is given where the weights are to be made, and puts on the model what
            its loops need.
    """

    def build_for(spec: Any) -> None:
        _refuse_weights_from_elsewhere(model)
        first_loops = {name: vars(model).pop(name) for name in LOOPS}
        try:
            build(lambda: _make_weights(model, spec))
        except BaseException:  # Keras' own loops would train, and distribute nothing.
            vars(model).update(first_loops)
            raise

    def first(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(model, name))
        def loop(x: Any = None, *args: Any, **options: Any) -> Any:
            x, spec = _inputs_of(x)
            build_for(spec)
            return getattr(model, name)(x, *args, **options)

        return loop

    vars(model)[_PLACE] = build_for
    for name in LOOPS:
        setattr(model, name, first(name))
    return model


def build_now(model: tf.keras.Model, feed: Feed) -> None:
    """Builds a model as its first loop would, one that no strategy has built too."""
    if not keras.layers.is_built(model):
        build_for = vars(model).get(_PLACE, functools.partial(_make_weights, model))
        build_for(_inputs_of(feed)[1])


def _inputs_of(x: Any) -> tuple[Any, Any]:
    """Returns data, not read, and the tf.TensorSpec of the inputs that its batches hold."""
    if isinstance(x, Feed):
        return x, x.records.element_spec[0]
    if is_given_in_batches(x):
        x, spec = peeked(x)
        return x, spec[0]
    given = as_array(x)
    given = tuple(given) if type(given) is list else given
    return x, spec_of_rows(tf.nest.map_structure(np.asarray, given))


def _refuse_weights_from_elsewhere(model: tf.keras.Model) -> None:
    is_here = model.distribute_strategy.extended.variable_created_in_scope
    built = [layer for layer in keras.layers.layers_in(model) if layer.built]  # Others have none.
    if not all(is_here(weight) for layer in built for weight in keras.layers.variables_in(layer)):
        raise ModelError(
            "the weights of a model must be made in the scope of its strategy",
            received=f"model '{model.name}', which has been built outside of it",
            mend="Call it in model_fn, or leave it to the first fit, which builds it from its data",
        )


def _make_weights(model: tf.keras.Model, spec: Any) -> None:
    """Makes the weights, as the first step of Keras' own loop would."""
    tf.function(lambda x: model(x)).get_concrete_function(spec)
    if not keras.layers.is_built(model):
        raise ModelError(
            "a model must make all its weights when it is called with a batch",
            received=f"model '{model.name}', not built",
            mend="Begin it, and its submodels, with keras.Input(shape)",
        )
