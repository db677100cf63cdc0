"""Layers, what they keep, and the graph that a model is of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.keras.tensors import all_raw, is_variable, raw, shards_of
from tfdist.keras.version import IS_KERAS_3

#: Whether a layer's variable can say how replicas share it.
CAN_SAY_AGGREGATION = not IS_KERAS_3


def layers_in(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """Returns ``layer`` and all layers inside of it or of a model, at any depth.

    ``layer.submodules`` would fail on recurrent layers with dropout, whose cache of masks it
    cannot walk through; Keras' own walk has no public name. An operation of Keras 3 has none.
    """
    return list(layer._flatten_layers()) if isinstance(layer, tf.keras.layers.Layer) else []


def called_in(model: tf.keras.Model) -> list[Any]:
    """Returns the layers in ``model``, and what Keras 3 calls between them, as keras.ops.mean."""
    layers = layers_in(model)
    between = [item for layer in layers for item in getattr(layer, "operations", ())]
    return list({id(item): item for item in (*layers, *between)}.values())


def weights_in(layer: tf.keras.layers.Layer) -> list[Any]:
    """Returns the weights of ``layer`` that are variables, as its attributes have them."""
    return [weight for weight in layer.weights if is_variable(weight)]


def variables_in(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Returns the weights of ``layer`` that are variables.

    Keras counts a vocabulary among the weights of a lookup layer: a table, which has no shape.
    Keras 3 wraps its variables into its own, which no engine knows, and its operations have none.
    """
    weights = all_raw(getattr(layer, "weights", ()))
    return [weight for weight in weights if isinstance(weight, tf.Variable)]


