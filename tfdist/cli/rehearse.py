"""``tfdist rehearse``: break a training on purpose, and see what is lost."""

from __future__ import annotations

import re
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tfdist.cli import model_path, ranks
from tfdist.cli.console import stdout
from tfdist.cli.ranks import Where, model_option, seed_option, where_options
from tfdist.cli.run_folder import RunFolder
from tfdist.cli.train import shown, training_config
from tfdist.errors import OptionError
from tfdist.strategies import strategy_class

TOLERANCE = 1e-6
_FAULT = re.compile(r"rank=(\d+),step=([1-9]\d*)")

_EPILOG = """\b
Examples:
  tfdist rehearse --model examples/digits.py:model_fn --data data/digits --strategy horovod
      --workers 2 --kill rank=1,step=20
  tfdist rehearse ... --strategy multi_worker --workers 2 --stop rank=0,step=15 --stall-timeout 10
"""


@click.command("rehearse", epilog=_EPILOG, short_help="Break a training on purpose.")
@where_options
@model_option
@click.option("--data", required=True, metavar="DIR", help="Shards written by tfdist shard.")
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="rank=R,step=S",
    help="SIGKILL rank R after its step S, counted from 1 over all epochs; several may be given.",
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="rank=R,step=S",
    help="SIGSTOP it instead: it hangs, and --stall-timeout must notice.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Records in one step, over all replicas.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="STEPS",
    help="Steps between checkpoints: what a fault can cost.",
)
@seed_option
def command(
    where: Where,
    model: str,
    data: str,
    kills: tuple[str, ...],
    stops: tuple[str, ...],
    epochs: int,
    global_batch_size: int,
    checkpoint_every: int,
    seed: int,
) -> int:
    """Trains your model twice, unbroken and with the faults, and compares the weights.

    The broken training is started again from its last checkpoint, as --max-restarts does. Exit code
    0 when it ends with the weights of the unbroken one, 1 when it does not. Nothing is kept.
    """
    model_path.check(model)
    if where.strategy != "auto" and strategy_class(where.strategy).is_asynchronous:
        raise OptionError(
            "a rehearsal compares weights, and needs a strategy that repeats them",
            received=f"--strategy {where.strategy}, which is asynchronous",
            mend="Choose another strategy",
        )
    if where.place is not None:
        raise OptionError(
            "a rehearsal starts its own processes",
            received=f"rank {where.place.rank} of {where.place.world_size}",
            mend="Start it once, or give --workers",
        )
    faults = [
        *(_fault(text, "SIGKILL", "--kill") for text in kills),
        *(_fault(text, "SIGSTOP", "--stop") for text in stops),
    ]
    if not faults:
        raise OptionError("a rehearsal needs a fault", mend="Give --kill rank=1,step=20")
    with tempfile.TemporaryDirectory(prefix="tfdist-rehearse-") as folder:
        unbroken, broken = (
            training_config(
                where,
                model=model,
                data=data,
                output=Path(folder, name),
                epochs=epochs,
                global_batch_size=global_batch_size,
                checkpoint_every=checkpoint_every,
                keep=3,
                seed=seed,
                faults=given,
            )
            for name, given in (("unbroken", []), ("broken", faults))
        )
        click.echo("unbroken")
        _train(unbroken, where, Story())
        click.echo("with faults")
        story = Story()
        _train(broken, where, story, max_restarts=len(faults))
        difference = _largest_difference(
            RunFolder(unbroken["output"]).model, RunFolder(broken["output"]).model
        )
    return _print_verdict(where.strategy, faults, story, difference)


@dataclass
class Story:
    """What happened in a training, in seconds since the epoch.

    Attributes:
        fault_at: when the last fault struck; None when none did.
        noticed_at: when all processes had been ended for it.
        going_on_at: when the first step after it was done.
        reasons: why it was started again, each time.
    """

    fault_at: float | None = None
    noticed_at: float | None = None
    going_on_at: float | None = None
    reasons: list[str] = field(default_factory=list)

    def take(self, rank: int, event: dict) -> None:
        if event["event"] == "fault":
            self.fault_at = event["at"]
        elif event["event"] == "step" and self.noticed_at and not self.going_on_at:
            self.going_on_at = time.time()

    def restarted(self, number: int, reason: str) -> None:
        self.noticed_at = time.time()
        self.going_on_at = None
        self.reasons.append(reason)


def _train(config: dict[str, Any], where: Where, story: Story, max_restarts: int = 0) -> None:
    RunFolder(config["output"]).open(config, resume=False, overwrite=False)
    with shown(config["epochs"]) as show:

        def on_event(rank: int, event: dict) -> None:
            story.take(rank, event)
            show(rank, event)

        ranks.run(
            "tfdist.cli.train_rank",
            config,
            where,
            on_event,
            max_restarts=max_restarts,
            on_restart=story.restarted,
        )


def _fault(text: str, signal_name: str, option: str) -> dict[str, Any]:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise OptionError(
            f"{option} names a rank and one of its steps, counted from 1",
            received=repr(text),
            mend=f"Write {option} rank=1,step=20",
        )
    return {"rank": int(found[1]), "step": int(found[2]), "signal": signal_name}


def _largest_difference(a: Path, b: Path) -> float:
    """Returns the largest difference between the weights of two Keras files."""
    import h5py
    import numpy as np

    def weights(path: Path) -> dict[str, Any]:
        found = {}

        def keep(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and "optimizer" not in name:
                found[name] = np.asarray(item[()], np.float64)

        with (
            zipfile.ZipFile(path) as archive,
            archive.open("model.weights.h5") as member,
            h5py.File(member) as file,
        ):
            file.visititems(keep)
        return found

    ours, theirs = weights(a), weights(b)
    return float(max(np.max(np.abs(ours[name] - theirs[name]), initial=0.0) for name in ours))


def _print_verdict(strategy: str, faults: list[dict], story: Story, difference: float) -> int:
    from rich.table import Table

    console = stdout()
    if story.fault_at is None:
        console.print("no fault struck: the training has fewer steps, or no such rank")
        return 1
    table = Table("what happened", "")
    for fault, reason in zip(faults, [*story.reasons, *[""] * len(faults)], strict=False):
        name = f"{fault['signal']} of rank {fault['rank']} after its step {fault['step']}"
        table.add_row(name, reason)
    if story.noticed_at is not None:
        table.add_row("all processes ended", f"{story.noticed_at - story.fault_at:.1f} s after it")
    if story.going_on_at is not None:
        table.add_row("training went on", f"{story.going_on_at - story.fault_at:.1f} s after it")
    table.add_row("weights differ from the unbroken training's by", f"{difference:.1e}")
    console.print(table)
    survived = difference <= TOLERANCE
    console.print(
        f"{strategy} {'survives this' if survived else 'does NOT survive this'}: the weights are "
        f"{'those' if survived else 'not those'} of the unbroken training"
    )
    return 0 if survived else 1
