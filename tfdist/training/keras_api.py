"""What Keras has no public name for, or names otherwise from one version to the next.

Nothing else in tfdist touches a private name of Keras, which ruff holds (SLF001). Each function
says what it hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat import keras_source

# Tensors and variables --------------------------------------------------------------------------


def mask_of(tensor: Any) -> tf.Tensor | None:
    """Returns the mask that Keras has attached to ``tensor``, None where there is none.

    Keras reads it in the next layer, in losses and in metrics; its shape is [batch, ...].
    """
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: Any, mask: tf.Tensor | None) -> Any:
    """Returns ``tensor``, to which ``mask`` is attached if there is one."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def casts(variable: Any) -> bool:
    """Whether mixed precision has wrapped ``variable`` into one that casts when it is read."""
    return isinstance(variable, keras_source("mixed_precision.autocast_variable").AutoCastVariable)


def uncast(variable: Any) -> tf.Variable:
    """Returns the variable itself, where mixed precision has wrapped it."""
    return getattr(variable, "_variable", variable)


# Layers and the graph of a model ----------------------------------------------------------------


def layers_in(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """Returns ``layer`` and all layers inside of it or of a model, at any depth.

    ``layer.submodules`` would fail on recurrent layers with dropout, whose cache of masks it
    cannot walk through; Keras' own walk has no public name.
    """
    return list(layer._flatten_layers())


def variables_in(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Returns the weights of ``layer`` that are variables.

    Keras counts a vocabulary among the weights of a lookup layer: a table, which has no shape.
    """
    return [weight for weight in layer.weights if isinstance(weight, tf.Variable)]


def has_graph(model: Any) -> bool:
    """Whether ``model`` is a Functional or Sequential model that knows its graph of layers."""
    return bool(getattr(model, "_is_graph_network", False))


def nodes_of(model: tf.keras.Model) -> list[Any]:
    """Returns the calls of layers in the graph of ``model``, in an order in which they can run.

    A node has ``layer``, ``outputs``, ``keras_inputs``, ``call_kwargs`` and ``map_arguments``.
    """
    by_depth = model._nodes_by_depth
    depths = sorted(by_depth, reverse=True)
    return [node for depth in depths for node in by_depth[depth] if not node.is_input]


def num_readers(model: tf.keras.Model, symbol: Any) -> int:
    """Returns how often the graph of ``model`` reads a symbolic tensor, its outputs included."""
    return model._tensor_usage_count[str(id(symbol))]


def nested_inputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic inputs in the structure in which the model takes them."""
    return model._nested_inputs


def nested_outputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic outputs in the structure in which the model gives them."""
    return model._nested_outputs


def flat_inputs(model: tf.keras.Model, x: Any) -> list[Any]:
    """Returns ``x``, in any structure that the model takes, in the order of ``model.inputs``."""
    return list(tf.nest.flatten(model._flatten_to_reference_inputs(x)))


def conformed_inputs(model: tf.keras.Model, x: Any) -> list[tf.Tensor]:
    """Returns ``x`` flat, cast and reshaped as Keras does before it calls the layers."""
    pairs = zip(flat_inputs(model, x), model.inputs, strict=True)
    return [model._conform_to_reference_input(tensor, symbol) for tensor, symbol in pairs]


def is_operator(layer: Any) -> bool:
    """Whether ``layer`` stands for an operation that a user wrote on symbolic tensors."""
    kinds = keras_source("layers.core.tf_op_layer")
    return isinstance(layer, (kinds.TFOpLambda, kinds.SlicingOpLambda))


def is_slicing(layer: Any) -> bool:
    """Whether that operation is a slice, as ``x[:, 0]``."""
    return isinstance(layer, keras_source("layers.core.tf_op_layer").SlicingOpLambda)


def casts_inputs(layer: tf.keras.layers.Layer) -> bool:
    """Whether ``layer`` casts floating inputs to its compute dtype."""
    return layer._autocast


def random_generator(layer: tf.keras.layers.Layer) -> Any | None:
    """Returns the object that all random numbers of ``layer`` come from, None without one."""
    return getattr(layer, "_random_generator", None)


def num_added_losses(layer: tf.keras.layers.Layer) -> int:
    """Returns how many losses ``layer`` itself adds, those of regularizers included."""
    return len(layer._callable_losses)


def merged(layer: tf.keras.layers.Layer, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Returns what a layer as Add or Maximum makes of inputs whose shapes are equal."""
    return layer._merge_function(inputs)


def causal_padding(layer: tf.keras.layers.Layer, x: tf.Tensor) -> list[list[int]]:
    """Returns what a Conv1D with ``padding="causal"`` gives to ``tf.pad`` before it convolves."""
    return layer._compute_causal_padding(x)


class Attention(NamedTuple):
    """The parts of a MultiHeadAttention.

    Attributes:
        projections: the layers that make query, key and value; kernels [features, heads, size].
        output: the layer after them; kernel [heads, size, features].
        num_heads: how many.
        key_dim: size of a head's query and key.
        use_bias: whether these layers have biases.
        dropout: rate at which attention is dropped.
        axes: of the input that attention is over; None for all between batch and features.
    """

    projections: tuple[Any, Any, Any]
    output: Any
    num_heads: int
    key_dim: int
    use_bias: bool
    dropout: float
    axes: tuple[int, ...] | None


def attention_of(layer: tf.keras.layers.MultiHeadAttention) -> Attention:
    """Returns the parts of ``layer``, which must have been called."""
    return Attention(
        projections=(layer._query_dense, layer._key_dense, layer._value_dense),
        output=layer._output_dense,
        num_heads=layer._num_heads,
        key_dim=layer._key_dim,
        use_bias=layer._use_bias,
        dropout=layer._dropout,
        axes=layer._attention_axes,
    )


# Steps ------------------------------------------------------------------------------------------


def count_step(model: tf.keras.Model, kind: str) -> None:
    """Counts a step as Keras' own do, for callbacks that ask; ``kind``: train, test or predict."""
    getattr(model, f"_{kind}_counter").assign_add(1)


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns how many steps Keras' loop counts for one call of a step function."""
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps)


def forget_functions(model: tf.keras.Model) -> None:
    """Has Keras trace the steps of ``model`` anew."""
    model.train_function = model.test_function = model.predict_function = None


def forget_validation(model: tf.keras.Model) -> None:
    """Has Keras begin the next validation anew: it keeps its data when one was broken off."""
    model._eval_data_handler = None


def follow_trainable(model: tf.keras.Model) -> None:
    """Has the compiled ``model`` train what is trainable now, not what was when it was compiled."""
    model._reset_compile_cache()


# Losses and metrics -----------------------------------------------------------------------------


def loss_anew(compiled: Any, output_names: list[str]) -> Any:
    """Returns the compiled loss with metrics of its own.

    No public way leads from a compiled model to its loss weights as they were given.
    """
    return type(compiled)(
        compiled._user_losses, compiled._user_loss_weights, output_names=output_names
    )


def function_of(part: Any) -> Any:
    """Returns the function that a loss or metric was made from, itself without one."""
    return getattr(part, "_fn", getattr(part, "fn", part))


def build_metrics(metrics: Any, y_pred: Any, y: Any) -> None:
    """Makes the variables of compiled metrics.

    Keras chooses metrics called "accuracy" by the shapes of outputs and labels.
    """
    metrics.build(y_pred, metrics._conform_to_outputs(y_pred, y))


# Optimizers -------------------------------------------------------------------------------------


def given_learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate as it was given: a variable or a schedule.

    ``optimizer.learning_rate`` is the current value of a schedule.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None)
    return inner.learning_rate if rate is None else rate  # Legacy optimizers give what they have.