def trained_in(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Returns the variables of ``layer`` that are trained; see ``variables_in``."""
    return all_raw(getattr(layer, "trainable_variables", ()))


def list_shards(model: tf.keras.Model) -> bool:
    """Has layers list the shards of a variable that a strategy has divided, in its place.

    Those of Keras 2 do: gradients, slots and updates are of shards, and what a layer computes with
    is whole.

    Returns:
        Whether it has; not of Keras 2.
    """
    known: dict[int, list[Any]] = {}  # Several layers may list one.
    for layer in layers_in(model) if IS_KERAS_3 else []:
        for kept in (layer._trainable_variables, layer._non_trainable_variables):
            kept[:] = [
                shard
                for variable in kept
                for shard in known.setdefault(id(variable), _shards_of(variable))
            ]
    return any(len(shards) > 1 for shards in known.values())


def freeze_alike(pairs: Iterable[tuple[Any, list[Any]]]) -> None:
    """Freezes shards as their variable is: in Keras 3 one may be frozen by itself.

    Args:
        pairs: variables of two models, each with its shards.
    """
    if IS_KERAS_3:
        for whole, shards in pairs:
            for shard in shards:
                shard.trainable = whole.trainable


def _shards_of(variable: Any) -> list[Any]:
    """Returns those of a variable of Keras 3, each one of its own; itself where it is whole."""
    if isinstance(raw(variable), tf.Variable):
        return [variable]
    shards = []
    for part in shards_of(raw(variable)):
        shard = tf.keras.Variable(
            part, trainable=variable.trainable, autocast=variable._autocast, name=variable.name
        )
        shard._path = variable.path
        for name in ("regularizer", "constraint", "overwrite_with_gradient"):
            setattr(shard, name, getattr(variable, name))
        shards.append(shard)
    return shards


def take_trainable(copy: tf.keras.Model, model: tf.keras.Model) -> None:
    """Freezes in ``copy`` what is frozen in ``model``, within layers of layers too.

    A copy from a configuration knows the flag of the outermost layer alone, and Keras 2 lists the
    weights of a layer by these flags: those of the copy would stand in another order. Where a copy
    has layers of other kinds, it is left as it is.
    """
    theirs, ours = layers_in(copy), layers_in(model)
    if len(theirs) != len(ours):
        return
    # The flag of a layer is given to all in it, which may have others: the inner ones come last.
    for place in sorted(range(len(ours)), key=lambda place: -len(layers_in(ours[place]))):
        # Keras 3 gives a flag to each weight, too, also to those that LoRA has frozen.
        if theirs[place].trainable != ours[place].trainable:
            theirs[place].trainable = ours[place].trainable
    if IS_KERAS_3 and len(copy.weights) == len(model.weights):  # One may be frozen by itself.
        for weight, given in zip(copy.weights, model.weights, strict=True):
            weight.trainable = given.trainable


def held_by(layer: tf.keras.layers.Layer, kind: type) -> list[Any]:
    """Returns what of a kind a layer has for itself: Keras 3 knows of no tf.Variable there."""
    found = []
    for value in vars(layer).values():
        each = value.values() if isinstance(value, dict) else value
        items = each if isinstance(value, (dict, list, tuple)) else [value]
        found += [item for item in items if isinstance(item, kind)]
    return found


class _Adapted:
    """What a layer of Keras 3 has adapted to and keeps in no variable, as a table of Keras 2."""

    def __init__(self, layer: Any):
        self._layer = layer

    def get_tensors(self) -> list[tf.Tensor]:
        layer = self._layer
        if isinstance(layer, tf.keras.layers.Discretization):
            bounds = [] if layer.bin_boundaries is None else layer.bin_boundaries
            return [tf.constant(np.asarray(bounds), tf.float64)]
        words = layer.get_vocabulary(include_special_tokens=False)
        return [tf.constant(words, layer.vocabulary_dtype)]

    def set_weights(self, values: Sequence[np.ndarray]) -> None:
        layer, (kept,) = self._layer, values
        if isinstance(layer, tf.keras.layers.Discretization):
            layer.bin_boundaries = kept.tolist()
        elif len(kept):
            weights = None
            if layer.output_mode == "tf_idf":  # Of a variable, which is read before.
                begin = layer.vocabulary_size() - len(layer.get_vocabulary(False))
                weights = layer.idf_weights.numpy()[begin:][: len(kept)]
            layer.set_vocabulary(tf.constant(kept, layer.vocabulary_dtype), weights)


def vocabularies_in(model: tf.keras.Model) -> list[Any]:
    """Returns what holds the words that each lookup layer of ``model`` has adapted to.

    Each has ``get_tensors() -> [words]`` and ``set_weights([words])``. A vocabulary that a layer
    was given is none of them. In Keras 3 the boundaries of a Discretization are.
    """
    if IS_KERAS_3:
        lookups = tf.keras.layers.StringLookup, tf.keras.layers.IntegerLookup
        return [
            _Adapted(layer)
            for layer in layers_in(model)
            if (isinstance(layer, lookups) and not layer._has_input_vocabulary)
            or (isinstance(layer, tf.keras.layers.Discretization) and layer.num_bins is not None)
        ]
    others = (weight for weight in model.weights if not isinstance(weight, tf.Variable))
    return [weight for weight in others if hasattr(weight, "get_tensors")]


def is_built(model: tf.keras.Model) -> bool:
    """Whether the weights of ``model`` are there.

    Keras takes a model of submodels that is never called for not built, though all of them are;
    Keras 3 takes a model of its own class for built whose layers are not.
    """
    if model.built and (not IS_KERAS_3 or getattr(model, "inputs", None)):
        return True
    inner = layers_in(model)[1:]
    return bool(inner) and all(layer.built for layer in inner)


def sizes_after_all(layer: Any, sizes: Sequence[int]) -> list[list[int]]:
    """Returns the sizes of a row of each output that ``layer`` makes of rows of ``sizes``."""
    shape = (None, *sizes)
    given = layer.compute_output_shape(shape if IS_KERAS_3 else tf.TensorShape(shape))
    kinds = (tuple, list)
    several = isinstance(given, kinds) and isinstance(given[0], (tf.TensorShape, *kinds))
    return [list(tf.TensorShape(shape))[1:] for shape in (given if several else [given])]


def sizes_after(layer: Any, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of a row of what ``layer`` makes of rows of ``sizes``."""
    [made] = sizes_after_all(layer, sizes)
    return made


def takes_mask(layer: Any) -> bool:
    """Whether Keras hands the mask of its input to the ``call`` of ``layer``."""
    return layer._call_has_mask_arg if IS_KERAS_3 else layer._expects_mask_arg


def makes_mask(layer: Any) -> bool | None:
    """Whether ``layer`` makes the mask of its outputs itself; None: they have none.

    False: it hands on that of its input.
    """
    if not layer.supports_masking:
        return None
    return type(layer).compute_mask is not tf.keras.layers.Layer.compute_mask


def can_be_called(model: tf.keras.Model) -> bool:
    """Whether the class of ``model`` has a ``call``: one of submodels alone may have none."""
    return bool(written_anew(model, "call"))


def written_anew(model: tf.keras.Model, *methods: str) -> list[str]:
    """Returns which of these methods of Keras' model the class of ``model`` has of its own."""
    return [m for m in methods if getattr(type(model), m) is not getattr(tf.keras.Model, m)]


def overwritten_weights(model: tf.keras.Model) -> list[str]:
    """Returns weights whose gradient is their new value: the scales of Keras 3's float8 layers."""
    trained = model.trainable_variables
    return [v.name for v in trained if getattr(v, "overwrite_with_gradient", False)]


def casts_inputs(layer: tf.keras.layers.Layer) -> bool:
    """Whether ``layer`` casts floating inputs to its compute dtype."""
    return layer.autocast if IS_KERAS_3 else layer._autocast


def num_added_losses(layer: tf.keras.layers.Layer) -> int:
    """Returns how many losses ``layer`` itself adds, those of regularizers included."""
    return len(layer._get_regularization_losses() if IS_KERAS_3 else layer._callable_losses)


def regularized_in(model: tf.keras.Model) -> list[tuple[Any, Any]]:
    """Returns the weights of ``model`` that have regularizers, and these."""
    if IS_KERAS_3:
        return [(v, v.regularizer) for v in model.trainable_weights if v.regularizer is not None]
    found = []
    for layer in layers_in(model)[1:]:
        for name in dir(layer):
            if not name.endswith("_regularizer") or name == "activity_regularizer":
                continue
            regularizer = getattr(layer, name)
            stem = name.removesuffix("_regularizer")  # Of "recurrent" the weight is a kernel.
            weights = (getattr(layer, weight, None) for weight in (stem, f"{stem}_kernel"))
            variable = next((w for w in weights if isinstance(w, tf.Variable)), None)
            if regularizer is not None and variable is not None:
                found.append((variable, regularizer))
    return found


def num_weight_losses(model: tf.keras.Model) -> int:
    """Returns how many losses layers of ``model`` add for weights, or otherwise in Keras 2."""
    if IS_KERAS_3:
        return len(regularized_in(model))
    return sum(map(num_added_losses, layers_in(model)))


def weight_losses(layer: tf.keras.layers.Layer, told: set[int]) -> list[tf.Tensor]:
    """Returns the losses that ``layer`` itself adds for its weights, computed anew.

    Args:
        told: ids of weights of Keras 3 whose losses are known, as that of another layer's weight.
    """
    if IS_KERAS_3:
        own = [v for v in layer._trainable_variables if v.trainable and v.regularizer is not None]
        new = [variable for variable in own if id(variable) not in told]
        told.update(map(id, new))
        return [variable.regularizer(variable) for variable in new]
    losses = [compute() for compute in layer._callable_losses]
    return [loss for loss in losses if loss is not None]


def merged(layer: tf.keras.layers.Layer, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Returns what a layer as Add or Maximum makes of inputs whose shapes are equal."""
    return layer._merge_function(inputs)


def causal_padding(layer: tf.keras.layers.Layer, x: tf.Tensor) -> list[list[int]]:
    """Returns what a Conv1D with ``padding="causal"`` gives to ``tf.pad`` before it convolves."""
    return layer._compute_causal_padding(*(() if IS_KERAS_3 else (x,)))


#: Whether a layer is handed the mask of its input only where it has one argument of tensors.
MASKS_ONE_ARGUMENT = IS_KERAS_3


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
        more: what else it does in Keras 3, by its option.
        ends_masks: whether it takes the masks off its inputs, for what reads them later.
        zeroes_masked: whether what may look at nothing gets zeros, and not the mean of all.
    """

    projections: tuple[Any, Any, Any]
    output: Any
    num_heads: int
    key_dim: int
    use_bias: bool
    dropout: float
    axes: tuple[int, ...] | None
    more: str | None
    ends_masks: bool
    zeroes_masked: bool


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
        more=next(
            (n for n in ("use_gate", "sliding_window") if getattr(layer, f"_{n}", None)), None
        ),
        ends_masks=IS_KERAS_3,
        zeroes_masked=IS_KERAS_3 and layer._dropout > 0,
    )


def depthwise_kernel_of(layer: tf.keras.layers.DepthwiseConv2D) -> Any:
    """Returns the kernel of ``layer``: [height, width, channels, multiplier]."""
    return layer.kernel if IS_KERAS_3 else layer.depthwise_kernel


def changed_kernel(layer: Any) -> str | None:
    """Returns what has put something else in the place of a kernel, in Keras 3; None: nothing."""
    if getattr(layer, "lora_enabled", False):
        return "LoRA"
    mode = getattr(layer, "quantization_mode", None)
    return f"quantization ({mode})" if mode else None


def keeps_unbiased_variance(layer: tf.keras.layers.BatchNormalization) -> bool:
    """Whether ``layer`` moves its variance by the unbiased one of a batch.

    Keras 2 does so in its fused kernel, which Keras 3 does not have.
    """
    return bool(getattr(layer, "fused", False))


#: What is to be put in the place of attributes: their owner, and the values by their names.
Replacement = tuple[Any, dict[str, Any]]


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Has attributes of ``owner`` be ``values`` meanwhile; where it had none, it has none again."""

    def is_own(name: str) -> bool:  # Else its class has it, as a method.
        return name in vars(owner) or isinstance(getattr(type(owner), name, None), property)

    before = {name: getattr(owner, name) for name in values if is_own(name)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def losses_apart(model: tf.keras.Model) -> list[Replacement]:
    """Has the losses that layers add belong to the thread of the replica that added them.

    Keras 3 keeps them in a list of the layer, and empties that when a replica begins its forward
    pass. Replicas that wait for each other within it would take each other's for their own.
    """
    if not IS_KERAS_3:
        return []
    return [
        (layer, {"_losses": _OfThread()})
        for layer in layers_in(model)
        if not isinstance(layer._losses, _OfThread)
    ]


class _OfThread(threading.local):
    """What Keras does with a list of losses, on one of each thread's own."""

    def __init__(self) -> None:  # In each thread.
        self._own: list[Any] = []

    def extend(self, losses: Iterable[Any]) -> None:
        self._own.extend(losses)

    def clear(self) -> None:
        self._own.clear()

    def __getitem__(self, place: Any) -> Any:
        return self._own[place]
