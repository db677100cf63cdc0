"""What a training does on each of its processes, from its model to the end of its fit.

``tfdist train`` and a job on SageMaker share it, and differ in what they tell and what they write.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tfdist
from tfdist.launch.events import emit
from tfdist.runs import requested_callbacks
from tfdist.runs.requested_callbacks import Callbacks, writing

if TYPE_CHECKING:
    from tfdist.runs.epoch_rows import EpochRows
    from tfdist.strategies.base import Strategy
    from tfdist.training.checkpoints.checkpoint import Checkpoints
    from tfdist.training.feed.training_data import TrainingData

# All imports of TensorFlow stand in functions: a rank imports it in a way of its own first.


def say(line: str) -> None:
    """Prints a line in one piece: mpirun puts its prefix before each piece of unbuffered output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def dataset(
    strategy: Strategy, source: Any, config: Mapping[str, Any], *, training: bool
) -> TrainingData:
    """Returns the batches of one split.

    Args:
        source: of the split, as ``strategy.dataset`` takes it.
        config: what ``Settings.to_config`` gives.
        training: whether it is trained on; the others are read as they are.
    """
    # Strategies of other packages may know none of these: given only where asked for.
    own: dict[str, Any] = {}
    if config["pad_to"] is not None:
        own["pad_to"] = config["pad_to"]
    if training and config["augment"]:
        own["record_fn"] = tfdist.augment(config["augment"])
    if training and config["bucket_by_length"]:
        own["bucket_by_length"] = config["bucket_by_length"]
    feed = strategy.dataset(
        source,
        global_batch_size=config["global_batch_size"],
        training=training,
        seed=config["seed"],
        **own,
    )
    limit = config["limit_steps"]
    return feed if limit is None else feed.limited(limit)


class Fitting:
    """A model, its data and its fit, on this process.

    Args:
        strategy: whose block has been entered.
        config: what ``Settings.to_config`` gives, with "model".
        sources: "train", and perhaps other splits -> source, as ``strategy.dataset`` takes it.

    Attributes:
        model_fn: returns the model, with the learning rate that was asked for.
        model: as the strategy has built it.
        splits: those that are read: of a model that cannot be evaluated "train" alone.
        feed: what the model is trained on.

    Raises:
        TfdistError: a model or data that cannot be trained as they are.
    """

    def __init__(self, strategy: Strategy, config: Mapping[str, Any], sources: Mapping[str, Any]):
        import tensorflow as tf

        from tfdist.training.steps.custom_steps import can_evaluate

        self._strategy = strategy
        self._config = dict(config)
        self._sources = sources
        tf.keras.utils.set_random_seed(config["seed"])
        self.model_fn = requested_callbacks.model_fn(self._config)
        self.model = strategy.build(self.model_fn)
        self.splits = {"train", *sources} if can_evaluate(self.model) else {"train"}
        if len(self.splits) < len(sources) and strategy.topology.is_chief:
            say(
                f"tfdist: model '{self.model.name}' has neither a call nor a test_step, so it is "
                "trained, and not evaluated"
            )
        self.feed = dataset(strategy, sources["train"], self._config, training=True)

    @property
    def for_rows(self) -> dict[str, Any]:
        """The arguments of ``EpochRows``."""
        return {
            "records": self.feed.records_per_epoch,
            "stop_on_nan": self._config["stop_on_nan"],
        }

    def held_out(self, split: str) -> TrainingData | None:
        """Returns the batches of a split that is not trained on; None where it is not read."""
        if split not in self.splits:
            return None
        return dataset(self._strategy, self._sources[split], self._config, training=False)

    def checkpoints(self, directory: str | os.PathLike, *, resume: bool) -> Checkpoints:
        """Returns the callback that keeps checkpoints in ``directory``."""
        from tfdist.training.checkpoints.checkpoint import Checkpoints

        made = Checkpoints(
            directory,
            every_steps=self._config["checkpoint_every"],
            keep=self._config["keep"],
            resume=resume,
        )
        made.enclose_writing(writing)
        return made

    def fit(
        self,
        rows: EpochRows,
        checkpoints: Checkpoints | None,
        best_model: Callable[[], Path],
        *,
        traces: Callable[[], Path] | None = None,
        first: Sequence[Any] = (),
        last: Sequence[Any] = (),
    ) -> Callbacks:
        """Trains the model.

        Args:
            rows: tells of the epochs, after the user's own callbacks.
            checkpoints: runs after what it is to remember.
            best_model: returns where the best model is written now.
            traces: returns where a trace is written that was asked for without a folder; None: it
                must name one.
            first: callbacks that run before all others.
            last: those that run after them.
        """
        from tfdist.training.loops.tracing import TracingNotice

        validation = self.held_out("validation")
        wished = requested_callbacks.callbacks(
            self._config,
            self._strategy,
            self.feed.callback_steps,
            best_model,
            traces=traces,
        )
        callbacks = [*first, *wished.of_user, rows, *wished.watching]
        if checkpoints is not None:
            callbacks.append(checkpoints)
        if self._strategy.topology.is_chief:  # Keras shows nothing here.
            callbacks.append(TracingNotice(say=say))
        weights = self._config["class_weight"]
        emit({"event": "data", "steps": self.feed.callback_steps, "long": True})
        self.model.fit(
            self.feed,
            epochs=self._config["epochs"],
            validation_data=validation,
            callbacks=[*callbacks, *last],
            class_weight=weights and {int(number): each for number, each in weights.items()},
            verbose=0,
        )
        emit({"event": "trained", "long": True})  # Data for the test, and perhaps its trace.
        return wished
