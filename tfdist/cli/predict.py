"""``tfdist predict``: a trained model's outputs for each record, on any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfdist.cli import completion, voice
from tfdist.cli.console import stdout, step_status
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import model_option, where_options
from tfdist.launch.jobs import Where
from tfdist.records.report_text import table_of
from tfdist.runs.predicting import carry_out
from tfdist.runs.settings import Settings

_EPILOG = """\b
Examples:
  tfdist predict --model model.py:model_fn --weights runs/digits/model.keras
      --data data/digits/test --output predictions.npz
  tfdist predict --model model.py:model_fn --weights runs/digits/best.keras
      --data data/digits/test --output predictions.npy --strategy horovod --workers 2
  tfdist predict --model model.py:model_fn --weights runs/photos/model.keras
      --data photo.jpg --output photo.csv
  tfdist predict --model model.py:model_fn --weights runs/digits/model.keras
      --data data/digits/test --output predictions.csv --part 2/8 --resume
  tfdist merge predictions.csv
"""


@click.command("predict", epilog=_EPILOG)
@where_options
@model_option
@click.option(
    "--weights",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Of the trained model: a .keras, .h5 or .weights.h5 file.",
)
@click.option(
    "--data",
    required=True,
    metavar="DIR|FILE",
    shell_complete=completion.data,
    help="A split of shards; or what is not labelled: a photo, a folder of photos, or a table.",
)
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A new file: .csv, .jsonl and .parquet have a row for each record, with its name, and its "
    "class and the probability of that, or the values; .npz has the array predictions, or each of "
    "several outputs by its name; .npy has the only one.",
)
@click.option(
    "--trained-on",
    metavar="DIR",
    shell_complete=completion.data,
    help="The shards that the model was trained on: photos and tables are read as they are, and "
    "classes have their names.  [default: those that config.json beside --weights names]",
)
@options_of(Settings, "global_batch_size", global_batch_size={"default": 256})
@click.option("--overwrite", is_flag=True, help="Replace FILE when all is predicted.")
@click.option(
    "--part",
    metavar="I/N",
    help="Predict on part I of N alone, in whole batches, and write it beside FILE: predictions."
    "part-2-of-8.csv; `tfdist merge FILE` joins all parts.",
)
@click.option("--resume", is_flag=True, help="Do not predict anew on a part that is there whole.")
def command(where: Where, **given: Any) -> None:
    """Writes the outputs of a trained model for each record, in the order of the records.

    The weights are read into the model that --model makes: code in the file of a model does not
    run. DIR is one split of shards, as data/digits/test, or a folder of photos; FILE is a photo or
    a table. Each number is that of one device.
    """
    with step_status("predicting") as take:
        found = carry_out(where, on_event=take, **given)
    if found is None:
        return
    voice.result(output=str(found.output), outputs=found.outputs)
    table = table_of(None, ("output", "shape", "type"), ())
    for name, (shape, dtype) in found.outputs.items():
        table.add_row(name, " x ".join(f"{size:,}" for size in shape), dtype)
    console = stdout()
    console.print(table)
    console.print(f"predictions  {found.output}")
