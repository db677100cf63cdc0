"""A model as TensorFlow Serving takes it: versions beside each other, each of them proved."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfdist.errors import DataError, ExportError, OptionError, cannot_write
from tfdist.export.models import PlainModel, open_model
from tfdist.export.samples import Rows, open_samples
from tfdist.export.saved_model import signature_names, write
from tfdist.export.warmup import WARMUP, read_warmup, write_warmup
from tfdist.records.buckets.cache import local_shards
from tfdist.records.format.manifest import MANIFEST_NAME, find_split, load_manifest

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.records.format.schema import Schema

CONFIG = "models.config"
_SIGNATURE = "serving_default"
_ALLOWED = 1e-5
# Of folders that become versions: one so old is of an export that was killed.
_NEW, _ABANDONED_S = ".new-", 86_400.0
# Rows of the warm-up requests: one, as most clients send, and batches as a server makes them.
_ROWS = (1, 8, 32)


@dataclass(frozen=True)
class Served:
    """A version that was written.

    Attributes:
        path: its folder, OUT/VERSION.
        name: of the model, the folder's.
        version: one more than the highest before.
        config: the text file for ``tensorflow_model_server --model_config_file``.
        is_config_kept: whether it was there already, and stays as it was.
        records: how many were compared with Keras, those of the warm-up requests.
        largest_difference: of their outputs, relative where these are above 1.
    """

    path: Path
    name: str
    version: int
    config: Path
    is_config_kept: bool
    records: int
    largest_difference: float


def tf_serving(
    model: tf.keras.Model | str | os.PathLike,
    out: str | os.PathLike,
    *,
    data: str | os.PathLike | None,
    trust: bool = False,
) -> Served:
    """Writes a model as a new version for TensorFlow Serving, once it gives Keras' answers.

    Args:
        model: as in ``tflite``.
        out: the folder of the model's versions, whose name is the model's: DIR/NAME gets 1/, 2/
            and so on. It may be new; its folder must be there.
        data: shards, as "data/digits" or "data/digits/validation": the signature takes their
            inputs, and the warm-up requests have records of validation (or test).
        trust: as in ``tflite``.

    Raises:
        OptionError: no data, or no such folder. ModelError, DataError: as in ``tflite``.
        ExportError: the answers are others than Keras'; nothing was written.
        WriteError: the disk is full, or the folder cannot be written.
    """
    folder = _checked_folder(Path(out))
    if data is None:
        raise OptionError(
            "a model for TensorFlow Serving must come with records, to be compared with Keras",
            received="no --data",
            mend="Give the shards that it was trained on: --data DIR",
        )
    schema = _schema(data)
    plain = open_model(model, trust=trust)
    rows = open_samples(data, plain.inputs, samples=1, parity_samples=sum(_ROWS)).held_out
    try:
        folder.mkdir(exist_ok=True)
        _remove_abandoned(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_NEW) as place:
            written = Path(place) / "version"
            write(plain.keras, schema, written)
            write_warmup(written / WARMUP, folder.name, _SIGNATURE, _requests(schema, rows))
            difference = _largest_difference(plain, rows, written)
            version = 1 + max((int(each.name) for each in _versions(folder)), default=0)
            # A folder of that name that another export has made meanwhile stays as it is.
            written.rename(folder / str(version))
            config = folder / CONFIG
            is_config_kept = config.exists()
            if not is_config_kept:
                _write_config(config, Path(place))
    except OSError as error:
        raise cannot_write(folder, error) from error
    return Served(
        path=folder / str(version),
        name=folder.name,
        version=version,
        config=config,
        is_config_kept=is_config_kept,
        records=len(rows),
        largest_difference=difference,
    )


def _checked_folder(folder: Path) -> Path:
    folder = Path(os.path.abspath(folder))
    problem = None
    if not re.fullmatch(r"[A-Za-z][\w.-]*", folder.name, re.ASCII):
        problem = f"{folder}, whose name a URL cannot have"
    elif not folder.parent.is_dir():
        problem = f"{folder}, in a folder that does not exist"
    elif folder.exists() and not folder.is_dir():
        problem = f"{folder}, which is a file"
    elif folder.is_dir() and not _versions(folder) and not _is_begun(folder):
        problem = f"{folder}, which holds something else"
    if problem is None:
        return folder
    raise OptionError(
        "a model for TensorFlow Serving must be given a folder of its own, called as the model",
        received=problem,
        mend="Give DIR/NAME, such as serving/digits, in a folder DIR that is there",
    )


def _versions(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if re.fullmatch("[0-9]{1,18}", path.name)]


def _is_begun(folder: Path) -> bool:
    """Whether nothing is there but what an export that was killed leaves."""
    return all(path.name == CONFIG or path.name.startswith(_NEW) for path in folder.iterdir())


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_NEW}*"):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            shutil.rmtree(path)


def _schema(data: str | os.PathLike) -> Schema:
    if not isinstance(data, (str, os.PathLike)):
        raise DataError(
            "the data of a model for TensorFlow Serving must be shards, whose inputs it takes",
            received=f"a {type(data).__name__}",
            mend="Write them: `tfdist shard SOURCE OUT`",
        )
    folder = local_shards(data)
    is_folder = (folder / MANIFEST_NAME).is_file()
    return (load_manifest(folder) if is_folder else find_split(folder)[2]).schema


def _requests(schema: Schema, rows: Rows) -> list[dict[str, np.ndarray]]:
    """Returns the rows as requests of the signature, each row once."""
    names = signature_names(schema)
    # A model with one input need not call it as the records do.
    given = rows.x if len(names) > 1 else dict(zip(names, rows.x.values(), strict=True))
    columns = {names[name]: column for name, column in given.items()}
    ends = np.minimum(np.cumsum(_ROWS), len(rows))
    begins = [0, *ends[:-1]]
    return [
        {name: column[begin:end] for name, column in columns.items()}
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]


def _largest_difference(plain: PlainModel, rows: Rows, written: Path) -> float:
    """Returns how far the answers to the warm-up requests are from Keras'.

    The version is loaded as a server does, and its own file of requests is read.

    Raises:
        ExportError: further than they may be.
    """
    import tensorflow as tf

    inputs = {name: tf.constant(rows.x[name]) for name in plain.inputs}
    expected = {name: values.numpy() for name, values in plain(inputs).items()}
    loaded = tf.saved_model.load(str(written))
    answers = []
    for signature, inputs in read_warmup(written / WARMUP):
        tensors = {name: tf.constant(values) for name, values in inputs.items()}
        answers.append(loaded.signatures[signature](**tensors))
    found = {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}
    largest = 0.0
    for name, values in expected.items():
        # The only output is called "outputs" in the signature.
        own = found[name] if name in found else next(iter(found.values()))
        difference = _difference(own, values)
        largest = max(largest, float(np.max(difference)))
        if largest > _ALLOWED:
            record = int(np.argmax(difference.reshape(len(difference), -1).max(axis=1)))
            raise ExportError(
                f"the answers of the SavedModel must be those of Keras to {_ALLOWED:g}",
                received=f"{largest:.3g} in output '{name}' of record {record}",
                mend="Look for a layer that is random, or that computes otherwise in a graph",
            )
    return largest


def _difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns how far each value is from the expected, relative where this is above 1.

    Equal ones are 0, as two NaN are; others that no number tells of, such as text, are inf.
    """
    if expected.dtype.kind in "bOSU":  # TensorFlow gives text as objects.
        return np.where(found == expected, 0.0, np.inf)
    # Unsigned integers would wrap.
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    are_equal = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        difference = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    return np.where(are_equal, 0.0, np.where(np.isfinite(difference), difference, np.inf))


def _write_config(config: Path, place: Path) -> None:
    folder = config.parent
    text = (
        "model_config_list {\n"
        "  config {\n"
        f"    name: {json.dumps(folder.name)}\n"
        f"    base_path: {json.dumps(str(folder))}\n"
        '    model_platform: "tensorflow"\n'
        "  }\n"
        "}\n"
    )
    (place / CONFIG).write_text(text, encoding="utf-8")
    os.replace(place / CONFIG, config)
