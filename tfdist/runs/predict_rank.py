"""A rank of ``tfdist predict`` or ``evaluate``. ``python -m tfdist.runs.predict_rank CONFIG``."""

from __future__ import annotations

import functools
import logging
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.compat.keras import UNREADABLE
from tfdist.errors import ModelError, OptionError, in_one_line
from tfdist.launch.events import emit, emit_numbers
from tfdist.records.format.manifest import find_split, load_manifest
from tfdist.records.reading.stored import Section
from tfdist.records.replacing import replacing
from tfdist.runs import prediction_table, ranks
from tfdist.runs.epoch_rows import Alive, numbers
from tfdist.runs.predicting import TABLES
from tfdist.runs.requested_callbacks import writing
from tfdist.training.engine import model_path

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy
    from tfdist.training.feed.training_data import TrainingData

tf = import_tensorflow()
_BETWEEN_S = 0.2


def _built(strategy: Strategy, config: dict[str, Any]) -> tuple[Any, TrainingData]:
    """Returns a model, which has no weights of its training yet, and the records for it."""
    from tfdist.training.model.deferred_build import build_now

    emit({"event": "ready", "long": True})
    model = strategy.build(model_path.load(config["model"]))
    pad_to = config["pad_to"]
    schema = find_split(Path(config["data"]))[2].schema
    if not any(feature.is_ragged for feature in schema.features):
        pad_to = None  # All have one length.
    if not strategy.takes_lengths:
        why = f"strategy '{strategy.name}' takes batches of one length"
    elif "output" in config and not _has_one_shape(model):
        why = "outputs that have a length of their own, or may have one, must fit into one array"
    else:
        why = None
    if pad_to is not None and why is not None:
        if config.get("section") is not None and not strategy.takes_lengths:
            raise OptionError(
                "parts of predictions must be padded alike, as the training padded",
                received=why,
                mend="Choose another strategy for all parts, such as single",
            )
        pad_to = None
        if strategy.topology.is_chief:
            print(
                f"tfdist: records are padded to one length, and not as in the training: {why}",
                flush=True,
            )
    # Strategies of other packages may not know it: given only where asked for.
    padded = {} if pad_to is None else {"pad_to": pad_to}
    source = config["data"]
    if config.get("section") is not None:
        start, stop = config["section"]
        source = Section(path=source, start=start, stop=stop)
    data = strategy.dataset(
        source, global_batch_size=config["global_batch_size"], training=False, **padded
    )
    build_now(model, data)
    return model, data


def _begun(steps: int) -> Alive:
    """Tells that a model is ready; returns the callback that tells how far this rank is."""
    emit({"event": "begun", "long": True})  # The first step traces.
    return Alive(lambda step: {"event": "step", "step": step, "steps": steps}, _BETWEEN_S)


def predict(config: dict[str, Any]) -> None:
    from tfdist.keras.losses import compiled_losses

    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        model, data = _built(strategy, config)
        path = Path(config["output"])
        _check_fits(path, dict(zip(_output_names(model), _known_outputs(model), strict=False)))
        load(model, config["weights"])
        progress = _begun(data.steps_per_epoch)
        predicted = model.predict(data, verbose=0, callbacks=[progress])
        outputs = named_outputs(model, predicted)
        if strategy.topology.is_chief:
            specs = {n: tf.TensorSpec(rows.shape, rows.dtype) for n, rows in outputs.items()}
            _check_fits(path, specs)  # What only the model's call has told.
            with writing():
                if path.suffix in TABLES:
                    losses = named_losses(compiled_losses(model), predicted, list(outputs))
                    columns = _columns(config, losses, outputs)
                    goes_on = functools.partial(emit, {"event": "writing", "long": True})
                    prediction_table.write_table(path, columns, goes_on)
                else:
                    _write(path, outputs)
            told = {name: [list(rows.shape), rows.dtype.name] for name, rows in outputs.items()}
            emit_numbers({"event": "predicted", "outputs": told}, "outputs")
        strategy.from_chief(None)  # None ends, and is taken for lost, while the chief writes.


def evaluate(config: dict[str, Any]) -> None:
    _, split, manifest = find_split(Path(config["data"]))
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        model, data = _built(strategy, config)
        load(model, config["weights"])
        progress = _begun(data.steps_per_epoch)
        found = model.evaluate(data, verbose=0, return_dict=True, callbacks=[progress])
        if strategy.topology.is_chief:
            records = manifest.splits[split].records
            told = {"event": "found", "metrics": numbers(found), "records": records}
            emit_numbers(told, "metrics")
        strategy.from_chief(None)  # None ends, and is taken for lost, before the chief has told.


def load(model: Any, path: str) -> None:
    """Gives a model the weights in a file that Keras wrote.

    Raises:
        ModelError: the file holds those of another model, or none, or those of other files.
    """
    from tfdist.export.trust import check_reads_no_others
    from tfdist.training.checkpoints.init_weights import passed_by
    from tfdist.training.model.lookup_vocabularies import follow_variables

    keras_log = logging.getLogger("absl")
    keras_log.addFilter(_is_of_weights)
    try:
        check_reads_no_others(Path(path))
        with warnings.catch_warnings():  # Where Keras 3 tells what Keras 2 logs.
            warnings.filterwarnings("ignore", ".* loading for optimizer")
            model.load_weights(path)
        follow_variables(model)
        if more := passed_by(model, path):
            raise ValueError(f"the model has no {', '.join(more)}")
    except UNREADABLE as error:
        raise ModelError(
            f"the weights must be those of model '{model.name}', in a file that Keras wrote "
            "(.keras, .h5 or .weights.h5)",
            received=f"{path}: {in_one_line(error)}",
            mend="Give the model.keras of a training of the same --model",
        ) from error
    finally:
        keras_log.removeFilter(_is_of_weights)


