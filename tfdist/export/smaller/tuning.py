"""What making a model smaller has in common: a copy of the model, layers wrapped, a short fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, EngineMissingError, ModelError, first_line
from tfdist.export.models import whole_copy
from tfdist.export.smaller.measuring import Scale
from tfdist.records.format.manifest import splits_of
from tfdist.strategies.base import DataOptions, make_feed
from tfdist.training.engine.options import check_count
from tfdist.training.feed.feed import Feed
from tfdist.training.layers.data_errors import check_labels

# Layers whose kernels are worth it. The kernels of depthwise convolutions are few and sensitive.
_HEAVY = (
    tf.keras.layers.Dense,
    tf.keras.layers.Conv1D,
    tf.keras.layers.Conv2D,
    tf.keras.layers.Conv2DTranspose,
)
Wrap = Callable[[tf.keras.layers.Layer], tf.keras.layers.Layer]


def import_tfmot() -> Any:
    """Raises EngineMissingError when TensorFlow's model optimization toolkit is not there."""
    try:
        import tensorflow_model_optimization
    except ImportError as error:
        raise EngineMissingError(
            "tensorflow-model-optimization must be installed to make a model smaller",
            received=f"an error: {error}",
            mend="Run pip install 'tfdist[export]'",
        ) from error
    return tensorflow_model_optimization


def is_heavy(layer: tf.keras.layers.Layer) -> bool:
    return isinstance(layer, _HEAVY) and not isinstance(layer, tf.keras.layers.DepthwiseConv2D)


def plain_copy(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a copy to work on.

    Raises:
        ModelError: not compiled, not Functional or Sequential, or without a layer to work on.
    """
    if not isinstance(model, tf.keras.Model) or getattr(model, "optimizer", None) is None:
        raise ModelError(
            "a model must be compiled before it is made smaller, since it is trained some more",
            received=f"'{getattr(model, 'name', type(model).__name__)}', not compiled",
            mend="Call model.compile(optimizer, loss, metrics=...)",
        )
    copy = whole_copy(model)
    if copy is model:
        raise ModelError(
            "a model to make smaller must be a Functional or Sequential one",
            received=f"model '{model.name}' of class {type(model).__name__}",
            mend="Write it with keras.Model(inputs, outputs)",
        )
    if not any(is_heavy(layer) for layer in copy.submodules):
        raise ModelError(
            "a model to make smaller must have a Dense or a convolution",
            received=f"model '{copy.name}'",
            mend="Leave this model as it is: the kernels of such layers are what gets smaller",
        )
    return copy


def wrapped(model: tf.keras.Model, wrap: Wrap) -> tf.keras.Model:
    """Returns the model with its heavy layers wrapped, inside of nested models too."""

    def visit(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        if isinstance(layer, tf.keras.Model):
            return wrapped(layer, wrap)
        return wrap(layer) if is_heavy(layer) else layer

    return tf.keras.models.clone_model(model, clone_function=visit)


def training_feed(data: Any, *, global_batch_size: int, seed: int) -> Feed:
    """Returns what to train on: the split train of a folder of shards, or all that was given."""
    if (found := splits_of(data)) is not None:
        folder, splits = found
        if "train" not in splits:
            raise DataError(
                "data to train on must have a split called train",
                received=f"{data} with {', '.join(splits)}",
                mend=f"Name the split, such as {data}/{next(iter(splits))}",
            )
        data = folder / "train"
    return make_feed(data, DataOptions(global_batch_size=global_batch_size, seed=seed))


def begun(
    model: tf.keras.Model, data: Any, epochs: int, quantization: str = "none", **how: Any
) -> tuple[Any, tf.keras.Model, Scale, Feed]:
    """Returns tfmot, a copy to work on, what measures it, and what it trains on; see ``prune``."""
    check_count("epochs", epochs)
    tfmot = import_tfmot()
    copy = plain_copy(model)
    scale, feed = Scale(copy, data, quantization), training_feed(data, **how)
    check_labels(model, feed.records.element_spec)
    return tfmot, copy, scale, feed


def fit(
    model: tf.keras.Model, like: tf.keras.Model, feed: Feed, epochs: int, callbacks: list[Any] = ()
) -> None:
    """Trains ``model``, compiled as ``like`` is, with a fresh optimizer of the same settings."""
    compile_like(model, like)
    model.fit(
        feed.epochs(0, epochs),
        epochs=epochs,
        steps_per_epoch=feed.steps_per_epoch,
        callbacks=list(callbacks),
        verbose=0,
    )


def compile_like(model: tf.keras.Model, like: tf.keras.Model) -> None:
    try:
        model.compile_from_config(like.get_compile_config())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            "a model to make smaller must be compiled with objects that Keras can copy",
            received=f"an error: {first_line(error)}",
            mend="Register your loss with keras.saving.register_keras_serializable",
        ) from error
