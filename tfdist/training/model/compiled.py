"""What a model must be compiled with, whenever it is compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, first_line
from tfdist.keras.optimizers import KINDS, compiling, is_of_another_scope
from tfdist.training.engine.binding import Binding


def check_optimizer(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the optimizer is none of Keras, or there are several.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, KINDS):
        return
    # Keras wraps those of tf.compat.v1.
    own = getattr(optimizer, "optimizer", optimizer)
    kind = f"{type(own).__name__}"
    if isinstance(own, tf.compat.v1.train.Optimizer):
        kind = f"tf.compat.v1.train.{kind}"
    elif isinstance(own, (list, tuple)):
        kind = f"{len(own)} optimizers"
    raise ModelError(
        "a model must be compiled with one optimizer of tf.keras.optimizers",
        received=f"{kind} in model '{model.name}'",
        mend="Compile it with one of them, such as tf.keras.optimizers.Adam(1e-3)",
    )


def check_scope(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the optimizer has variables for other replicas than the model.
    """
    if is_of_another_scope(model.optimizer, model):
        raise ModelError(
            "an optimizer must be made where the model is, in the scope of its strategy",
            received=f"{type(model.optimizer).__name__} made outside of it",
            mend="Make it in the function that makes the model; to compile anew, give its name, or "
            "make it within model.distribute_strategy.scope()",
        )


@contextlib.contextmanager
def _metrics_of_the_scope() -> Iterator[None]:
    """Raises:
    ModelError: a built model is compiled anew with metrics that were made elsewhere.
    """
    try:
        yield
    except ValueError as error:
        if "different distribution strategy scope" not in str(error):
            raise
        raise ModelError(
            "metrics that a built model is compiled with must be made where it was built",
            received=first_line(error).partition(" passed to ")[0],
            mend="Give their names, or compile within model.distribute_strategy.scope()",
        ) from error


def watched(binding: Binding) -> Callable[..., None]:
    """Returns the ``compile`` of a built model, which tells its binding."""
    model = binding.model
    compile_model = model.compile

    @functools.wraps(compile_model)
    def compiled(*args: Any, **options: Any) -> None:
        with compiling(model), _metrics_of_the_scope():
            compile_model(*args, **options)
        check_optimizer(model)
        check_scope(model)
        binding.compiled()

    return compiled
