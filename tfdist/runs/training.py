"""``tfdist.train``: a Keras model, a folder of shards, a strategy, and the processes it needs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from tfdist import topology
from tfdist.errors import DataError, DivergedError, OptionError
from tfdist.launch.jobs import Where
from tfdist.records.buckets.cache import local_shards, scratch_folder
from tfdist.records.buckets.urls import url_of
from tfdist.runs import curves, ranks
from tfdist.runs.choosing import fitting
from tfdist.runs.evaluating import evaluate_beside
from tfdist.runs.files import read_rows, write_json
from tfdist.runs.folder import RunFolder
from tfdist.runs.metrics_file import MetricsFile
from tfdist.runs.progress import Progress, Silent
from tfdist.runs.resource_log import ResourceLog
from tfdist.runs.settings import Settings, Start
from tfdist.runs.trackers import tracked
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_values, picked

if TYPE_CHECKING:
    import tensorflow as tf

RANK = "tfdist.runs.train_rank"


@dataclass(frozen=True)
class Run:
    """A training that has ended, and what it left in its folder.

    Attributes:
        folder: where all of it is.
        history: a row for each epoch: "epoch", "loss", the metrics, those of validation as
            "val_loss", "seconds", "samples_per_s"; where it is measured "data_wait", the share of
            the seconds that steps waited for data.
        summary: of the last epoch: "strategy", "workers", "replicas", and by data ("train",
            "validation", "test") the metrics; "resources", a dict for each rank, of all epochs.
        url: of an output in a bucket; ``folder`` is then a copy of it on this machine, which is
            there as long as this process.
        has_trained: whether an epoch was trained in this call; False where all were done before.
        curves: the chart of the history; why there is none, where matplotlib is missing.
    """

    folder: Path
    history: list[dict[str, float]]
    summary: dict[str, Any]
    has_trained: bool
    curves: str
    url: str | None = None

    @property
    def model_path(self) -> Path:
        """The trained model, an ordinary Keras file."""
        return RunFolder(self.folder).model

    @property
    def best_model_path(self) -> Path | None:
        """The model of the best epoch; None where ``save_best`` has kept none."""
        path = RunFolder(self.folder).best_model
        return path if self.summary.get("best") else None

    @property
    def checkpoints(self) -> Path:
        return RunFolder(self.folder).checkpoints

    def load_model(self) -> tf.keras.Model:
        """Returns the trained model, in this process and without a strategy."""
        import tensorflow as tf

        from tfdist.training.model.lookup_vocabularies import follow_variables

        model = tf.keras.models.load_model(self.model_path)
        follow_variables(model)  # Keras 2 does not, of an adapted Discretization.
        return model


def train(
    model: str | Callable[[], Any],
    data: str | os.PathLike,
    output: str | os.PathLike,
    *,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | None = None,
    controller: str | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    host_discovery: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float = 300.0,
    epochs: int = 5,
    global_batch_size: int = 128,
    seed: int = 0,
    init_weights: str | None = None,
    lr: float | None = None,
    augment: str | Sequence[str] | None = None,
    pad_to: int | str | None = None,
    bucket_by_length: bool | Sequence[int] = False,
    class_weight: str | Mapping[Any, float] | None = None,
    early_stopping: str | Mapping[str, Any] | None = None,
    save_best: str | Mapping[str, Any] | None = None,
    callbacks: str | Callable[[], Any] | None = None,
    limit_steps: int | None = None,
    tensorboard: str | None = None,
    mlflow: str | None = None,
    wandb: str | None = None,
    metrics_file: str | None = None,
    profile: str | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    stop_on_nan: bool = True,
    resume: bool = False,
    rescale: bool = False,
    overwrite: bool = False,
    max_restarts: int = 0,
    verbose: bool = True,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Run | None:
    """Trains a Keras model on a strategy, in processes of its own: what ``tfdist train`` does.

    TensorFlow may already be in use in this process, as in a notebook.

    Args:
        model: "FILE.py:NAME", "MODULE:NAME", or a function of a file or module that the processes
            can import; it returns a compiled Keras model.
        data: shards written by ``tfdist shard``: trains on the split train, validates on
            validation and ends with test, where they are there. "DIR/SPLIT" trains on that alone.
        output: the folder for the results, a new one, or that of a training to go on with; or a
            place in a bucket, s3:// or gs://, to which what is complete is taken meanwhile.
        strategy: a registered name, or "auto".
        options: of the strategy.
        workers: number of processes; None is the strategy's own default.
        ps: number of parameter servers, where the strategy has them.
        hosts: "A:2,B:2", with their slots, reached by ssh; None is this machine.
        controller: what starts and connects the processes of horovod, "mpi" or "gloo".
        min_workers: makes the job elastic: it goes on as long as there are so many.
        max_workers: elastic: most workers at a time.
        host_discovery: elastic: a program that prints the slots there are.
        start_timeout_s: until every process must have started.
        stall_timeout_s: longest silence of a running job.
        epochs: of the whole training.
        global_batch_size: records in one step, over all replicas.
        seed: of weights, order and augmentation.
        init_weights: a .keras or .weights.h5 file of Keras, with whose weights the model begins.
        lr: the learning rate, in place of the one that the model was compiled with.
        augment: changes the images that are trained on at random, as "flip,crop,color"; see
            ``tfdist.augment``.
        pad_to: features of variable length are padded to the longest record of each global batch
            with "batch", or to a multiple of a number; None pads all to one length.
        bucket_by_length: whether to train on batches of records of similar lengths; a list of
            rising lengths says which are similar.
        class_weight: class -> what its records count in the loss; "0=1.0,1=2.0", a JSON file of
            such an object, or "balanced", with which each class counts alike.
        early_stopping: "val_loss,patience=3": ends the training when that number has not become
            better for so many epochs; or the arguments of Keras' ``EarlyStopping``.
        save_best: "val_accuracy": writes the model of the best epoch so far to best.keras.
        callbacks: "FILE.py:NAME" or a function as ``model``, which returns a list of Keras
            callbacks; each process calls it.
        limit_steps: a dry run: so many steps of each epoch, of validation and of the test; the
            last of them on a third of a batch.
        tensorboard: a folder for TensorBoard's logs.
        mlflow: a tracking URI of MLflow; "" is the one that MLflow itself knows.
        wandb: a project of Weights & Biases; "" is "tfdist", or that of WANDB_PROJECT.
        metrics_file: a file that has the newest numbers in Prometheus' text format.
        profile: a folder for a trace of some steps by TensorFlow's profiler, as TensorBoard shows;
            "steps=10:20" traces these, of the first epoch, on every rank, in ``output``.
        checkpoint_every: steps between checkpoints within epochs.
        keep: checkpoints to keep.
        stop_on_nan: end with an error after an epoch whose loss is no finite number.
        resume: go on from the last checkpoint in ``output``.
        rescale: with ``resume``, at the end of an epoch: the epochs to come may have another
            ``global_batch_size``. The learning rate stays what it was.
        overwrite: replace an earlier training in ``output``, when the first epoch has ended.
        max_restarts: when a process is lost: end all, start all again, and go on from the last
            checkpoint.
        verbose: print a line for each epoch.
        on_event: is called with each event for programs, a dict: those of ``tfdist train --json``
            but the first and the last. Python's logging is told of them as "tfdist".

    Returns:
        The training; None on a rank that srun or mpirun has started, unless it is the chief.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank.
        RankFailedError: a process failed otherwise; its last lines were printed.
        DivergedError: the loss is no finite number any more.
    """
    given = locals()
    where = ranks.asked("tfdist.train", model, verbose=verbose, **picked(Where, given))
    path = model_path.of(model)
    where = fitting(where, path, global_batch_size, print if verbose else lambda text: None)
    config = training_config(
        where,
        model=path,
        data=os.fspath(data),
        output=Path(output),
        settings=Settings(**picked(Settings, given)),
        resume=resume,
    )
    progress = (Progress if verbose else Silent)(epochs, on_event=on_event)
    return carry_out(config, where, progress, Start(**picked(Start, given)))


def carry_out(
    config: dict[str, Any],
    where: Where,
    progress: Progress,
    start: Start,
    *,
    tell: Callable[[str], None] = print,
) -> Run | None:
    """Trains as ``config`` says; see ``train`` for what it returns and raises.

    Args:
        config: see ``training_config``.
        where: the processes.
        progress: is told of all events.
        start: how it begins.
        tell: is told in one line what became of a training that was to replace another.
    """
    check_values(start)
    if start.resume and start.overwrite:
        raise OptionError(
            "one of --resume and --overwrite must be left out",
            received="both",
            mend="Leave --overwrite out to go on, --resume to begin anew",
        )
    if topology.is_evaluator(os.environ):
        evaluate_beside(config, where, progress, overwrite=start.overwrite)
        return None
    if config.get("limit_steps") is not None and where.is_chief:
        tell(
            f"a dry run: {config['limit_steps']} steps of each epoch, so its results are no whole "
            "training's"
        )
    if start.rescale and not start.resume:
        raise OptionError(
            "--rescale must go with --resume",
            received="--rescale alone",
            mend="Leave it out: a new training has any --global-batch-size",
        )
    url = url_of(config["output"])
    if not where.is_chief:
        with scratch_folder() if url else contextlib.nullcontext(config["output"]) as output:
            config = config | {"output": str(output)}
            ranks.run(
                RANK, config, where, lambda rank, event: None, max_restarts=start.max_restarts
            )
        return None
    if url is None:
        folder = RunFolder(config["output"])
        with folder.taken(config, start, tell):
            return _carried_out(folder, config, where, progress, start)
    from tfdist.runs.uploads import uploading

    with uploading(url, start, tell) as uploads:

        def note(rank: int, event: dict[str, Any]) -> None:
            progress.take(rank, event)
            uploads.note(event)

        folder = RunFolder(uploads.folder)
        # What the folder says of itself is true of the bucket.
        told = config | {"output": url}
        with folder.taken(told, replace(start, overwrite=False), tell):
            run = _carried_out(folder, config, where, progress, start, note)
    return replace(run, url=url, curves=run.curves.replace(str(folder.path), url))


def _carried_out(
    folder: RunFolder,
    config: dict[str, Any],
    where: Where,
    progress: Progress,
    start: Start,
    note: Callable[[int, dict[str, Any]], None] | None = None,
) -> Run:
    """Trains in a folder that is taken.

    Args:
        note: is called with (rank, event), if not ``progress`` alone.
    """
    if config.get("metrics_file"):
        file = MetricsFile(config["metrics_file"], config["output"])
        progress.listeners.append(file.take)
    resources = ResourceLog(folder)
    progress.listeners.append(resources.take)
    with tracked(config, progress) as last:
        if url := url_of(config["output"]):
            config = config | {"url": url}
        config = config | {"output": str(folder.path)}
        try:
            ranks.run(RANK, config, where, note or progress.take, max_restarts=start.max_restarts)
        finally:
            resources.write()
        if progress.diverged is not None:
            curves.draw(folder, where.strategy, ["loss"])
            raise _diverged(progress.diverged)
        folder.remove_unfinished()
        summary = json.loads(folder.metrics.read_text())
        summary["resources"] = resources.summary()
        write_json(folder.metrics, summary)
        last |= {f"test_{name}": value for name, value in summary["test"].items()}
    title = f"{summary['strategy']}, {summary['replicas']} replicas"
    if "limit_steps" in summary:
        title += f", a dry run of {summary['limit_steps']} steps an epoch"
    return Run(
        folder=folder.path,
        history=read_rows(folder.history),
        summary=summary,
        has_trained=progress.has_trained,
        curves=curves.draw(folder, title, list(summary["train"])),
    )


def training_config(
    where: Where,
    *,
    model: str,
    data: str,
    output: Path,
    settings: Settings,
    resume: bool = False,
    validates: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Returns what ``train_rank`` reads: JSON-able. Raises TfdistError for what cannot be.

    Args:
        validates: whether the training will have a validation, which its data need not have yet.
    """
    splits = find_splits(data)
    known = {"validation": ""} | splits if validates else splits
    return {
        "model": model,
        "data": data,
        "splits": splits,
        "records": fingerprint(splits["train"]),
        **settings.to_config(known),
        "strategy": where.strategy,
        "options": where.options,
        "workers": where.workers,
        "output": str(output),
        "working_folder": os.getcwd(),
        "resume": resume,
        **more,
    }


