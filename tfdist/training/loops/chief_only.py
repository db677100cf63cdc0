"""``tfdist.on_chief``: callbacks that run once in a job, not on each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import topology
from tfdist.errors import OptionError
from tfdist.training.engine.model_path import check_no_arguments

_MARK = "tfdist_on_chief"
# Their callbacks each open a run of their own.
_TRACKERS = ("wandb", "mlflow")


def on_chief(callback: Any) -> tf.keras.callbacks.Callback:
    """Has a callback run on one process of a job: the chief, which is rank 0.

    For callbacks that write files, print, or tell a service of the training. One that changes the
    training, or stops it, must run on every process. On multi_worker all processes must read the
    weights together, so one that runs on the chief alone must not read them there; nor must it save
    a model whose slots are divided (``shard="optimizer"``).

    .. code-block:: python

        model.fit(data, callbacks=[tfdist.on_chief(MyLogger("log.txt"))])

    Args:
        callback: a Keras callback, which is returned as it is, and marked; or a function that
            returns one, which is called on the chief alone, so that others open nothing.

    Returns:
        The callback; of a function on the other ranks one that does nothing.

    Raises:
        OptionError: it is neither.
    """
    if not isinstance(callback, tf.keras.callbacks.Callback) and callable(callback):
        callback = callback() if topology.current().is_chief else tf.keras.callbacks.Callback()
    if not isinstance(callback, tf.keras.callbacks.Callback):
        raise OptionError(
            "tfdist.on_chief must be given a Keras callback, or a function that returns one",
            received=f"an object of type {type(callback).__name__}",
            mend="Write tfdist.on_chief(MyCallback())",
        )
    setattr(callback, _MARK, True)
    return callback


def is_on_chief(callback: Any) -> bool:
    """Whether ``callback`` was given to ``on_chief``, or is one of a known tracker."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(callback).__mro__)
    return getattr(callback, _MARK, False) or any(kind in _TRACKERS for kind in kinds)


def called(make: Callable[[], Any], name: str) -> list[Any]:
    """Returns the callbacks that a user's function returns.

    Raises:
        OptionError: it returns something else.
        ModelError: it needs arguments.
    """
    check_no_arguments(make, name)
    made = make()
    made = list(made) if isinstance(made, (list, tuple)) else [made]
    others = [one for one in made if not isinstance(one, tf.keras.callbacks.Callback)]
    if others:
        raise OptionError(
            f"{name} must return a Keras callback, or a list of them",
            received=f"an object of type {type(others[0]).__name__}",
            mend="End it with: return [callback, ...]",
        )
    return made