def _is_of_weights(record: logging.LogRecord) -> bool:
    """Whether a line is not of the optimizer, whose slots nothing here needs."""
    return "loading for optimizer" not in record.getMessage()


def _has_one_shape(model: Any) -> bool:
    """Whether a row of each output is known to have one shape, however long its record is."""
    known = _known_outputs(model)
    return bool(known) and all(spec.shape[1:].is_fully_defined() for spec in known)


def _known_outputs(model: Any) -> list[tf.TensorSpec]:
    """Returns what a model will predict; nothing where only its own code tells."""
    from tfdist.training.steps.custom_steps import own_steps

    if "predict_step" in own_steps(model):
        return []
    outputs = tf.nest.flatten(getattr(model, "outputs", None) or [])
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in outputs]


def _columns(
    config: dict[str, Any], losses: Mapping[str, Any], outputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the columns of the table that ``outputs`` are written as."""
    _, split, manifest = find_split(Path(config["data"]))
    shards = manifest.splits[split].shards
    schemas = [manifest.schema]
    if config["trained_on"] is not None:  # The numbers of classes are those of the training.
        schemas.insert(0, load_manifest(config["trained_on"]).schema)
    counts = np.array([shard.records for shard in shards])
    begins = np.cumsum(counts) - counts
    start, stop = config["section"] or (0, counts.sum())
    firsts = np.clip(start - begins, 0, counts)
    ends = np.clip(stop - begins, 0, counts)
    keys = {
        "shard": np.repeat([shard.file for shard in shards], ends - firsts),
        "record": np.concatenate(list(map(np.arange, firsts, ends))),
    }
    if config["keys"] is not None:
        names = np.load(config["keys"]["file"], allow_pickle=False)
        keys = {config["keys"]["column"]: names}
    classes = prediction_table.classes_of(schemas, list(outputs))
    return prediction_table.columns_of(keys, outputs, losses, classes)


def _output_names(model: Any) -> list[str]:
    """Returns the names of a model's outputs; those of a class of its own have none."""
    return list(getattr(model, "output_names", None) or [])


def named_outputs(model: Any, outputs: Any) -> dict[str, np.ndarray]:
    """Returns the outputs of a model, each [records, ...], by name; a single one: predictions.

    What NumPy's files cannot hold is what they can: bfloat16 is float32, and bytes are text.
    """
    if isinstance(outputs, dict):
        return {name: _storable(rows) for name, rows in outputs.items()}
    if not isinstance(outputs, (list, tuple)):
        return {prediction_table.ALONE: _storable(outputs)}
    flat = list(outputs)
    names = _output_names(model)
    if len(names) != len(flat):
        names = [f"output_{number}" for number in range(len(flat))]
    return {name: _storable(rows) for name, rows in zip(names, flat, strict=True)}


def named_losses(losses: Any, predicted: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns the loss of each output by its name.

    Args:
        losses: as a model was compiled with them.
        predicted: what it returned.
        names: of the outputs in it.
    """
    if isinstance(losses, Mapping):
        is_one = len(losses) == len(names) == 1
        return dict(zip(names, losses.values(), strict=True)) if is_one else losses
    # Keras has the outputs of a dict in the order of their names.
    flat = sorted(names) if isinstance(predicted, Mapping) else names
    each = losses if isinstance(losses, (list, tuple)) else [losses] * len(names)
    return dict(zip(flat, each, strict=False))


def _storable(outputs: Any) -> np.ndarray:
    rows = np.asarray(outputs)
    if rows.dtype.kind == "V":  # bfloat16
        return rows.astype(np.float32)
    if rows.dtype.kind not in "OS":
        return rows
    texts = [
        each.decode("utf-8", "backslashreplace") if isinstance(each, bytes) else str(each)
        for each in rows.ravel().tolist()
    ]
    return np.array(texts, np.str_).reshape(rows.shape)


def _check_fits(path: Path, outputs: dict[str, tf.TensorSpec]) -> None:
    """Checks that a file can hold the outputs.

    Raises:
        ModelError: there are several outputs for one array, or one that no table can hold.
    """
    if path.suffix in TABLES:
        prediction_table.check_dimensions({n: spec.shape.rank for n, spec in outputs.items()})
    of_complex = [name for name, spec in outputs.items() if spec.dtype.is_complex]
    if of_complex and path.suffix in (".jsonl", ".parquet"):
        raise ModelError(
            f"an output in a file {path.suffix} must be of a type that it has",
            received=f"output '{of_complex[0]}', of {outputs[of_complex[0]].dtype.name}",
            mend="Write a file .npz, which holds complex numbers",
        )
    if path.suffix == ".npy" and len(outputs) > 1:
        raise ModelError(
            "a file .npy must hold one output",
            received=f"{len(outputs)}: {', '.join(outputs)}",
            mend=f"Write --output {path.with_suffix('.npz')}, which holds all by name",
        )


def _write(path: Path, outputs: dict[str, np.ndarray]) -> None:
    """Writes whole files only. Raises WriteError: the disk is full, or the folder is read-only."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(outputs.values())), allow_pickle=False)
            return
        # What np.savez does, of any names: "file" is that of an argument of its own.
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            for name, rows in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, rows, allow_pickle=False)


if __name__ == "__main__":
    ranks.main(lambda config: (predict if "output" in config else evaluate)(config))