def set_learning_rate(optimizer: Any, rate: tf.Variable) -> None:
    """Has ``optimizer`` read ``rate``, in place of a schedule as well."""
    optimizer._learning_rate = rate


def evaluate_schedule(optimizer: Any) -> None:
    """Brings ``optimizer.learning_rate`` to the value of its schedule at its present iteration."""
    optimizer._compute_current_learning_rate()


def loss_scale_state(optimizer: Any) -> list[tf.Variable]:
    """Returns what a dynamic loss scale consists of; empty without one."""
    if not getattr(optimizer, "dynamic", False):
        return []
    return [optimizer._loss_scale.current_loss_scale, optimizer._loss_scale.counter]


def key_of(optimizer: Any, variable: tf.Variable) -> str:
    """Returns the text by which ``optimizer`` knows ``variable``."""
    return optimizer._var_key(variable)


def without_decay(optimizer: Any) -> list[str]:
    """Returns the keys of the variables that do not decay: the optimizer's own list, if any."""
    return getattr(optimizer, "_exclude_from_weight_decay", None) or []


@contextlib.contextmanager
def clipped_to(optimizer: Any, gradients: list[tf.Tensor]) -> Iterator[None]:
    """Has ``optimizer`` take ``gradients`` for what its own clipping would give."""
    keras_clip, optimizer._clip_gradients = optimizer._clip_gradients, lambda _: gradients
    try:
        yield
    finally:
        optimizer._clip_gradients = keras_clip
