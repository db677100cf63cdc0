"""The model to export: loaded, or taken from a strategy, as plain Keras on one device."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import package_of
from tfdist.compat.keras import UNREADABLE
from tfdist.errors import ExportError, ModelError
from tfdist.export.trust import FILES, check, unreadable
from tfdist.keras.graph import called_with, input_names, nested_inputs, output_names
from tfdist.keras.layers import layers_in, take_trainable
from tfdist.keras.losses import compiled_loss
from tfdist.records.buckets.cache import local_tree
from tfdist.records.buckets.urls import url_of
from tfdist.training.model.lookup_vocabularies import follow_variables, take_adapted

_MIXED = ("mixed_bfloat16", "mixed_float16")
_POLICIES = ("Policy", "DTypePolicy")  # Of Keras 2, and of Keras 3.
_IN_PYTHON = (
    "Load it in Python, with the custom_objects of your layers, and call "
    "tfdist.export.tflite(model, ...)"
)


@dataclass(frozen=True)
class PlainModel:
    """A model whose weights are whole and on one device.

    Attributes:
        given: the user's model.
        keras: the copy that computes, compiled as the given one; the given model itself where
            Keras cannot copy it.
        inputs: name -> spec with batch dimension None.
        input_form: how the model is called: "one", "list" or "dict".
    """

    given: tf.keras.Model
    keras: tf.keras.Model
    inputs: dict[str, tf.TensorSpec]
    input_form: str

    def __call__(self, values: dict[str, Any]) -> dict[str, tf.Tensor]:
        """Returns the outputs by name, in inference."""
        if self.input_form == "one":
            (arguments,) = values.values()
        elif self.input_form == "list":
            arguments = list(values.values())
        else:
            arguments = dict(values)
        return self.named_outputs(self.keras(arguments, training=False))

    def named_outputs(self, outputs: Any) -> dict[str, tf.Tensor]:
        if isinstance(outputs, dict):
            return dict(outputs)
        flat = tf.nest.flatten(outputs)
        names = output_names(self.keras)
        if len(names) != len(flat):
            names = [f"output_{number}" for number in range(len(flat))]
        return dict(zip(names, flat, strict=True))

    def structured_outputs(self, outputs: dict[str, np.ndarray]) -> Any:
        """Arranges outputs by name as the compiled loss expects them."""
        structure = getattr(self.keras, "output", None)
        if isinstance(structure, dict):
            return outputs
        values = list(outputs.values())
        return values[0] if len(values) == 1 else values


def open_model(model: Any, *, trust: bool = False) -> PlainModel:
    """Opens a live model, of any strategy, or a file.

    Args:
        trust: whether a file may run code of its own, see ``trust``.

    Raises:
        ModelError: not a model, no such file, one that would run code of its own, or one that Keras
            cannot load or does not know the input shape of.
    """
    given = model if isinstance(model, tf.keras.Model) else _load(model, trust)
    if not given.built:
        raise ModelError(
            "a model must know its input shape before it can be exported",
            received=f"model '{given.name}', not built",
            mend="Begin it with keras.Input(shape), or call it once on a batch",
        )
    copy = whole_copy(given, **_in_float32(given))
    if copy is not given:
        _compile_like(copy, given)
    inputs, form = _inputs(copy)
    return PlainModel(given, copy, inputs, form)


def _load(path: Any, trust: bool) -> tf.keras.Model:
    if not isinstance(path, (str, os.PathLike)):
        raise ModelError(
            f"a model must be a Keras model, or {FILES}",
            received=f"an object of type {type(path).__name__}",
            mend="Give the model itself, or the path that model.save wrote to",
        )
    if url := url_of(path):
        with local_tree(url) as place:
            return _load(place, trust)
    if not Path(path).exists():
        raise ModelError(
            f"a model must be {FILES}",
            received=f"{path}, which does not exist",
            mend="Give the path that model.save wrote to",
        )
    package = package_of(Path(path))
    if package is not None and package != tf.keras.Model.__module__.partition(".")[0]:
        raise ModelError(
            "a model must be of the Keras that is in use",
            received=f"{path}, which {package} has written",
            mend=f"Write import {package} in the program, before anything uses tf.keras "
            "(docs/keras-3.md)",
        )
    if not trust:
        check(Path(path))
    try:
        return _loaded(path, safe_mode=not trust)
    except (*UNREADABLE, ImportError, AttributeError, tf.errors.OpError) as error:
        of_layers = (ValueError, TypeError, ImportError, AttributeError, LookupError)
        found = {"mend": _IN_PYTHON} if isinstance(error, of_layers) else {}
        raise unreadable(path, error, **found) from error


def _loaded(path: str | os.PathLike, safe_mode: bool) -> tf.keras.Model:
    try:
        model = tf.keras.models.load_model(path, safe_mode=safe_mode)
    except (ValueError, TypeError):
        # A loss or a metric of the user's own is not needed to compute outputs.
        model = tf.keras.models.load_model(path, compile=False, safe_mode=safe_mode)
    if not isinstance(model, tf.keras.Model):
        raise ValueError("a SavedModel without Keras' description of its layers")
    follow_variables(model)  # Keras 2 does not, of a .keras file with an adapted Discretization.
    return model


def _compile_like(copy: tf.keras.Model, given: tf.keras.Model) -> None:
    """Gives the copy metrics of its own: those of replicas cannot be updated from outside."""
    config = given.get_compile_config() if compiled_loss(given) else None
    if config:
        # A loss that Keras cannot copy is done without: outputs are compared all the same.
        with contextlib.suppress(ValueError, TypeError, NotImplementedError):
            copy.compile_from_config(config)


def _in_float32(model: tf.keras.Model) -> dict[str, Any]:
    """Returns arguments of ``clone_model`` for a model of mixed precision, else none.

    Its weights are float32, and TFLite has no operators for 16 bits.
    """
    policies = (getattr(layer, "dtype_policy", None) for layer in layers_in(model))
    if not any(getattr(policy, "name", None) in _MIXED for policy in policies):
        return {}

    def copied(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        return type(layer).from_config(_without_mixed(layer.get_config()))

    return {"clone_function": copied}


def _without_mixed(config: Any) -> Any:
    """Returns a configuration of Keras, of layers within layers too, whose policies are float32."""
    if isinstance(config, (list, tuple)):  # Or what Keras wraps them in.
        each = map(_without_mixed, config)
        return list(each) if isinstance(config, list) else tuple(each)
    if not isinstance(config, dict):
        return "float32" if isinstance(config, str) and config in _MIXED else config
    if config.get("class_name") in _POLICIES and config["config"]["name"] in _MIXED:
        return "float32"
    return {name: _without_mixed(value) for name, value in config.items()}


def whole_copy(model: tf.keras.Model, **changes: Any) -> tf.keras.Model:
    """Returns a copy with all weights on one device; the model itself when Keras cannot copy it.

    Args:
        changes: arguments of ``clone_model``.
    """
    if getattr(model, "inputs", None) is None:
        return model  # Of a class of its own.
    try:
        with tf.device("CPU:0"):
            copy = tf.keras.models.clone_model(model, **changes)
        take_trainable(copy, model)
        # get_weights is a strategy's own: it gathers the slices of a mesh.
        copy.set_weights(model.get_weights())  # They do not fit adapted one-hot buckets (Keras 2).
        take_adapted(copy, model)
    except (ValueError, NotImplementedError):
        return model
    return copy


def _inputs(model: tf.keras.Model) -> tuple[dict[str, tf.TensorSpec], str]:
    if getattr(model, "inputs", None):
        names = zip(input_names(model), model.inputs, strict=True)
        specs = {name: _named(symbol, name) for name, symbol in names}
        is_one = len(specs) == 1 and not isinstance(nested_inputs(model), dict)
        return specs, "one" if is_one else "dict"
    saved = called_with(model)
    if saved is None:
        raise ModelError(
            "a model must know its input shape before it can be exported",
            received=f"model '{model.name}', never called",
            mend="Call it once on a batch",
        )
    structure, *more = saved
    if more or not (isinstance(structure, (tf.TensorSpec, dict, list, tuple))):
        raise ExportError(
            "a model to export must take one argument, a tensor, a list or a dict of tensors",
            received=f"model '{model.name}' with {1 + len(more)} arguments",
            mend="Wrap it in a keras.Model(inputs, outputs)",
        )
    if isinstance(structure, tf.TensorSpec):
        return {"input": _named(structure, "input")}, "one"
    if isinstance(structure, dict):
        return {name: _named(spec, name) for name, spec in structure.items()}, "dict"
    return {f"input_{n}": _named(s, f"input_{n}") for n, s in enumerate(structure)}, "list"


def _named(spec: Any, name: str) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, name=name)
