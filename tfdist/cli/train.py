"""``tfdist train``: a Keras model, a folder of shards, a strategy; the rest is done here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.process_options import (
    max_restarts_option,
    model_option,
    seed_option,
    where_options,
)
from tfdist.runs import data_wait
from tfdist.runs.progress import Progress, listed
from tfdist.runs.ranks import Where
from tfdist.runs.training import Run, carry_out, training_config
from tfdist.training import model_path

_EPILOG = """\b
Examples:
  tfdist train --model model.py:model_fn --data data/digits --output runs/digits
  tfdist train --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --epochs 5 --global-batch-size 128 --output runs/horovod
  tfdist train ... --strategy mirrored -o devices=2 -o lr_scaling=linear -o warmup_epochs=1
  tfdist train ... --augment flip,crop,color
  tfdist train ... --pad-to batch --bucket-by-length
  tfdist train ... --output runs/digits --resume
  tfdist train ... --data s3://bucket/digits --output s3://bucket/runs/digits
  tfdist train ... --strategy multi_worker --workers 2 --max-restarts 3 --checkpoint-every 100
  tfdist train ... --strategy parameter_server --workers 2 --ps 1
  tfdist train ... --strategy multi_worker --hosts node1:2,node2:2 --workers 4
  srun --kill-on-bad-exit tfdist train ... --strategy multi_worker
"""


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
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the results, or a place in a bucket, such as s3://BUCKET/RUN, to which "
    "checkpoints are taken as soon as they are complete.",
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
    "--augment",
    metavar="NAMES",
    help="Change the images that are trained on at random, anew in each epoch: flip, crop, color, "
    "or several with commas. Validation and test see them as they are.",
)
@click.option(
    "--pad-to",
    metavar="batch|N",
    help="Pad features of variable length to the longest record of each global batch, or to a "
    "multiple of N, instead of all to one length.",
)
@click.option(
    "--bucket-by-length",
    is_flag=True,
    help="With --pad-to: train on batches of records of similar lengths.",
)
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
    augment: str | None,
    pad_to: str | None,
    bucket_by_length: bool,
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
    model_path.check(model)
    config = training_config(
        where,
        model=model,
        data=data,
        output=output,
        epochs=epochs,
        global_batch_size=global_batch_size,
        seed=seed,
        augment=augment,
        pad_to=int(pad_to) if pad_to and pad_to.isdecimal() else pad_to,
        bucket_by_length=bucket_by_length,
        checkpoint_every=checkpoint_every,
        keep=keep,
        stop_on_nan=stop_on_nan,
        resume=resume,
    )
    with shown(epochs) as progress:
        run = carry_out(
            config,
            where,
            progress,
            resume=resume,
            overwrite=overwrite,
            max_restarts=max_restarts,
            tell=_tell,
        )
    if run is not None:
        _print_results(run, data_wait.told(run.summary, config))


def _tell(text: str) -> None:
    click.echo(f"tfdist: {text}", err=True)


@contextlib.contextmanager
def shown(epochs: int) -> Iterator[Progress]:
    """Encloses a training that is shown with a bar."""
    with progress_bar("steps") as bar:
        yield Progress(epochs, bar)


def _print_results(run: Run, of_data: list[str]) -> None:
    from rich.table import Table

    summary = run.summary
    if not run.has_trained:
        click.echo(f"nothing left to train: all {summary['epochs']} epochs were done")
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
        console.print(f"last    {listed(summary['last_epoch'])}")
    for name, line in zip(("data", ""), of_data, strict=False):
        console.print(f"{name:8}{line}", soft_wrap=True)
    console.print(f"model   {run.url or run.folder}/{run.model_path.name}")
    console.print(f"curves  {run.curves}", soft_wrap=True)
