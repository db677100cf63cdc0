"""Another learning rate than the one that a model was compiled with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.errors import OptionError
from tfdist.keras.optimizers import inner_of
from tfdist.keras.rates import more_than_one_rate


def with_learning_rate(model_fn: Callable[[], Any], rate: float) -> Callable[[], Any]:
    """Returns a function that returns the same model with another learning rate.

    Raises, when it is called:
        OptionError: the model's rate is a schedule, or it has several optimizers.
    """

    if not callable(model_fn):
        return model_fn  # The strategy says what is wrong with it.

    def made() -> Any:
        model = model_fn()
        if getattr(model, "optimizer", None) is None:
            return model
        if (found := more_than_one_rate(model)) is not None:
            raise OptionError(
                "lr must be that of a model with one optimizer and a fixed learning rate",
                received=f"model '{model.name}' with {found}",
                mend="Leave lr out, and choose the rate in the function of the model",
            )
        inner_of(model.optimizer).learning_rate = rate
        return model

    made.__name__ = getattr(model_fn, "__name__", "model_fn")
    return made
