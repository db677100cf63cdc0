"""``tfdist.predict``: a trained model's outputs for each record, in the processes of a strategy."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.compat import follow_program
from tfdist.errors import DataError, OptionError
from tfdist.launch.jobs import Where
from tfdist.records.buckets.urls import url_of
from tfdist.records.parts import Part
from tfdist.records.replacing import check_replaceable
from tfdist.runs import merged_files, ranks
from tfdist.runs.files import read_config
from tfdist.runs.prediction_parts import (
    Share,
    digests_of,
    whole_part,
    write_note,
)
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count, picked

if TYPE_CHECKING:
    import numpy as np

RANK = "tfdist.runs.predict_rank"
#: Suffixes of files with a row for each record.
TABLES = (".csv", ".jsonl", ".parquet")
_SUFFIXES = (".npz", ".npy", *TABLES)


@dataclass(frozen=True)
class Predictions:
    """The outputs of a model that were written.

    Attributes:
        output: the file.
        outputs: name -> shape and type of an array in it; a single output is "predictions".
    """

    output: Path
    outputs: dict[str, tuple[tuple[int, ...], str]]

    def load(self) -> dict[str, np.ndarray]:
        """Returns name -> rows, one for each record, in their order.

        Raises:
            OptionError: the file is a table.
        """
        import numpy as np

        if self.output.suffix in TABLES:
            raise OptionError(
                "load must be of a file .npz or .npy",
                received=str(self.output),
                mend="Read it as a table, such as with pandas",
            )

        found = np.load(self.output, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return dict.fromkeys(self.outputs, found)
        with found:
            return dict(found)


def predict(
    model: str | Callable[[], Any],
    weights: str | os.PathLike,
    data: str | os.PathLike,
    output: str | os.PathLike,
    *,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | None = None,
    controller: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float = 300.0,
    global_batch_size: int = 256,
    overwrite: bool = False,
    trained_on: str | os.PathLike | None = None,
    part: str | None = None,
    resume: bool = False,
) -> Predictions | None:
    """Writes a trained model's outputs for each record: what ``tfdist predict`` does.

    TensorFlow may already be in use in this process, as in a notebook. Each number is that of one
    device.

    Args:
        model: as in ``tfdist.train``; it makes the model that the weights are read into.
        weights: of the trained model: a .keras, .h5 or .weights.h5 file.
        data: one split of shards, as "data/digits/test"; or what is not labelled: a photo, a
            folder of photos, or a table (.csv, .tsv, .jsonl, .parquet, .arrow or .feather).
        output: a new file: .csv, .jsonl and .parquet have a row for each record, with its name, and
            its class and the probability of that, or the values; .npz has the array "predictions",
            or each of several outputs by its name; .npy has the only one.
        strategy: a registered name, or "auto".
        options: of the strategy.
        workers: number of processes; None is the strategy's own default.
        ps: number of parameter servers, where the strategy has them.
        hosts: "A:2,B:2", with their slots, reached by ssh; None is this machine.
        controller: what starts and connects the processes of horovod, "mpi" or "gloo".
        start_timeout_s: until every process must have started.
        stall_timeout_s: longest silence of a running job.
        global_batch_size: records in one step, over all replicas.
        overwrite: replace ``output`` when all is predicted.
        trained_on: the shards that the model was trained on, which tell how photos and tables are
            read, and the names of classes; None: those that config.json beside the weights names.
        part: "2/8" predicts the second of eight parts alone, whole batches of the records, and
            writes it beside ``output``, to "NAME.part-2-of-8.csv"; see ``prediction_parts.merge``.
        resume: a part that is there whole is not predicted again.

    Returns:
        What was written; None on a rank that srun or mpirun has started, unless it is the chief.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank.
        RankFailedError: a process failed otherwise; its last lines were printed.
    """
    where = ranks.asked("tfdist.predict", model, **picked(Where, locals()))
    check_count("global_batch_size", global_batch_size)
    return carry_out(
        where,
        model=model_path.of(model),
        weights=Path(weights),
        data=os.fspath(data),
        output=Path(output),
        global_batch_size=global_batch_size,
        overwrite=overwrite,
        trained_on=None if trained_on is None else os.fspath(trained_on),
        part=part,
        resume=resume,
    )


def carry_out(
    where: Where,
    *,
    model: str,
    weights: Path,
    data: str,
    output: Path,
    global_batch_size: int,
    overwrite: bool,
    trained_on: str | None = None,
    part: str | None = None,
    resume: bool = False,
    pads_as_trained: bool = True,
    on_event: Callable[[int, dict[str, Any]], None] = lambda rank, event: None,
    stop: threading.Event | None = None,
) -> Predictions | None:
    """Predicts on ``where``; see ``predict`` for what it returns and raises.

    Args:
        pads_as_trained: whether to pad records as the training did; else to the length of all.
        on_event, stop: see ``ranks.run``.
    """
    model_path.check(model)
    mine = None if part is None else Part.of(part)
    if resume and mine is None:
        raise OptionError(
            "--resume must be of a part", received="no --part", mend="Give --part, or leave it out"
        )
    file = output if mine is None else mine.path_of(output)
    _check(weights, file, overwrite=overwrite or resume)
    share = Share(mine, global_batch_size)
    digests: dict[str, Any] = {}
    training = training_data(weights, trained_on)
    pad_to = padding_of(weights) if pads_as_trained else None
    if mine is not None:
        digests = digests_of(model, weights, data, training) | {"pad_to": pad_to}
        note = whole_part(file, digests, global_batch_size) if resume else None
        if note is not None:
            return Predictions(file, _outputs(note.outputs)) if where.is_chief else None
    follow_program(os.environ, model_path.parts(model)[0], weights)
    outputs: dict[str, tuple[tuple[int, ...], str]] = {}

    def take(rank: int, event: dict[str, Any]) -> None:
        outputs.update(_outputs(event.get("outputs", {})))
        on_event(rank, event)

    with _as_shards(data, training, where, share) as (shards, keys):
        config = {
            "model": model,
            "weights": os.path.abspath(weights),
            "data": shards,
            "keys": keys,
            "section": None if mine is None or keys else (share.start, share.stop),
            "trained_on": training,
            "pad_to": pad_to,
            "output": os.path.abspath(file),
            "global_batch_size": global_batch_size,
        }
        ranks.run(RANK, config, where, take, stop=stop)
    if not where.is_chief:
        return None
    if mine is not None:
        asked = {
            "model": model,
            "weights": weights,
            "data": data,
            "output": output,
            "trained-on": trained_on,
            "global-batch-size": global_batch_size,
            **where.asked,
        }
        write_note(file, share, outputs, digests, asked)
    return Predictions(file, outputs)


def _outputs(told: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns ``Predictions.outputs`` of what was read as JSON."""
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in told.items()}


