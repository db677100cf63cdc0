"""``tfdist tune``: a search for hyperparameters, of which each trial is a training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live

from tfdist.cli import voice
from tfdist.cli.config_file import Configurable
from tfdist.cli.console import stdout
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import data_option, model_option, where_options
from tfdist.errors import DivergedError
from tfdist.launch.jobs import Where
from tfdist.planning.yaml_file import read_yaml
from tfdist.records.report_text import table_of
from tfdist.runs.settings import OfData, OfLearning, OfOutput, Settings, Start
from tfdist.training.engine import model_path
from tfdist.training.engine.options import picked
from tfdist.tuning import space as spaces
from tfdist.tuning.request import Request, Search

if TYPE_CHECKING:
    from rich.table import Table

    from tfdist.tuning.results import Found
    from tfdist.tuning.rows import TrialRow

_EPILOG = """\b
Examples:
  tfdist tune --model model.py:model_fn --space space.yaml --data data/digits --output search
  tfdist tune ... --trials 24 --parallel 2 --epochs 9 --metric val_accuracy
  tfdist tune ... --strategy horovod --workers-per-trial 2 --parallel 2
  tfdist tune ... --folds 5
  tfdist tune ... --on ray --parallel 8
  tfdist tune ... --pruner median --grace 2
  tfdist tune ... --output search --resume --trials 48
\b
space.yaml:
  lr: {low: 1e-4, high: 0.1, log: true}      # arguments of model_fn
  width: [8, 16, 32]
  layers: {low: 1, high: 4, int: true}
  train:                                     # options of the training
    global_batch_size: [64, 128]
"""
_RESUME = (
    "Go on with the search in --output: trials that were running go on from their checkpoints, "
    "and none that has ended is run again."
)
# Of one training: of a search each trial would write the same.
_SETTINGS = [name for name in Settings.__annotations__ if name != "metrics_file"]


@click.command("tune", cls=Configurable, epilog=_EPILOG)
@functools.partial(where_options, workers={"flags": ("--workers-per-trial", "workers")})
@model_option
@click.option(
    "--space",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help="What is chosen, and from what, see below. Without, the function of --model takes a "
    "trial of Optuna's.",
)
@data_option
@options_of(Search)
@options_of(OfData)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the search: trials/, best, trials.csv, charts.",
)
@options_of(OfOutput)
@options_of(Start, "max_restarts", "resume", resume={"help": _RESUME})
@options_of(OfLearning)
@options_of(Settings, *_SETTINGS)
def command(
    where: Where, model: str, space: Path | None, data: str, output: Path, **given: Any
) -> None:
    """Searches for hyperparameters on Optuna: what the best of many trainings is given.

    Each trial is a training as by tfdist train, with a run folder of its own in OUTPUT/trials. Bad
    ones end early. At the end OUTPUT/best leads to the best one, and the command is shown that
    trains it in full. Nothing looks at the split test.
    """
    from tfdist.tuning.tune import carry_out

    model_path.check(model)
    request = Request(
        model=model,
        data=data,
        output=output,
        space=None if space is None else spaces.parsed(read_yaml(space)),
        search=Search(**picked(Search, given)),
        settings=Settings(**picked(Settings, given)),
        where=where,
        max_restarts=given["max_restarts"],
    )
    voice.part_with("the same command with --resume goes on with the search")
    with _shown(request) as on_change:
        found = carry_out(request, resume=given["resume"], on_change=on_change)
    _print_results(found, request)


@contextlib.contextmanager
def _shown(request: Request) -> Iterator[Callable[[TrialRow], None]]:
    """Encloses a search that is shown: as a table that grows, or in a pipe as lines."""
    rows: dict[int, TrialRow] = {}
    console = stdout()
    live = Live(console=console, transient=True, auto_refresh=False)

    def take(row: TrialRow) -> None:
        before, rows[row.number] = rows.get(row.number), row
        has_changed = before is None or (before.state, before.params) != (row.state, row.params)
        told = {"trial" if k == "number" else k: value for k, value in vars(row).items()}
        voice.tell("trial", metric=request.search.metric, **told)
        if console.is_terminal:
            live.update(_table(list(rows.values()), request.search.metric), refresh=True)
        elif has_changed:
            console.print(_line(row, request.search.metric))

    with live if console.is_terminal else contextlib.nullcontext():
        yield take


def _line(row: TrialRow, metric: str) -> str:
    value = "" if row.value is None else f"  {metric} {row.value:.4g} after epoch {row.epoch}"
    why = f"  {row.reason}" if row.reason else ""
    return f"trial {row.number}  {row.state}{value}  {_chosen(row.params)}{why}"


def _chosen(params: dict[str, Any]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in params.items()}
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def _table(rows: list[TrialRow], metric: str) -> Table:
    table = table_of(None, ("trial", "state", "epoch", metric, "chosen"), ())
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4f}"
        epoch = "" if row.epoch is None else str(row.epoch)
        table.add_row(str(row.number), row.state, epoch, value, _chosen(row.params))
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    return table


def _print_results(found: Found, request: Request) -> None:
    best = found.best
    voice.result(
        output=found.folder,
        best=best and dataclasses.asdict(best),
        best_folder=best and found.best_folder,
        command=best and found.command,
    )
    console = stdout()
    console.print(_table(found.rows, request.search.metric))
    console.print(f"table   {found.folder / 'trials.csv'}")
    charts = ", ".join(map(str, found.charts)) or "none: pip install 'tfdist[plots]'"
    console.print(f"charts  {charts}")
    if best is None:
        raise DivergedError(
            "a trial must come to its last epoch",
            received=f"none of {len(found.rows)}, as {found.folder / 'trials.csv'} tells",
            mend="Search a smaller space, or --resume with more --trials",
        )
    console.print(f"best    trial {best.number}, {found.best_folder}")
    console.print(f"in full {found.command}")
