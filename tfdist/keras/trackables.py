"""What TensorFlow's checkpoints hold of a model and its optimizers, and what they lack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import layers_in
from tfdist.keras.optimizers import KINDS, inner_of
from tfdist.keras.tensors import all_raw, shards_of
from tfdist.keras.version import IS_KERAS_3

#: Whether a checkpoint gives values to those slots alone that are there when it is read.
SLOTS_COME_FIRST = IS_KERAS_3
# Whether a thread looks for what there is, and writes or reads none of it.
_walk = threading.local()


def before_checkpoints(optimizer: Any, check: Callable[[], None]) -> None:
    """Has what writes or reads a checkpoint of ``optimizer`` call ``check`` first.

    So does whatever holds the optimizer, a tf.train.Checkpoint as well as Keras' own files.
    """
    children = optimizer._trackable_children

    def checked(save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "checkpoint" and getattr(_walk, "is_for_files", True):
            check()
        return children(save_type, **options)

    optimizer._trackable_children = checked


class _View(tf.train.TrackableView):
    """Without the lists that optimizers of Keras 3 have of what they update: slices on a mesh."""

    @classmethod
    def children(cls, obj: Any, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().children(obj, *args, **options)
        if isinstance(obj, KINDS):
            found.pop("_trainable_variables", None)
        return found


def descendants_of(owner: Any) -> list[Any]:
    """Returns all that a checkpoint of ``owner`` would hold, without being one."""
    _walk.is_for_files = False
    try:
        return _View(owner).descendants()
    finally:
        del _walk.is_for_files


def optimizers_of(model: tf.keras.Model) -> list[Any]:
    """Returns the optimizers of ``model``, in its attributes too, in an order of their own.

    One that another wraps for its loss scale is not called by itself, and is none of them.
    """
    optimizers = [item for item in descendants_of(model) if isinstance(item, KINDS)]
    compiled = getattr(model, "optimizer", None)  # Keras 3 has none before it is compiled.
    if isinstance(compiled, KINDS) and compiled not in optimizers:
        optimizers.append(compiled)
    wrapped = [inner for one in optimizers if (inner := inner_of(one)) is not one]
    return [one for one in optimizers if not any(one is inner for inner in wrapped)]


def beside_model(model: tf.keras.Model) -> dict[str, Any]:
    """Returns by names in a checkpoint what ``tensors.saved(model)`` lacks in Keras 3: optimizers
    but the compiled one, and variables of TensorFlow that its layers have made.

    Of Keras 2 a checkpoint of the model holds them. An optimizer that has no slots once the step is
    traced is not called by it, as that of a nested model.

    Raises:
        ModelError: in eager execution, where a step is not traced, one has no slots yet.
    """
    others = [one for one in optimizers_of(model) if IS_KERAS_3 and one is not model.optimizer]
    for one in others:
        if not one.built and model.run_eagerly:
            raise ModelError(
                "optimizers of Keras 3 beside the compiled one must have their slots before the "
                "first step, for a checkpoint to hold them",
                received=f"{type(one).__name__} without slots",
                mend="Call its build(weights) where it is made, or compile without run_eagerly",
            )
    found = {f"optimizer_{number}": one for number, one in enumerate(others) if one.built}
    own = unknown_variables(model)
    return found | ({"own": tf.train.Checkpoint(kept=own)} if own else {})


def unknown_variables(model: tf.keras.Model, *, shared: bool = False) -> list[tf.Variable]:
    """Returns the variables of TensorFlow in ``model`` that Keras 3 does not know of.

    Args:
        shared: whether to leave out what each process has for itself: states of generators.
    """
    if not IS_KERAS_3:
        return []
    owners = [model, *model.metrics, *optimizers_of(model)]
    owners += [inner_of(one) for one in optimizers_of(model)]
    known = {id(variable) for owner in owners for variable in all_raw(owner.variables)}
    items = [
        part  # A variable may be divided.
        for one in descendants_of(model)
        for part in (shards_of(one) if hasattr(one, "is_sharded_variable") else [one])
    ]
    if shared:
        known |= {id(one.state) for one in items if isinstance(one, tf.random.Generator)}
    return [one for one in items if isinstance(one, tf.Variable) and id(one) not in known]


def unsaved_variables(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns those of ``unknown_variables`` that no file of Keras 3 holds, ``.keras`` or weights.

    A layer with a ``save_own_variables`` of its own is taken to write what it has made.
    """
    found = unknown_variables(model, shared=True)
    if not found:
        return []
    base = tf.keras.layers.Layer.save_own_variables
    write = [one for one in layers_in(model) if type(one).save_own_variables is not base]
    written = {id(value) for one in write for value in descendants_of(one)}
    return [variable for variable in found if id(variable) not in written]


def saved(part: Any) -> Any:
    """Returns what a checkpoint keeps of a model or an optimizer.

    In Keras 3 neither tells TensorFlow of variables that it keeps in lists, as Adam does its
    slots. There all are named by their order.
    """
    if not IS_KERAS_3 or isinstance(part, (tf.train.Checkpoint, tf.Variable)):
        return part
    of_metrics = {id(v) for metric in getattr(part, "metrics", []) for v in metric.variables}
    return tf.train.Checkpoint(
        kept=all_raw(variable for variable in part.variables if id(variable) not in of_metrics)
    )