def training_data(weights: Path, trained_on: str | None) -> str | None:
    """Returns the shards that the model was trained on; None where nothing tells.

    Args:
        trained_on: where they are; None: where the config.json beside the weights says.

    Raises:
        DataError: ``trained_on`` is no folder of shards.
    """
    from tfdist.records.format.manifest import MANIFEST_NAME, load_manifest

    def folder_of(given: str) -> str:
        above = Path(given).parent  # A split, whose files may lie in a folder of its own.
        is_split = not (Path(given) / MANIFEST_NAME).is_file() and (above / MANIFEST_NAME).is_file()
        folder = str(above) if is_split else given
        load_manifest(folder)
        return folder

    if trained_on is not None:
        return folder_of(trained_on)
    with contextlib.suppress(DataError):
        config = read_config(weights.with_name("config.json"))
        if url_of(config["data"]) is None:  # All of a URL would be fetched.
            return folder_of(os.path.join(config.get("working_folder") or "", config["data"]))
    return None


def padding_of(weights: Path) -> Any:
    """Returns what the training padded records to, which predictions may depend on."""
    with contextlib.suppress(DataError):
        return read_config(weights.with_name("config.json")).get("pad_to")
    return None


@contextlib.contextmanager
def _as_shards(
    data: str, training: str | None, where: Where, share: Share
) -> Iterator[tuple[str, dict[str, str] | None]]:
    """Gives the shards to predict on, and where names of their records are written, if anywhere.

    Photos and tables are written as shards, which are removed at the end; of them those of the
    share alone.

    Raises:
        DataError: they are not what the model was trained on, or nothing tells what that was.
    """
    import numpy as np

    from tfdist.records.buckets.cache import scratch_folder
    from tfdist.records.format.manifest import find_split, load_manifest
    from tfdist.records.writing.as_trained import find_raw, write_as_trained

    raw = find_raw(data)
    if raw is None:
        if share.part is not None:
            _, split, manifest = find_split(Path(data))
            share.among(manifest.splits[split].records)
        yield data, None
        return
    if training is None:
        raise DataError(
            "photos and tables must be read as in the training, which its shards tell",
            received="no config.json beside the weights that names such shards here",
            mend="Name them: --trained-on DIR",
        )
    if where.hosts is not None:
        raise OptionError(
            "photos and tables must be predicted on this machine, where shards are made of them",
            received=f"--hosts {where.hosts}",
            mend="Leave it out, or give shards: `tfdist shard SOURCE OUT`",
        )
    with scratch_folder() as folder:
        keys = write_as_trained(raw, load_manifest(training).schema, folder / "shards", share.among)
        names = folder / "names.npy"
        np.save(names, keys.values, allow_pickle=False)
        yield str(folder / "shards"), {"column": keys.column, "file": str(names)}


def check_weights(weights: Path, what: str) -> None:
    """Checks that weights are a file. Raises OptionError where there is none."""
    if not weights.is_file():
        raise OptionError(
            f"{what} must be a file that Keras wrote",
            received=f"{weights}, which is none",
            mend="Give the model.keras in the output of a training",
        )


def _check(weights: Path, output: Path, *, overwrite: bool) -> None:
    """Checks that there are such weights, and that the output can be written.

    Raises:
        OptionError: there are none, or it cannot be, or must not be replaced.
    """
    check_weights(weights, "--weights")
    if output.suffix not in _SUFFIXES:
        known = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        raise OptionError(
            f"--output must end with {known}",
            received=str(output),
            mend="Write such a name, as --output predictions.csv",
        )
    if output.suffix == ".parquet":
        merged_files.parquet()
    if not output.absolute().parent.is_dir():
        raise OptionError(
            "--output must lie in a folder that exists",
            received=f"no folder {output.parent}",
            mend="Make it first",
        )
    if output.is_dir() or (output.exists() and not overwrite):
        raise OptionError(
            "--output must be a new file",
            received=f"{output}, which is there already",
            mend="Give another name" if output.is_dir() else "Give another name, or --overwrite",
        )
    check_replaceable(output)
