"""``tfdist rehearse``: break a training on purpose, and see what is lost."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tfdist.cli import saved_weights, voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import options_of
from tfdist.cli.process_options import data_option, model_option, where_options
from tfdist.cli.train import shown
from tfdist.errors import LaunchError, OptionError, RankFailedError, unknown_choice
from tfdist.launch.jobs import Where
from tfdist.records.report_text import table_of
from tfdist.runs import ranks
from tfdist.runs.folder import RunFolder
from tfdist.runs.settings import Settings
from tfdist.runs.training import RANK, training_config
from tfdist.strategies import spec_of
from tfdist.training.engine import model_path

TOLERANCE = 1e-6
_KEYS = ("rank", "step")

_EPILOG = """\b
Examples:
  tfdist rehearse --model model.py:model_fn --data data/digits --strategy horovod
      --workers 2 --kill rank=1,step=20
  tfdist rehearse ... --strategy multi_worker --workers 2 --stop rank=0,step=15 --stall-timeout 10
  tfdist rehearse ... --strategy single --kill rank=0,step=5 --kill rank=0,step=30
"""


@click.command("rehearse", cls=voice.Answering, epilog=_EPILOG)
@where_options
@model_option
@data_option
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="rank=R,step=S",
    help="SIGKILL rank R after step S, counted from 1 over all epochs; several may be given.",
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="rank=R,step=S",
    help="SIGSTOP it instead: it hangs, and --stall-timeout must notice.",
)
@options_of(
    Settings,
    *("epochs", "global_batch_size", "checkpoint_every", "seed"),
    epochs={"default": 3},
    global_batch_size={"default": 64},
    checkpoint_every={
        "default": 10,
        "help": "Steps between checkpoints: what a fault can cost.",
    },
)
def command(
    where: Where,
    model: str,
    data: str,
    kills: tuple[str, ...],
    stops: tuple[str, ...],
    **settings: Any,
) -> int:
    """Trains your model twice, unbroken and with the faults, and compares the weights.

    The broken training is started again from its last checkpoint, as --max-restarts does, once for
    each fault; with --min-workers the workers that are left go on. Exit code 0 when it ends with
    the weights of the unbroken one, 1 when it does not. Nothing is kept.
    """
    model_path.check(model)
    if where.strategy != "auto" and spec_of(where.strategy).is_asynchronous:
        raise OptionError(
            "a rehearsal must have a strategy that repeats its weights, which it compares",
            received=f"--strategy {where.strategy}, which is asynchronous",
            mend="Choose another strategy",
        )
    if where.place is not None:
        raise OptionError(
            "a rehearsal must be started once, and starts its own processes",
            received=f"rank {where.place.rank} of {where.place.world_size}",
            mend="Start it without srun or mpirun, or give --workers",
        )
    faults = [
        *(_fault(text, "SIGKILL", "--kill") for text in kills),
        *(_fault(text, "SIGSTOP", "--stop") for text in stops),
    ]
    faults.sort(key=lambda fault: fault["step"])
    _check_ranks(faults, where)
    with tempfile.TemporaryDirectory(prefix="tfdist-rehearse-") as folder:
        unbroken, broken = (
            training_config(
                where,
                model=model,
                data=data,
                output=Path(folder, name),
                settings=Settings(**settings, stop_on_nan=False),
                faults=list(faults),
                strike=name == "broken",
            )
            for name in ("unbroken", "broken")
        )
        story = Story(broken["faults"])
        _train(unbroken, where, Story([]), "unbroken")
        try:
            restarts = 0 if where.min_workers else len(faults)
            _train(broken, where, story, "with faults", restarts)
        except LaunchError as error:
            difference = None
            if not isinstance(error, RankFailedError):  # Whose last lines were shown.
                click.echo(f"tfdist: {error}", err=True)
        else:
            difference = saved_weights.largest_difference(
                RunFolder(unbroken["output"]).model, RunFolder(broken["output"]).model
            )
    verdict = story.verdict(where.strategy, difference)
    voice.answer(verdict)
    _print_verdict(verdict)
    return 0 if verdict["survived"] else 1


def _fault(text: str, signal_name: str, option: str) -> dict[str, Any]:
    parts = [part.partition("=") for part in text.split(",")]
    for key, _, _ in parts:
        if key not in _KEYS:
            raise unknown_choice(f"part of {option}", key, _KEYS)
    given = {key: value for key, _, value in parts}
    numbers = all(re.fullmatch(r"\d+", given.get(key, ""), re.ASCII) for key in _KEYS)
    if len(parts) != len(_KEYS) or not numbers or int(given["step"]) == 0:
        raise OptionError(
            f"{option} must name a rank, and a step counted from 1",
            received=repr(text),
            mend=f"Write {option} rank=1,step=20",
        )
    return {"rank": int(given["rank"]), "step": int(given["step"]), "signal": signal_name}


def _check_ranks(faults: list[dict[str, Any]], where: Where) -> None:
    if not faults:
        raise OptionError(
            "a rehearsal must have a fault", received="none", mend="Give --kill rank=1,step=20"
        )
    num_ranks = where.job([]).world_size
    for fault in faults:
        if fault["rank"] >= num_ranks:
            ranks_known = "rank 0" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
            raise OptionError(
                f"a fault must strike {'' if num_ranks == 1 else 'one of '}{ranks_known} of "
                f"strategy '{where.strategy}'",
                received=f"rank={fault['rank']}",
                mend="Choose one of these, or more --workers where the strategy has them",
            )


@dataclass
class Blow:
    """A fault that struck, and what came of it.

    Attributes:
        fault: rank, step and signal.
        struck_at: when, in seconds of the monotonic clock.
        reason: why the training was started again; None when it was not.
        ended_s: seconds from the fault until it was noticed and all processes were ended.
        going_on_s: seconds from the fault until the next step was done.
    """

    fault: dict[str, Any]
    struck_at: float
    reason: str | None = None
    ended_s: float | None = None
    going_on_s: float | None = None


@dataclass
class Story:
    """What happens in a training.

    Attributes:
        to_come: the faults that have not struck yet. A restarted training gets these.
        blows: those that have, in their order.
    """

    to_come: list[dict[str, Any]]
    blows: list[Blow] = field(default_factory=list)
    _lost: list[dict[str, Any]] = field(default_factory=list)

    def take(self, rank: int, event: dict) -> None:
        now = time.monotonic()
        if event["event"] == "fault":
            self.to_come.remove(event["fault"])
            self.blows.append(Blow(event["fault"], now))
        elif event["event"] == "lost":
            self._lost.append(event)
        elif event["event"] == "world" and self._lost:  # An elastic job goes on.
            ranks_lost = " and ".join(f"rank {lost['rank']}" for lost in self._lost)
            self.restarted(0, f"{ranks_lost} was lost; the others went on")
            self._lost.clear()
        elif event["event"] == "step":
            for blow in self.blows:
                if blow.ended_s is not None and blow.going_on_s is None:
                    blow.going_on_s = now - blow.struck_at

    def restarted(self, number: int, reason: str) -> None:
        for blow in self.blows:
            if blow.ended_s is None:
                blow.ended_s = time.monotonic() - blow.struck_at
                blow.reason = reason

    def verdict(self, strategy: str, difference: float | None) -> dict[str, Any]:
        """Returns what is printed: JSON-able.

        Args:
            difference: the largest one between two weights; None when the training did not end.
        """
        return {
            "strategy": strategy,
            "faults": [
                {
                    **blow.fault,
                    "reason": blow.reason,
                    "ended_s": _rounded(blow.ended_s),
                    "going_on_s": _rounded(blow.going_on_s),
                }
                for blow in self.blows
            ],
            "did_not_strike": self.to_come,
            "largest_difference": difference,
            "survived": difference is not None and difference <= TOLERANCE and not self.to_come,
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _train(
    config: dict[str, Any], where: Where, story: Story, title: str, max_restarts: int = 0
) -> None:
    """Trains; shows it below ``title``."""
    click.echo(title)
    with RunFolder(config["output"]).taken(config), shown(config["epochs"]) as show:

        def on_event(rank: int, event: dict) -> None:
            story.take(rank, event)
            show.take(rank, event)

        ranks.run(
            RANK,
            config,
            where,
            on_event,
            max_restarts=max_restarts,
            on_restart=story.restarted,
        )


def _print_verdict(verdict: dict[str, Any]) -> None:
    table = table_of(None, ("fault", "noticed by"), ("all ended after", "went on after"))
    for blow in verdict["faults"]:
        seconds = (blow["ended_s"], blow["going_on_s"])
        shown_seconds = ("" if each is None else f"{each:.1f} s" for each in seconds)
        table.add_row(_named(blow), blow["reason"] or "", *shown_seconds)
    for fault in verdict["did_not_strike"]:
        table.add_row(_named(fault), "it did not strike", "", "")
    console = stdout()
    console.print(table)
    difference, strategy = verdict["largest_difference"], verdict["strategy"]
    if difference is None:
        console.print(f"{strategy} does NOT survive this: the training did not end")
        return
    console.print(f"weights differ from the unbroken training's by {difference:.1e}")
    survived = verdict["survived"]
    console.print(
        f"{strategy} {'survives this' if survived else 'does NOT survive this'}: "
        + ("all weights are" if difference <= TOLERANCE else "not all weights are")
        + " those of the unbroken training"
    )


def _named(fault: dict[str, Any]) -> str:
    return f"{fault['signal']} of rank {fault['rank']} after step {fault['step']}"
