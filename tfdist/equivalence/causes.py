"""What is known to make a strategy's weights other ones than one device's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy


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
    return (*causes, *row_probe.step_explained(model, element_spec))


def _others_that_draw(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns what of the user's own draws random numbers in a step: layers, or the step."""
    import tensorflow as tf

    from tfdist.training.layers.randomness import drawn_in

    with contextlib.suppress(Exception):  # Whatever a user's step does where it is traced alone.
        graph = tf.function(model.train_step).get_concrete_function(element_spec).graph
        return drawn_in(model, graph, graph.get_operations())
    return []
