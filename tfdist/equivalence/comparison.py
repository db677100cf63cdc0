"""The same steps on a strategy and on one device.

Both start from the same weights and see the same global batches, an uneven last one included.
The one device runs plain Keras: nothing of tfdist is in its steps.

Where the two differ, the one device trains again, from weights that are a rounding off: what that
leads to, rounding alone leads to. (Rows in another order would be too little of it: in 16 bits a
gradient is rounded after its sum. And they would meet other random numbers, and other positions.)

Asynchronous workers do not repeat one device's weights. Of them only the loss is compared, and
within a bound (``LossComparison``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.equivalence.report import LayerDifference, LossComparison, Report
from tfdist.errors import ModelError
from tfdist.strategies import spec_of

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy
    from tfdist.training.feed.feed import Feed, MergedFeed
    from tfdist.training.feed.training_data import TrainingData


# By type, as a part of each weight. Sums over a batch gather some roundings in float32; those in
# 16 bits are taken in 32, and rounded once.
_OFF = {"float64": 2.0**-48, "float32": 2.0**-19, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_STARTS = 2  # By chance one may miss what another order of summation meets, as the kink of a ReLU.


def compare_once(
    model_fn: Any,
    feed: TrainingData,
    strategy: Strategy,
    epochs: int,
    tolerance: float,
    callbacks: Sequence[tf.keras.callbacks.Callback],
) -> Report:
    from tfdist.keras.settings import restart_names
    from tfdist.strategies.base import clone
    from tfdist.training.model.deferred_build import build_now

    made = functools.partial(independent, model_fn, strategy)
    reference = made()
    restart_names()
    model = strategy.build(model_fn)
    for each in (reference, model):
        build_now(each, feed)
    is_changed = _shapes(model) != _shapes(reference)
    if is_changed:  # The strategy has replaced layers: one device trains what is left, too.
        made = functools.partial(clone, clone(model))
        reference = made()
    else:
        model.set_weights(reference.get_weights())
    start = reference.get_weights()
    is_in_step = not spec_of(strategy.name).is_asynchronous or strategy.num_replicas == 1
    initial = None if is_in_step else _loss(model, feed.in_record_order())
    found = model.fit(feed, epochs=epochs, callbacks=[*callbacks], verbose=0).history
    train = functools.partial(
        _train_reference,
        feed=feed.on_one_device(),
        epochs=epochs,
        scaling=strategy.scaling,
        callbacks=callbacks,
    )
    expected = train(reference)
    report = Report(
        strategy=strategy.name,
        num_replicas=strategy.num_replicas,
        steps=epochs * feed.steps_per_epoch,
        tail=feed.tail,
        layers=_layer_differences(reference, model.get_weights()),
        loss_difference=_loss_difference(found, expected),
        tolerance=tolerance,
        is_changed=is_changed,
    )
    if initial is not None:
        same = feed.in_record_order()
        on_one_device = _loss(reference, same.on_one_device().epochs(0, 1))
        losses = LossComparison(initial, _loss(model, same), on_one_device)
        report = replace(report, losses=losses)
    elif report.exact:
        return report
    batches = feed.on_one_device().epochs(0, 1)
    draws = random_draws(reference, batches.element_spec)
    if initial is None and not draws:

        def train_off(seed: int) -> tuple[tuple[LayerDifference, ...], float | None]:
            model = made()
            build_now(model, feed)
            model.set_weights(_rounding_off(start, model, seed))
            loss = _loss_difference(train(model), expected)
            return _layer_differences(reference, model.get_weights()), loss

        report = report.beside([train_off(seed) for seed in range(_STARTS)])
        if report.exact:
            return report
    by_nature = chosen_approximations(reference, strategy)
    causes = (*by_nature, *draws, *known_causes(reference, batches))
    return replace(report, by_nature=by_nature, causes=causes)


def _rounding_off(weights: list[Any], model: tf.keras.Model, seed: int) -> list[Any]:
    """Returns weights that are off by what the coarsest layers of ``model`` round to."""
    from tfdist.keras.layers import layers_in

    computed_in = {getattr(layer, "compute_dtype", None) for layer in layers_in(model)}
    off = max((_OFF[each] for each in computed_in & set(_OFF)), default=_OFF["float32"])
    rng = np.random.default_rng(seed)
    return [
        np.asarray(weight * (1 + off * rng.choice([-1, 1], weight.shape)), weight.dtype)
        if np.issubdtype(np.asarray(weight).dtype, np.floating)
        else weight
        for weight in weights
    ]


def _loss_difference(found: dict[str, list], expected: dict[str, list]) -> float | None:
    if "loss" not in expected:  # A compute_loss of the user's own may show none.
        return None
    return _largest_difference(np.asarray(found["loss"]), np.asarray(expected["loss"]))


def _largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns it as a part of the largest of ``expected``, where that is more than 1."""
    return float(np.max(np.abs(found - expected)) / np.fmax(1.0, np.max(np.abs(expected))))


def _shapes(model: tf.keras.Model) -> list[tuple[int, ...]]:
    return [weight.shape for weight in model.get_weights()]


