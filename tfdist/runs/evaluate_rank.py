"""The evaluator beside a training. Run as ``python -m tfdist.runs.evaluate_rank CONFIG``.

It reads what the training writes, and nothing else joins the two: each new checkpoint is evaluated
on one device, until the training has ended.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.errors import CheckpointError, DataError, LaunchError, WriteError, first_line
from tfdist.launch.events import emit, emit_numbers
from tfdist.runs import fitting, ranks, requested_callbacks
from tfdist.runs.epoch_rows import Alive, numbers
from tfdist.runs.files import read_rows, write_history
from tfdist.runs.folder import RunFolder
from tfdist.training.checkpoints import checkpoint_files

tf = import_tensorflow()
_INTERVAL_S = 1.0
# Longer than an epoch may take; or so many times the longest wait between two checkpoints.
_PATIENCE_S, _PATIENCE = 3600.0, 10


class _Watch:
    """Says which checkpoint comes next, and when there will be none any more.

    Args:
        epochs: of the whole training.
        overwrite: whether it replaces an earlier one, which stands until its first epoch has ended.
    """

    def __init__(self, folder: RunFolder, epochs: int, *, overwrite: bool):
        self._folder = folder
        self._epochs = epochs
        self._seen: tuple[Path, int | None] | None = None
        # Those of an earlier training, perhaps, which is gone on from, or replaced.
        self._ended_before = _written_at(folder.path / folder.metrics.name)
        self._earlier = self._newest() if overwrite and not folder.is_staged else None
        self._has_begun = False  # What replaces it.
        self._patience = _PATIENCE_S
        self._changed_at = time.monotonic()

    def next(self) -> Path | None:
        """Waits for a checkpoint that is new; None once the training has ended.

        Raises:
            LaunchError: nothing has come for too long.
        """
        while True:
            # In this order: the training writes the last one before it says that it has ended.
            ended_at = None if self._folder.is_staged else _written_at(self._folder.metrics)
            has_ended = ended_at not in (None, self._ended_before)
            newest = self._newest()
            if newest not in (None, self._seen, self._earlier):
                self._seen = newest
                return newest[0]
            if has_ended:
                return None
            self._has_begun = self._has_begun or self._folder.is_staged
            is_late = time.monotonic() - self._changed_at > self._patience
            if is_late and self._earlier is not None and not self._has_begun:
                self._earlier = None  # It was this one, which had ended before.
                continue
            self._check_patience()
            emit({"event": "waiting"})
            time.sleep(_INTERVAL_S)

    def _newest(self) -> tuple[Path, int | None] | None:
        """Returns the newest checkpoint, and when it was written: another training numbers its own
        alike."""
        names = checkpoint_files.finished(self._folder.checkpoints)
        if not names:
            return None
        newest = self._folder.checkpoints / names[-1]
        return newest, _written_at(_index(newest))

    def took(self, epoch: int) -> bool:
        """Notes that a checkpoint of ``epoch`` is evaluated; whether it was the last one."""
        now = time.monotonic()
        self._patience = max(self._patience, _PATIENCE * (now - self._changed_at))
        self._changed_at = now
        return epoch >= self._epochs

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._changed_at
        if waited > self._patience:
            raise LaunchError(
                f"a training beside its evaluator must write checkpoints in {self._folder.path}",
                received=f"none for {waited / 60:.0f} minutes",
                mend="See whether it still runs, and writes in the folder that the evaluator reads",
            )


def _written_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _index(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.index")


def _restore(model: tf.keras.Model, path: Path) -> tuple[int, int]:
    """Gives ``model`` the weights of a checkpoint; returns its place, (epoch, step)."""
    from tfdist.keras.trackables import saved, unknown_variables
    from tfdist.training.model.lookup_vocabularies import follow_variables

    reader = tf.train.load_checkpoint(str(path))
    place = reader.get_tensor("state/position/.ATTRIBUTES/VARIABLE_VALUE")
    own = {"own": tf.train.Checkpoint(kept=unknown_variables(model))}
    has_own = any(name.startswith("own/") for name in reader.get_variable_to_shape_map())
    status = tf.train.Checkpoint(model=saved(model), **(own if has_own else {})).read(str(path))
    try:
        status.assert_existing_objects_matched().expect_partial()
    except AssertionError as error:
        raise CheckpointError(
            "a checkpoint must be evaluated by the model that wrote it",
            received=f"{path}: {first_line(error)}",
            mend="Give the evaluator the command of the training",
        ) from error
    follow_variables(model)
    epoch, step = (int(number) for number in place)
    return epoch, step


def _keep(folder: RunFolder, row: dict[str, float]) -> None:
    """Adds an evaluation to those before it; later ones are of a training that was resumed."""
    place = None
    while place != folder.place:  # Which the training may move.
        place = folder.place
        rows = read_rows(folder.evaluations)
        before = [
            each for each in rows if (each["epoch"], each["step"]) < (row["epoch"], row["step"])
        ]
        try:
            write_history(folder.evaluations, [*before, row])
        except WriteError:
            if place == folder.place:
                raise


def evaluate(config: dict[str, Any]) -> None:
    folder = RunFolder(config["output"])
    split = next((name for name in ("validation", "test") if name in config["splits"]), None)
    if split is None:
        raise DataError(
            "the data of an evaluator must have a split called validation or test",
            received=f"{config['data']} with {', '.join(config['splits'])}",
            mend="Write some with `tfdist shard SOURCE OUT --split train=5,validation=1`, "
            "or leave the evaluator out",
        )
    with tfdist.strategy("single") as strategy:
        emit({"event": "ready", "long": True})
        model = strategy.build(requested_callbacks.model_fn(config))
        data = fitting.dataset(strategy, config["splits"][split], config, training=False)
        watch = _Watch(folder, config["epochs"], overwrite=config["overwrite"])
        while (path := watch.next()) is not None:
            try:
                epoch, step = _restore(model, path)
            except (tf.errors.OpError, ValueError, OSError):
                if _index(path).exists():
                    raise
                continue  # The training has removed it meanwhile, or moved it.
            rows = read_rows(folder.evaluations)
            if all((row["epoch"], row["step"]) != (epoch, step) for row in rows):
                emit({"event": "evaluating", "long": True})
                alive = Alive(lambda step: {"event": "waiting"})  # A step would be the training's.
                found = model.evaluate(data, verbose=0, return_dict=True, callbacks=[alive])
                row = {"epoch": epoch, "step": step, **numbers(found)}
                _keep(folder, row)
                emit_numbers({"event": "evaluated", "row": row, "path": str(path)}, "row")
            if watch.took(epoch):
                break
    emit({"event": "done", "long": True})


if __name__ == "__main__":
    ranks.main(evaluate)
