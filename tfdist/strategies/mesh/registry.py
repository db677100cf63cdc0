"""Which Keras layers a mesh can run, and how a user adds one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tfdist.errors import ModelError

#: layer class -> rule(context, layer, *inputs, **options) that returns a Mesh-TensorFlow tensor.
_RULES: dict[type, Callable] = {}

# The modules that hold the rules of Keras' own layers.
_OWN_RULES = ("batch_norm", "dense", "images", "attention", "reshaping", "replicated")


class UnsupportedLayerError(ModelError):
    """A layer, or an option of one, that a mesh cannot run.

    Args:
        layer: it.
        reason: why, for people.
        mend: what helps; None names what a mesh can run.
    """

    def __init__(self, layer: Any, reason: str, mend: str | None = None):
        self.layer = layer
        supported = ", ".join(supported_layers())
        super().__init__(
            "a mesh must be able to run every layer of the model",
            received=f"layer '{layer.name}' ({type(layer).__name__}): {reason}",
            mend=mend
            or f"Use {supported}; add yours with "
            "tfdist.strategies.mesh.register_layer, or use another strategy",
        )


def refuse_random_numbers(layer: Any) -> None:
    """Raises UnsupportedLayerError: the layer's call draws by ``tf.random``."""
    raise UnsupportedLayerError(
        layer,
        "its call draws random numbers, once for all steps",
        "Draw them by layers (attributes of a layer of your own): Dropout, GaussianNoise",
    )


def check_channels_last(layer: Any) -> None:
    """Raises UnsupportedLayerError: the layer's images have their channels first."""
    if getattr(layer, "data_format", None) == "channels_first":
        raise UnsupportedLayerError(layer, "its images have their channels first, not last")


def register_layer(*classes: type) -> Callable[[Callable], Callable]:
    """Registers the decorated function as the conversion of Keras layer ``classes``.

    The function is called as ``rule(context, layer, *inputs, **options)`` with the Mesh-TensorFlow
    tensors that the layer would be called on, and returns its output tensors. ``context`` is a
    ``tfdist.strategies.mesh.context.Context``; ``context.local(fn, inputs, dims)`` is what most
    rules need. Classes match exactly, so a subclass with another ``call`` is never taken for its
    parent.
    """

    def register(rule: Callable) -> Callable:
        for cls in classes:
            _RULES[cls] = rule
        return rule

    return register


def rule_of(layer: Any) -> Callable | None:
    """Returns the conversion of ``layer``, None if there is none."""
    _load()
    return _RULES.get(type(layer))


def supported_layers() -> list[str]:
    """Returns the names of all layers that have a conversion."""
    _load()
    return sorted(cls.__name__ for cls in _RULES)


def _load() -> None:
    for name in _OWN_RULES:
        importlib.import_module(f"tfdist.strategies.mesh.rules.{name}")