def _loss(model: tf.keras.Model, data: Any) -> float:
    found = model.evaluate(data, verbose=0, return_dict=True)
    if "loss" not in found:
        raise ModelError(
            "a model whose workers are asynchronous must show its loss, for that is compared",
            received=f"{type(model).__name__} with a compute_loss that shows none",
            mend="Keep a tf.keras.metrics.Mean(name='loss') in the model, and update it there",
        )
    return float(found["loss"])


def independent(model_fn: Any, strategy: Strategy) -> tf.keras.Model:
    """Returns a model of its own for one device, whatever the strategy does with ``model_fn``."""
    import tensorflow as tf

    from tfdist.keras.settings import restart_names
    from tfdist.strategies.base import called, clone
    from tfdist.training.model.precision import policy

    # Layers without a name of their own get the same in all, so that options can name them.
    restart_names()
    with policy(strategy.precision):
        model = called(model_fn, may_be_unbuilt=True)
        return clone(model) if isinstance(model_fn, tf.keras.Model) else model


def _train_reference(
    model: tf.keras.Model,
    feed: Feed | MergedFeed,
    epochs: int,
    scaling: Any,
    callbacks: Sequence[tf.keras.callbacks.Callback],
) -> dict[str, list[float]]:
    from tfdist.training.layers import eager_variables
    from tfdist.training.model.scaling import ScaleLearningRate

    callbacks = [*callbacks]
    if not scaling.is_off:
        scale = ScaleLearningRate(scaling, model.optimizer)
        scale.prepare(model.optimizer, feed.steps_per_epoch)
        callbacks.append(scale)
    batches = feed.epochs(0, epochs)
    eager_variables.make_slots(model)
    eager_variables.make_known_metrics(model, batches.element_spec)
    history = model.fit(
        batches,
        epochs=epochs,
        steps_per_epoch=feed.steps_per_epoch,
        callbacks=callbacks,
        shuffle=False,  # The feed does.
        verbose=0,
    )
    return history.history


def _layer_differences(
    reference: tf.keras.Model, weights: list[np.ndarray]
) -> tuple[LayerDifference, ...]:
    import tensorflow as tf

    from tfdist.keras.tensors import path_of, raw
    from tfdist.training.engine.metrics import state_of

    largest: dict[str, float] = {}
    sizes: dict[str, int] = {}
    # A model's own metrics are among its weights; each process has its part of them.
    of_metrics = {variable.ref() for variable in state_of(reference)}
    for weight, value in zip(reference.weights, weights, strict=True):
        variable = raw(weight)
        # A vocabulary is no variable.
        if not isinstance(variable, tf.Variable) or variable.ref() in of_metrics:
            continue
        expected = variable.numpy()
        if not np.issubdtype(expected.dtype, np.floating) or not expected.size:
            continue
        layer = path_of(weight).rpartition("/")[0] or path_of(weight)
        difference = _largest_difference(value, expected)
        largest[layer] = float(np.fmax(largest.get(layer, 0.0), difference))
        if np.isnan(difference):
            largest[layer] = math.nan
        sizes[layer] = sizes.get(layer, 0) + expected.size
    return tuple(LayerDifference(name, sizes[name], worst) for name, worst in largest.items())


def chosen_approximations(model: tf.keras.Model, strategy: Strategy) -> tuple[str, ...]:
    """Returns why the strategy, with its options, does not repeat one device on this model."""
    import tensorflow as tf

    from tfdist.keras.layers import layers_in
    from tfdist.training.engine.options import OfBatchNorm

    norms = any(isinstance(layer, tf.keras.layers.BatchNormalization) for layer in layers_in(model))
    return tuple(c for c in strategy.approximations if norms or not isinstance(c, OfBatchNorm))


def random_draws(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns what draws random numbers in a step, which are others on each replica."""
    from tfdist.training.layers.randomness import drawing_layers

    drawing = [f"layer '{layer.name}'" for layer in drawing_layers(model)]
    drawing += _others_that_draw(model, element_spec)
    return tuple(f"{each} draws other random numbers on each replica" for each in drawing)


def known_causes(model: tf.keras.Model, batches: tf.data.Dataset) -> tuple[str, ...]:
    """Returns what else of the model itself parts where such batches are divided."""
    import tensorflow as tf

    from tfdist.training.model.padding_warning import padded_by_batch
    from tfdist.training.steps import layer_state, row_probe
    from tfdist.training.steps.row_probe_rows import ROWS, filled_up

    element_spec, rows = batches.element_spec, None
    with contextlib.suppress(Exception):  # Reading tells what is wrong with data.
        first = next(iter(batches))
        rows = filled_up(tf.nest.map_structure(lambda tensor: tensor[:ROWS], first))
    causes = [
        f"layer '{name}' pads texts to the longest that a replica sees"
        for name in padded_by_batch(model)
    ]
    causes += layer_state.explained(row_probe.moved_by(model, element_spec))
    causes += row_probe.explained(model, element_spec, rows)
    return (*causes, *row_probe.step_explained(model, element_spec, rows))


def _others_that_draw(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns what of the user's own draws random numbers in a step: layers, or the step."""
    import tensorflow as tf

    from tfdist.training.layers.randomness import drawn_in, unseeded

    with contextlib.suppress(Exception):  # Whatever a user's step does where it is traced alone.
        graph = tf.function(model.train_step).get_concrete_function(element_spec).graph
        return drawn_in(model, unseeded(graph, graph.get_operations()))
    return []
