"""``tfdist evaluate``: trained models on the same records, side by side."""

from __future__ import annotations

from dataclasses import asdict

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout, step_status
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import data_option, where_options
from tfdist.launch.jobs import Where
from tfdist.records.report_text import table_of
from tfdist.runs.evaluating import Evaluation, carry_out, find
from tfdist.runs.settings import Settings

_EPILOG = """\b
Examples:
  tfdist evaluate runs/digits --data data/digits/test
  tfdist evaluate runs/first runs/second/best.keras --data data/digits/test
      --strategy horovod --workers 2
  tfdist evaluate model.keras --model model.py:model_fn --data data/digits/test --json
"""


@click.command("evaluate", epilog=_EPILOG)
@click.argument("trained", nargs=-1, required=True, metavar="RUN|FILE...")
@where_options
@click.option(
    "--model",
    metavar="FILE.py:NAME",
    help="A function that returns the compiled Keras model.  [default: the one that config.json in "
    "RUN, or beside FILE, names]",
)
@data_option
@options_of(Settings, "global_batch_size", global_batch_size={"default": 256})
def command(
    where: Where, trained: tuple[str, ...], model: str | None, data: str, global_batch_size: int
) -> None:
    """Evaluates trained models on one split of shards, and shows them side by side.

    RUN is the output of a training, FILE its weights (.keras, .h5 or .weights.h5), which are read
    into the model that --model makes. Each number is that of one device, to the last record.
    """
    with step_status("evaluating") as take:
        found = carry_out(
            where,
            find(trained, model),
            data=data,
            global_batch_size=global_batch_size,
            on_event=take,
        )
    if found is not None:
        rows = [asdict(each) | {"weights": str(each.weights)} for each in found]
        voice.result(evaluations=rows)
        _print(found)


def _print(found: list[Evaluation]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each.metrics))
    table = table_of(None, ("trained", "records", *names), ())
    for each in found:
        values = [f"{each.metrics[name]:.6g}" if name in each.metrics else "" for name in names]
        table.add_row(str(each.weights), f"{each.records:,}", *values)
    stdout().print(table)
