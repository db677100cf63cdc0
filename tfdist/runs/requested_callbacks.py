"""What a rank makes of the wishes in its configuration: callbacks, another learning rate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError
from tfdist.launch.events import emit
from tfdist.traces import wish
from tfdist.training.checkpoints import init_weights
from tfdist.training.engine import model_path

if TYPE_CHECKING:
    from tfdist.training.checkpoints.best_model import BestModel

# All imports of TensorFlow stand in functions: a rank imports it in a way of its own first.


@dataclass
class Callbacks:
    """Those that a training was asked for.

    Attributes:
        of_user: from the user's own function.
        watching: to run after the history has been told, and before checkpoints.
        keeper: the one of them that keeps the best model; by the number called ``monitor``.
    """

    of_user: list[Any] = field(default_factory=list)
    watching: list[Any] = field(default_factory=list)
    keeper: BestModel | None = None
    monitor: str = ""

    @property
    def best(self) -> dict[str, Any] | None:
        """The best epoch and its number; None where none was asked for, or none was finite."""
        if self.keeper is None or self.keeper.best is None:
            return None
        return {"epoch": self.keeper.best_epoch, self.monitor: self.keeper.best}

    @property
    def stopped_by(self) -> str | None:
        """The number that Keras' early stopping has ended the training for; None: it has not."""
        import tensorflow as tf

        kind = tf.keras.callbacks.EarlyStopping
        found = [each for each in (*self.of_user, *self.watching) if isinstance(each, kind)]
        return next((each.monitor for each in found if each.stopped_epoch), None)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Encloses the writing of a file: that may take longer than a step."""
    emit({"event": "writing", "long": True})
    yield
    emit({"event": "written"})


def model_fn(config: dict[str, Any]) -> Callable[[], Any]:
    """Returns the function of the model, with the weights and the learning rate asked for."""
    loaded = model_path.load(config["model"])
    if config.get("init_weights") is not None:
        loaded = init_weights.with_weights(loaded, config["init_weights"])
    if config.get("lr") is None:
        return loaded
    from tfdist.training.steps.learning_rate import with_learning_rate

    return with_learning_rate(loaded, config["lr"])


def callbacks(
    config: dict[str, Any],
    strategy: Any,
    steps: int,
    best_model: Callable[[], Path],
    *,
    traces: Callable[[], Path] | None,
) -> Callbacks:
    """Returns the callbacks that were asked for, on this rank.

    Args:
        steps: that callbacks are told of in an epoch.
        best_model: returns where the best model is written now.
        traces: returns where a trace is written that was asked for without a folder; None: it must
            name one.

    Raises:
        TfdistError: the user's function returns something else, or steps cannot be traced.
    """
    import tensorflow as tf

    from tfdist.training.checkpoints.best_model import BestModel
    from tfdist.training.loops.chief_only import called
    from tfdist.training.loops.monitored_names import Watched

    made = Callbacks()
    if config.get("callbacks"):
        name = config["callbacks"]
        made.of_user = called(model_path.load(name, model_path.CALLBACKS, again=False), name)
    if config.get("tensorboard"):
        made.of_user.append(
            tf.keras.callbacks.TensorBoard(config["tensorboard"], write_graph=False)
        )
    if config.get("profile"):
        made.of_user.append(_trace(config, strategy, steps, traces))
    stopping, best = config.get("early_stopping"), config.get("save_best")
    wishes = {"early_stopping": stopping, "save_best": best}
    monitors = {option: wish["monitor"] for option, wish in wishes.items() if wish}
    if monitors:
        made.watching.append(Watched(monitors, may_gain=bool(config.get("callbacks"))))
    if best:

        def save(model: Any) -> None:
            with writing():
                strategy.save(model, best_model())
            emit({"event": "best", "path": str(best_model()), **(made.best or {})})

        made.monitor = best["monitor"]
        made.keeper = BestModel(**best, save=save, from_chief=strategy.from_chief)
        made.watching.append(made.keeper)
    if stopping:  # After the best model: it may put the best weights back.
        made.watching.append(tf.keras.callbacks.EarlyStopping(**stopping))
    return made


def _trace(
    config: dict[str, Any], strategy: Any, steps: int, traces: Callable[[], Path] | None
) -> Any:
    """Returns the callback that traces the steps which were asked for."""
    from tfdist.training.loops.chief_only import on_chief
    from tfdist.training.loops.step_trace import Profile, StepTrace

    asked = wish.parsed(config["profile"])
    if asked.steps is None:
        return on_chief(Profile(asked.folder, steps))
    wish.check_steps(asked, steps)
    if asked.folder is not None:
        traces = functools.partial(Path, asked.folder)
    elif traces is None:
        raise OptionError(
            "profile must name a folder where a training has none of its own",
            received=config["profile"],
            mend=f"Write DIR,{asked}",
        )
    return StepTrace(traces, asked.steps, strategy.name, writing)