def find_splits(data: str) -> dict[str, str]:
    """Returns what to train, validate and test on: split -> source.

    Raises:
        DataError: no shards there, or none to train on.
    """
    from tfdist.records.format.manifest import MANIFEST_NAME, load_manifest

    # A URL stays one for the ranks: those of other hosts fetch what it names themselves.
    url, path = url_of(data), local_shards(data)
    if not (path / MANIFEST_NAME).is_file() and (path.parent / MANIFEST_NAME).is_file():
        known = load_manifest(path.parent).splits
        if path.name not in known:
            raise DataError(
                f"the split must be one of {', '.join(known)} in {path.parent}",
                received=repr(path.name),
                mend=f"Write {path.parent / next(iter(known))}, or another of these",
            )
        return {"train": data}
    known = load_manifest(path).splits
    if "train" not in known:
        raise DataError(
            "--data must have a split called train",
            received=f"{data} with {', '.join(known)}",
            mend=f"Name the split to train on: --data {path / next(iter(known))}",
        )
    return {
        name: str(path / name) if url is None else f"{url}/{name}"
        for name in ("train", "validation", "test")
        if name in known
    }


def fingerprint(split: str) -> str:
    """Returns what tells records, and how they are read, from others: 8 hexadecimal digits.

    Args:
        split: one that ``find_splits`` has found.
    """
    from tfdist.records.format.manifest import load_manifest

    place = local_shards(split)
    manifest = load_manifest(place.parent)
    shards = [[shard.records, shard.checksum] for shard in manifest.splits[place.name].shards]
    text = json.dumps([manifest.schema.to_json(), shards])
    return f"{crc32c(text.encode()):08x}"


def _diverged(event: dict[str, Any]) -> DivergedError:
    kept = event["checkpoint"]
    last = f"The last finite checkpoint is {kept}" if kept else "There is no finite checkpoint"
    return DivergedError(
        "the loss of a training must stay finite",
        received=f"{event['loss']} in epoch {event['epoch']}",
        mend=f"{last}. Lower the learning rate, clip the gradients, look for such values in the "
        "data, or give --no-stop-on-nan",
    )
