"""``tfdist train``: a Keras model, a folder of shards, a strategy; the rest is done here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tfdist.cli import ranks
from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.ranks import (
    Where,
    max_restarts_option,
    model_option,
    seed_option,
    where_options,
)
from tfdist.cli.run_files import read_history
from tfdist.cli.run_folder import RunFolder
from tfdist.errors import DataError, DivergedError, EngineMissingError, OptionError
from tfdist.training import model_path

_EPILOG = """\b
Examples:
  tfdist train --model model.py:model_fn --data data/digits --output runs/digits
  tfdist train --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --epochs 5 --global-batch-size 128 --output runs/horovod
  tfdist train ... --strategy mirrored -o devices=2 -o lr_scaling=linear -o warmup_epochs=1
  tfdist train ... --output runs/digits --resume
  tfdist train ... --strategy multi_worker --workers 2 --max-restarts 3 --checkpoint-every 100
  tfdist train ... --strategy parameter_server --workers 2 --ps 1
  tfdist train ... --strategy multi_worker --hosts node1:2,node2:2 --workers 4
  srun --kill-on-bad-exit tfdist train ... --strategy multi_worker
"""

_RANK = "tfdist.cli.train_rank"
# Of an epoch's row: what its line tells in other words, and what only history.csv has.
_TOLD_APART = ("epoch", "seconds", "samples_per_s", "round_seconds", "bytes_down", "bytes_up")


@click.command("train", epilog=_EPILOG, short_help="Train a Keras model on a strategy.")
@where_options
@model_option
@click.option(
    "--data",
    required=True,
    metavar="DIR",
    help="Shards written by tfdist shard: trains on the split train, validates on validation and "
    "ends with test, where they are there. DIR/SPLIT trains on that split alone.",
)
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Folder for the results."
)
@click.option("--epochs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Records in one step, over all replicas.",
)
@seed_option
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Also write checkpoints within epochs.",
)
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Checkpoints to keep."
)
@click.option(
    "--stop-on-nan/--no-stop-on-nan",
    default=True,
    show_default=True,
    help="End with exit code 1 after an epoch whose loss is no finite number.",
)
@max_restarts_option
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an earlier training in --output, when the first epoch has ended; nothing else "
    "there is touched.",
)
def command(
    where: Where,
    model: str,
    data: str,
    output: Path,
    epochs: int,
    global_batch_size: int,
    seed: int,
    checkpoint_every: int | None,
    keep: int,
    stop_on_nan: bool,
    max_restarts: int,
    resume: bool,
    overwrite: bool,
) -> None:
    """Trains a Keras model on a strategy, and starts the processes that it needs.

    The output folder holds model.keras, history.csv, metrics.json, config.json, checkpoints/ and,
    where matplotlib is installed, curves.png.

    Where srun or mpirun has started this command once for each rank, or SageMaker on each host, and
    neither --workers nor --hosts is given, it trains as that rank instead of starting processes.
    """
    if resume and overwrite:
        raise OptionError("one of --resume and --overwrite must be left out", received="both")
    model_path.check(model)
    config = training_config(
        where,
        model=model,
        data=data,
        output=output,
        epochs=epochs,
        global_batch_size=global_batch_size,
        seed=seed,
        checkpoint_every=checkpoint_every,
        keep=keep,
        stop_on_nan=stop_on_nan,
        resume=resume,
    )
    if not where.is_chief:
        ranks.run(_RANK, config, where, lambda rank, event: None, max_restarts=max_restarts)
        return
    folder = RunFolder(output)
    with folder.taken(config, resume=resume, overwrite=overwrite, tell=_tell):
        with shown(epochs) as progress:
            ranks.run(_RANK, config, where, progress.take, max_restarts=max_restarts)
        if progress.diverged is not None:
            _draw(folder, where.strategy, ["loss"])
            raise _diverged(progress.diverged)
        folder.remove_unfinished()
        _print_results(folder, has_trained=progress.has_trained)


def _tell(text: str) -> None:
    click.echo(f"tfdist: {text}", err=True)


def _diverged(event: dict[str, Any]) -> DivergedError:
    kept = event["checkpoint"]
    last = f"The last finite checkpoint is {kept}" if kept else "There is no finite checkpoint"
    return DivergedError(
        "the loss of a training must stay finite",
        received=f"{event['loss']} in epoch {event['epoch']}",
        mend=f"{last}. Lower the learning rate, clip the gradients, look for such values in the "
        "data, or give --no-stop-on-nan",
    )


def training_config(
    where: Where, *, model: str, data: str, output: Path, resume: bool = False, **rest: Any
) -> dict[str, Any]:
    """Returns what ``train_rank`` reads: JSON-able."""
    return {
        "model": model,
        "data": data,
        "splits": find_splits(data),
        "strategy": where.strategy,
        "options": where.options,
        "workers": where.workers,
        "output": str(output),
        "working_folder": os.getcwd(),
        "resume": resume,
        **rest,
    }


def find_splits(data: str) -> dict[str, str]:
    """Returns what to train, validate and test on: split -> source.

    Raises:
        DataError: no shards there, or none to train on.
    """
    from tfdist.records.format.manifest import MANIFEST_NAME, load_manifest

    path = Path(data)
    if not (path / MANIFEST_NAME).is_file() and (path.parent / MANIFEST_NAME).is_file():
        known = load_manifest(path.parent).splits
        if path.name not in known:
            raise DataError(
                f"the split must be one of {', '.join(known)} in {path.parent}",
                received=repr(path.name),
            )
        return {"train": data}
    known = load_manifest(path).splits
    if "train" not in known:
        raise DataError(
            "--data must have a split called train",
            received=f"{data} with {', '.join(known)}",
            mend=f"Name the split to train on: --data {path / next(iter(known))}",
        )
    return {name: str(path / name) for name in ("train", "validation", "test") if name in known}


class Progress:
    """Shows rank 0's events: a bar for the steps, a line for each epoch.

    Attributes:
        has_trained: whether an epoch has ended.
        diverged: the event that told of a loss that is not finite; None when there was none.
    """

    def __init__(self, epochs: int, bar: Any):
        self.has_trained = False
        self.diverged: dict[str, Any] | None = None
        self._epochs = epochs
        self._steps: int | None = None
        self._bar = bar
        self._task = bar.add_task("starting", total=None)

    def take(self, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "diverged":
            self.diverged = event
        if rank != 0:
            return
        if event["event"] == "data":
            self._steps = event["steps"]
            self._bar.update(self._task, description="tracing the first step")
        elif event["event"] == "step":
            what = f"epoch {event['epoch'] + 1}/{self._epochs}"
            if event["step"] is None:
                self._bar.update(self._task, description=f"{what} validation")
            else:
                self._bar.update(
                    self._task, description=what, completed=event["step"], total=self._steps
                )
        elif event["event"] == "epoch":
            self.has_trained = True
            self._bar.update(self._task, completed=0)
            click.echo(_epoch_line(event["row"], self._epochs))


@contextlib.contextmanager
def shown(epochs: int) -> Iterator[Progress]:
    with progress_bar("steps") as bar:
        yield Progress(epochs, bar)


def _epoch_line(row: dict[str, float], epochs: int) -> str:
    values = _listed({name: value for name, value in row.items() if name not in _TOLD_APART})
    speed = f"{row['samples_per_s']:,.0f} samples/s"
    return f"epoch {row['epoch']}/{epochs}  {row['seconds']:.1f} s  {speed}  {values}"


def _listed(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def _draw(folder: RunFolder, title: str, names: list[str]) -> str:
    """Draws the curves; returns where they are, or why there are none."""
    from tfdist.cli.curves import draw

    try:
        draw(read_history(folder.history), names, folder.curves, title)
    except EngineMissingError as error:
        return f"none: {error}"
    return str(folder.curves)


def _print_results(folder: RunFolder, has_trained: bool) -> None:
    from rich.table import Table

    summary = json.loads(folder.metrics.read_text())
    if not has_trained:
        click.echo(f"nothing left to train: all {summary['epochs']} epochs were done")
    title = f"{summary['strategy']}, {summary['replicas']} replicas"
    curves = _draw(folder, title, list(summary["train"]))
    parts = {part: summary[part] for part in ("train", "validation", "test") if summary[part]}
    names = list(dict.fromkeys(name for metrics in parts.values() for name in metrics))
    table = Table("strategy", "workers", "replicas", "samples/s", "s/epoch", "data", *names)
    of_run = (
        summary["strategy"],
        str(summary["workers"]),
        str(summary["replicas"]),
        f"{summary['samples_per_s']:,.0f}",
        f"{summary['epoch_seconds']:.2f}",
    )
    for part, metrics in parts.items():
        values = (f"{metrics[name]:.4f}" if name in metrics else "" for name in names)
        table.add_row(*of_run, part, *values)
        of_run = ("",) * len(of_run)
    for column in (1, 2, 3, 4, *range(6, 6 + len(names))):
        table.columns[column].justify = "right"
    console = stdout()
    console.print(table)
    if summary["last_epoch"]:
        console.print(f"last    {_listed(summary['last_epoch'])}")
    console.print(f"model   {folder.model}")
    console.print(f"curves  {curves}", soft_wrap=True)
