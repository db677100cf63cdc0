"""``tfdist predict``: a trained model's outputs for each record, on any strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.process_options import data_option, model_option, where_options
from tfdist.errors import OptionError
from tfdist.runs import ranks
from tfdist.runs.ranks import Where
from tfdist.training import model_path

_SUFFIXES = (".npz", ".npy")
_EPILOG = """\b
Examples:
  tfdist predict --model model.py:model_fn --weights runs/digits/model.keras
      --data data/digits/test --output predictions.npz
  tfdist predict --model model.py:model_fn --weights runs/digits/best.keras
      --data data/digits/test --output predictions.npy --strategy horovod --workers 2
"""


@click.command("predict", epilog=_EPILOG, short_help="Write a model's outputs for each record.")
@where_options
@model_option
@click.option(
    "--weights",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Of the trained model: a .keras, .h5 or .weights.h5 file.",
)
@data_option
@click.option(
    "--output",
    required=True,
    metavar="FILE.npz|FILE.npy",
    type=click.Path(path_type=Path),
    help="A new file: .npz has the array predictions, or each of several outputs by its name; "
    ".npy has the only one.",
)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Records in one step, over all replicas.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE when all is predicted.")
def command(
    where: Where,
    model: str,
    weights: Path,
    data: str,
    output: Path,
    global_batch_size: int,
    overwrite: bool,
) -> None:
    """Writes the outputs of a trained model for each record, in the order of the records.

    The weights are read into the model that --model makes: code in the file of a model does not
    run. DIR is one split of shards, as data/digits/test. Each number is that of one device.
    """
    model_path.check(model)
    _check(weights, output, overwrite=overwrite)
    config = {
        "model": model,
        "weights": os.path.abspath(weights),
        "data": data,
        "output": os.path.abspath(output),
        "strategy": where.strategy,
        "options": where.options,
        "global_batch_size": global_batch_size,
    }
    found: dict[str, Any] = {}

    with stdout().status("predicting") as status:

        def take(rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "predicted":
                found.update(event["outputs"])
            elif event["event"] == "step" and rank == 0:
                status.update(f"predicting: step {event['step']:,} of {event['steps']:,}")
            voice.take(rank, event)

        ranks.run("tfdist.runs.predict_rank", config, where, take)
    if not where.is_chief:
        return
    voice.result(output=str(output), outputs=found)
    _print(output, found)


def _check(weights: Path, output: Path, *, overwrite: bool) -> None:
    """Raises:
    OptionError: no such weights, or an output that cannot be written or must not be replaced.
    """
    if not weights.is_file():
        raise OptionError(
            "--weights must be a file that Keras wrote",
            received=f"{weights}, which is none",
            mend="Give the model.keras in the output of a training",
        )
    if output.suffix not in _SUFFIXES:
        raise OptionError(f"--output must end with {' or '.join(_SUFFIXES)}", received=str(output))
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


def _print(output: Path, outputs: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("output", "shape", "type")
    for name, (shape, dtype) in outputs.items():
        table.add_row(name, " x ".join(f"{size:,}" for size in shape), dtype)
    console = stdout()
    console.print(table)
    console.print(f"predictions  {output}", soft_wrap=True)
