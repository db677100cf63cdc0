"""``tfdist verify``: does a strategy give one device's weights, on this model and these data?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import data_option, model_option, where_options
from tfdist.launch.jobs import Where
from tfdist.records.report_text import table_of
from tfdist.runs.verifying import Comparing, carry_out

if TYPE_CHECKING:
    from tfdist.equivalence import Report

_EPILOG = """\b
Examples:
  tfdist verify --model model.py:model_fn --data data/digits --strategy mirrored
      -o devices=2
  tfdist verify --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --steps 30
  tfdist verify --model model.py:model_fn --data data/digits --strategy mirrored
      -o devices=2 --explain
  tfdist verify --model model.py:model_fn --data data/digits --strategy federated
      -o clients_per_round=2 --expect different
"""


@click.command("verify", epilog=_EPILOG)
@where_options
@model_option
@data_option
@options_of(Comparing, "steps", "global_batch_size", "seed", "explain")
@click.option(
    "--expect",
    type=click.Choice(["exact", "different"]),
    default="exact",
    help="different: exit code 0 when it differs, and for a known cause.",
)
def command(where: Where, model: str, data: str, expect: str, **comparing: Any) -> int:
    """Proves that a strategy gives the weights of one device.

    Both take the same steps from the same start on the same global batches, the last of each epoch
    an uneven one. The verdict is "equal" where the weights agree to 1e-5; "rounds" where they are
    no further apart than rounding alone leads one device, which then trains twice more, from
    weights that are a rounding off; and else "differs". Exit code 0 for the first two, 1 for
    "differs". Of an asynchronous strategy only the loss is checked: it must gain what one device
    gains, to a half.

    Some strategies are another algorithm by nature, as federated averaging is; the verdict says
    so. --expect different makes that the success, and exit code 1 says that nothing but rounding
    differs after all, that weights are no numbers, or that the cause is unknown.

    Started by srun or mpirun as one of several ranks, it verifies as that rank.
    """
    with stdout().status("training on the strategy, and on one device"):
        report = carry_out(
            where,
            model=model,
            data=data,
            comparing=Comparing(**comparing),
            on_event=voice.take,
        )
    if report is None:
        return 0
    # Of an asynchronous strategy only losses are judged.
    verdict = report.verdict if report.losses is None else None
    voice.result(report=dataclasses.asdict(report) | {"verdict": verdict})
    _print(report)
    if expect == "exact" or report.losses is not None:
        return 0 if report.passed else 1
    if report.exact:
        stdout().print("--expect different, but it is one device's result")
    elif not report.is_explained:
        stdout().print("--expect different, but no cause is known")
    return 0 if report.is_explained else 1


def _print(report: Report) -> None:
    explanation = report.explanation
    columns = [(report.steps, report.layers)]
    if explanation is not None:
        earlier = zip(explanation.steps, explanation.layers, strict=True)
        columns = [column for column in earlier if column[0] < report.steps] + columns
    titles = [f"after {steps:,}" for steps, _ in columns]
    titles = ["largest difference"] if explanation is None else titles
    titles += ["rounding alone"] if report.is_rounding_known else []
    table = table_of(None, ("layer",), ("weights", *titles))
    for rows in zip(*(layers for _, layers in columns), strict=True):
        by = [f"{row.difference:.1e}" for row in rows]
        if report.is_rounding_known:
            by.append(f"{rows[-1].rounding:.1e}")
        table.add_row(rows[0].layer, f"{rows[0].size:,}", *by)
    if report.loss_difference is not None:
        table.add_section()
        blank = [""] * (len(columns) - 1)
        rounding = report.loss_rounding
        by = [f"{each:.1e}" for each in (report.loss_difference, rounding) if each is not None]
        table.add_row("loss", "", *blank, *by)
    console = stdout()
    console.print(table)
    console.print(str(report), soft_wrap=False)
    if explanation is not None:
        console.print(str(explanation), soft_wrap=False)
