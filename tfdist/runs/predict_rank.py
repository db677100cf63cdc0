"""One rank of ``tfdist predict``. Run as ``python -m tfdist.runs.predict_rank CONFIG``."""

from __future__ import annotations

import logging
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.errors import ModelError
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.runs.files import replacing
from tfdist.training import model_path

tf = import_tensorflow()
_BETWEEN_S = 0.2


class _Progress(tf.keras.callbacks.Callback):
    """Tells the command how far this rank is."""

    def __init__(self, steps: int):
        super().__init__()
        self._steps = steps
        self._told_at = 0.0

    def on_predict_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now = time.monotonic()
        if now - self._told_at >= _BETWEEN_S:
            self._told_at = now
            emit({"event": "step", "step": batch + 1, "steps": self._steps})


def predict(config: dict[str, Any]) -> None:
    from tfdist.training.unbuilt import build_now

    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready", "long": True})
        model = strategy.build(model_path.load(config["model"]))
        data = strategy.dataset(
            config["data"], global_batch_size=config["global_batch_size"], training=False
        )
        build_now(model, data)
        _refuse_for_one_array(Path(config["output"]), _known_outputs(model))
        _load(model, config["weights"])
        emit({"event": "begun", "long": True})  # The first step traces.
        progress = _Progress(data.steps_per_epoch)
        outputs = _named(model, model.predict(data, verbose=0, callbacks=[progress]))
        if strategy.topology.is_chief:
            _write(Path(config["output"]), outputs)
            told = {name: [list(rows.shape), rows.dtype.name] for name, rows in outputs.items()}
            emit({"event": "predicted", "outputs": told})
        strategy.from_chief(None)  # None ends, and is taken for lost, while the chief writes.


def _load(model: Any, path: str) -> None:
    """Gives a model the weights in a file that Keras wrote.

    Raises:
        ModelError: the file holds those of another model, or none, or those of other files.
    """
    from tfdist.export.trust import check_reads_no_others

    keras_log = logging.getLogger("absl")
    keras_log.addFilter(_is_of_weights)
    try:
        check_reads_no_others(Path(path))
        model.load_weights(path)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"--weights must be those of model '{model.name}', in a file that Keras wrote "
            "(.keras, .h5 or .weights.h5)",
            received=f"{path}: {' '.join(str(error).split())[:300]}",
            mend="Give the model.keras of a training of the same --model",
        ) from error
    finally:
        keras_log.removeFilter(_is_of_weights)


def _is_of_weights(record: logging.LogRecord) -> bool:
    """Whether a line is not of the optimizer, whose slots nothing here needs."""
    return "loading for optimizer" not in record.getMessage()


def _known_outputs(model: Any) -> list[str]:
    """Returns the names of what a model will predict; none where only its own code tells."""
    from tfdist.training.own_steps import own_steps

    return [] if "predict_step" in own_steps(model) else _output_names(model)


def _output_names(model: Any) -> list[str]:
    """Returns the names of a model's outputs; those of a class of its own have none."""
    return list(getattr(model, "output_names", None) or [])


def _named(model: Any, outputs: Any) -> dict[str, np.ndarray]:
    """Returns the outputs of a model, each [records, ...], by name; a single one: predictions."""
    if isinstance(outputs, dict):
        return {name: np.asarray(rows) for name, rows in outputs.items()}
    if not isinstance(outputs, (list, tuple)):
        return {"predictions": np.asarray(outputs)}
    flat = list(outputs)
    names = _output_names(model)
    if len(names) != len(flat):
        names = [f"output_{number}" for number in range(len(flat))]
    return {name: np.asarray(rows) for name, rows in zip(names, flat, strict=True)}


def _refuse_for_one_array(path: Path, names: list[str]) -> None:
    """Raises:
    ModelError: there are several outputs for one array.
    """
    if path.suffix == ".npy" and len(names) > 1:
        raise ModelError(
            "a file .npy must hold one output",
            received=f"{len(names)}: {', '.join(names)}",
            mend=f"Write --output {path.with_suffix('.npz')}, which holds all by name",
        )


def _write(path: Path, outputs: dict[str, np.ndarray]) -> None:
    """Writes whole files only.

    Raises:
        ModelError: there are several outputs for one array, which only the model's call told.
        WriteError: the disk is full, or the folder cannot be written.
    """
    _refuse_for_one_array(path, list(outputs))
    with replacing(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(outputs.values())), allow_pickle=False)
        else:
            _write_arrays(file, outputs)


def _write_arrays(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """Writes what np.savez does, of any names: "file" is that of an argument of its own."""
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, rows in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, rows, allow_pickle=False)


if __name__ == "__main__":
    ranks.main(predict)
