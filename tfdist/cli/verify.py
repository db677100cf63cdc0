"""``tfdist verify``: does a strategy give one device's weights, on this model and these data?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.process_options import data_option, model_option, seed_option, where_options
from tfdist.runs import ranks
from tfdist.runs.ranks import Where
from tfdist.runs.training import find_splits
from tfdist.training import model_path

_EPILOG = """\b
Examples:
  tfdist verify --model model.py:model_fn --data data/digits --strategy mirrored
      -o devices=2
  tfdist verify --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --steps 30
"""


@click.command("verify", epilog=_EPILOG, short_help="Prove that a strategy is exact.")
@where_options
@model_option
@data_option
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Records in one step, over all replicas.",
)
@seed_option
def command(
    where: Where, model: str, data: str, steps: int, global_batch_size: int, seed: int
) -> int:
    """Proves that a strategy gives the weights of one device.

    Both take the same steps from the same start on the same global batches, the last of each epoch
    an uneven one. Exit code 0 when the weights agree to 1e-5 in float32, 1 when they do not. With
    mixed precision (-o precision=...) they agree as far as that rounds, and to 1e-5 in float64. Of
    an asynchronous strategy only the loss is checked: it must gain what one device gains, to a
    half.

    Started by srun or mpirun as one of several ranks, it verifies as that rank.
    """
    model_path.check(model)
    with tempfile.TemporaryDirectory(prefix="tfdist-verify-") as folder:
        config = {
            "model": model,
            "data": find_splits(data)["train"],
            "strategy": where.strategy,
            "options": where.options,
            "steps": steps,
            "global_batch_size": global_batch_size,
            "seed": seed,
            "report": str(Path(folder, "report.json")),
        }
        with stdout().status("training on the strategy, and on one device"):
            ranks.run("tfdist.runs.verify_rank", config, where, voice.take)
        if not where.is_chief:
            return 0
        report = json.loads(Path(config["report"]).read_text())
        voice.result(report=report)
        return _print_report(dict(report))


def _print_report(values: dict) -> int:
    from rich.table import Table

    from tfdist.equivalence import LayerDifference, LossComparison, Report

    layers = tuple(LayerDifference(**layer) for layer in values.pop("layers"))
    losses = values.pop("losses")
    report = Report(
        **{
            **values,
            "layers": layers,
            "causes": tuple(values["causes"]),
            "losses": losses and LossComparison(**losses),
        }
    )
    table = Table("layer", "weights", "largest difference")
    table.columns[1].justify = table.columns[2].justify = "right"
    for layer in report.layers:
        table.add_row(layer.layer, f"{layer.size:,}", f"{layer.difference:.1e}")
    if report.loss_difference is not None:
        table.add_section()
        table.add_row("loss", "", f"{report.loss_difference:.1e}")
    console = stdout()
    console.print(table)
    console.print(str(report))
    return 0 if report.passed else 1
