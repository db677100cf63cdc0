"""``tfdist train``: a Keras model, a folder of shards, a strategy; the rest is done here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tfdist.cli import completion, voice
from tfdist.cli.config_file import Configurable
from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import model_option, where_options
from tfdist.launch.jobs import Where
from tfdist.records.buckets.urls import url_of
from tfdist.records.report_text import table_of
from tfdist.runs import resource_log
from tfdist.runs.choosing import fitting
from tfdist.runs.folder import RunFolder
from tfdist.runs.progress import Progress, listed, told_of_waiting
from tfdist.runs.settings import OfData, OfLearning, OfOutput, Settings, Start
from tfdist.runs.training import Run, carry_out, training_config
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine import model_path
from tfdist.training.engine.options import picked

_EPILOG = """\b
Examples:
  tfdist train --model model.py:model_fn --data data/digits --output runs/digits
  tfdist train --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --epochs 5 --global-batch-size 128 --output runs/horovod
  tfdist train ... --strategy mirrored -o devices=2 -o lr_scaling=linear -o warmup_epochs=1
  tfdist train ... --augment flip,crop,color
  tfdist train ... --early-stopping val_loss,patience=3 --save-best val_accuracy --epochs 100
  tfdist train ... --lr 0.01 --class-weight balanced --callbacks mine.py:callbacks
  tfdist train ... --limit-steps 2 --epochs 1
  tfdist train ... --profile steps=10:20
  tfdist train ... --tensorboard logs/digits --mlflow http://localhost:5000 --wandb
  tfdist train ... --pad-to batch --bucket-by-length
  tfdist train ... --print-config > run.yaml
  tfdist train --config run.yaml --epochs 9
  tfdist train ... --output runs/digits --resume
  tfdist train ... --data s3://bucket/digits --output s3://bucket/runs/digits
  tfdist train ... --strategy multi_worker --workers 2 --max-restarts 3 --checkpoint-every 100
  tfdist train ... --strategy parameter_server --workers 2 --ps 1
  tfdist train ... --strategy multi_worker --hosts node1:2,node2:2 --workers 4
  srun --kill-on-bad-exit tfdist train ... --strategy multi_worker
"""


@click.command("train", cls=Configurable, epilog=_EPILOG)
@where_options
@model_option
@click.option(
    "--data",
    required=True,
    metavar="DIR",
    shell_complete=completion.data,
    help="Shards written by tfdist shard: trains on the split train, validates on validation "
    "and ends with test, where they are there. DIR/SPLIT trains on that split alone.",
)
@options_of(OfData)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the results, or a place in a bucket, such as s3://BUCKET/RUN, to which "
    "checkpoints are taken as soon as they are complete.",
)
@options_of(OfOutput)
@options_of(Start)
@options_of(OfLearning)
@options_of(Settings)
def command(where: Where, model: str, data: str, output: Path, **given: Any) -> None:
    """Trains a Keras model on a strategy, and starts the processes that it needs.

    The output folder holds model.keras, history.csv, resources.csv, metrics.json, config.json,
    checkpoints/, best.keras with --save-best and, where matplotlib is installed, curves.png.

    Where srun or mpirun has started this command once for each rank, or SageMaker on each host, and
    neither --workers nor --hosts is given, it trains as that rank instead of starting processes.
    """
    model_path.check(model)
    start = Start(**picked(Start, given))
    where = fitting(where, model, given["global_batch_size"], _tell)
    config = training_config(
        where,
        model=model,
        data=data,
        output=output,
        settings=Settings(**picked(Settings, given)),
        resume=start.resume,
    )
    progress = None
    replaces = start.overwrite and not url_of(config["output"])
    replaces = replaces and RunFolder(config["output"]).config.is_file()
    try:
        with shown(config["epochs"]) as progress:
            run = carry_out(config, where, progress, start, tell=_tell)
    except (KeyboardInterrupt, SystemExit):
        kept = ["the last checkpoint in the bucket"]
        has_trained = progress is not None and progress.has_trained
        if not url_of(config["output"]):
            folder = RunFolder(config["output"])
            # Until an epoch has ended, what lies there is the training's that was to be replaced.
            is_own = not replaces or folder.is_staged or has_trained
            kept = checkpoint_files.finished(folder.checkpoints) if is_own else []
        how = "--resume in the place of --overwrite" if start.overwrite else "--resume"
        voice.part_with(f"the same command with {how} goes on from {kept[-1]}" if kept else "")
        raise
    if run is not None:
        place, best = run.url or run.folder, run.best_model_path
        voice.result(
            output=place,
            model=f"{place}/{run.model_path.name}",
            best_model=best and f"{place}/{best.name}",
            has_trained=run.has_trained,
            metrics=run.summary,
        )
        _print_results(run, config)


def _tell(text: str) -> None:
    click.echo(f"tfdist: {text}", err=True)
    voice.tell("message", rank=0, text=text)


@contextlib.contextmanager
def shown(epochs: int) -> Iterator[Progress]:
    """Encloses a training that is shown with a bar."""
    with progress_bar("steps", is_told=False) as bar:
        yield Progress(epochs, bar, lambda event: voice.tell(**event))


def _print_results(run: Run, config: dict[str, Any]) -> None:
    summary = run.summary
    if not run.has_trained:
        click.echo(f"nothing left to train: all {summary['epochs']} epochs were done")
    elif summary["epochs"] < config["epochs"]:
        stopped_by = summary.get("stopped_by")
        cause = f"early stopping by {stopped_by}" if stopped_by else "a callback"
        click.echo(f"{cause} ended it after epoch {summary['epochs']} of {config['epochs']}")
    parts = {part: summary[part] for part in ("train", "validation", "test") if summary[part]}
    names = list(dict.fromkeys(name for metrics in parts.values() for name in metrics))
    of_speed = ("workers", "replicas", "samples/s", "s/epoch")
    table = table_of(None, ("strategy",), (*of_speed, "data", *names))
    table.columns[5].justify = "left"
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
    console = stdout()
    console.print(table)
    if summary["last_epoch"]:
        console.print(f"last    {listed(summary['last_epoch'])}")
    for name, line in zip(("data", ""), told_of_waiting(summary, config), strict=False):
        console.print(f"{name:8}{line}")
    if used := resource_log.told(summary):
        console.print(f"used    {used}")
    console.print(f"model   {run.url or run.folder}/{run.model_path.name}")
    if summary["best"]:
        place = f"{run.url or run.folder}/{run.best_model_path.name}"
        console.print(f"best    {place}, {listed(summary['best'])}")
    if "limit_steps" in summary:
        console.print(f"dry run {summary['limit_steps']} steps of each epoch")
    console.print(f"curves  {run.curves}")
