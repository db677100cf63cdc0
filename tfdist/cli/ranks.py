"""Runs one of tfdist's own rank programs on as many processes as a strategy needs.

The command itself stays light: it starts the ranks, watches them, and shows what they report.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from tfdist.cli import user_errors
from tfdist.cli.launch import (
    announce_restart,
    check_keras,
    complain,
    elastic_options,
    ps_option,
    show,
    warn_without_srun,
)
from tfdist.errors import LaunchError, ModelError, TfdistError
from tfdist.launch import events, jobs, restarts, supervisor
from tfdist.strategies import REGISTRY, parse_options
from tfdist.topology import Topology

_USER_ERROR = 2
_ENGINE_ERROR = 1
# The end of one rank ends all others, who may be about to tell the cause.
_OTHERS_FIRST_S = 1.0

model_option = click.option(
    "--model",
    required=True,
    metavar="FILE.py:NAME",
    help="A function that returns a compiled Keras model.",
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Of weights and order."
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """The strategy of a command, and the processes it runs on."""

    strategy: str
    options: dict[str, Any]
    workers: int | None = None
    ps: int | None = None
    hosts: str | None = None
    controller: str | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    host_discovery: str | None = None
    start_timeout_s: float = 120.0
    stall_timeout_s: float = 300.0

    @property
    def place(self) -> Topology | None:
        """Where this process stands among ranks that something else has started; see ``jobs``."""
        return jobs.standing(self.workers, self.hosts, self.controller)

    @property
    def is_chief(self) -> bool:
        """Whether this command shows and keeps the results: one does of those that srun starts."""
        return self.place is None or self.place.is_chief

    def job(self, command: list[str]) -> supervisor.Job:
        """Returns the job of ``command`` on these processes."""
        return jobs.job_for(
            self.strategy,
            command,
            workers=self.workers,
            ps=self.ps,
            hosts=self.hosts,
            controller=self.controller,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            host_discovery=self.host_discovery,
            start_timeout_s=self.start_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
        )


max_restarts_option = click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="R",
    help="When a process is lost: end all, start all again, and go on from the last checkpoint.",
)


def where_options(command: Callable) -> Callable:
    """Adds the command-line options of ``Where``; the command receives ``where``."""

    def gathered(
        strategy: str,
        option: tuple[str, ...],
        workers: int | None,
        ps: int | None,
        hosts: str | None,
        controller: str | None,
        min_workers: int | None,
        max_workers: int | None,
        host_discovery: str | None,
        start_timeout_s: float,
        stall_timeout_s: float,
        **rest: Any,
    ) -> Any:
        if strategy == "auto" and (workers or 1) > 1:
            strategy = jobs.of_several()
            why = "" if strategy == "horovod" else ", and horovod is not installed"
            click.echo(f"strategy '{strategy}', because --workers {workers} was asked for{why}")
        check_keras(strategy, is_elastic=any((min_workers, max_workers, host_discovery)))
        warn_without_srun(workers, hosts)
        where = Where(
            strategy=strategy,
            options=parse_options(strategy, option),
            workers=workers,
            ps=ps,
            hosts=hosts,
            controller=controller,
            min_workers=min_workers,
            max_workers=max_workers,
            host_discovery=host_discovery,
            start_timeout_s=start_timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        return command(where=where, **rest)

    gathered.__doc__ = command.__doc__
    gathered.__click_params__ = getattr(command, "__click_params__", [])
    seconds = click.FloatRange(min=0, min_open=True)
    for decorate in (
        click.option(
            "--stall-timeout",
            "stall_timeout_s",
            type=seconds,
            default=300.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest silence of a running job.",
        ),
        click.option(
            "--start-timeout",
            "start_timeout_s",
            type=seconds,
            default=120.0,
            show_default=True,
            metavar="SECONDS",
            help="Until every process must have started.",
        ),
        elastic_options,
        click.option(
            "--controller",
            type=click.Choice(jobs.CONTROLLERS),
            help="What starts and connects the processes of horovod.  [default: mpi]",
        ),
        click.option("--hosts", metavar="A:2,B:2", help="Hosts with their slots."),
        ps_option,
        click.option("--workers", type=click.IntRange(min=1), help="Number of processes."),
        click.option(
            "-o",
            "option",
            multiple=True,
            metavar="KEY=VALUE",
            help="An option of the strategy, such as precision=mixed_float16, accumulate_steps=4, "
            "recompute=blocks, lr_scaling=linear; an unknown one lists all. Repeatable.",
        ),
        click.option(
            "--strategy",
            default="auto",
            show_default=True,
            help=f"How to train: {', '.join(REGISTRY)}, or auto.",
        ),
    ):
        gathered = decorate(gathered)
    return gathered


def run(
    module: str,
    config: dict[str, Any],
    where: Where,
    on_event: Callable[[int, dict], None],
    *,
    max_restarts: int = 0,
    on_restart: Callable[[int, str], None] = lambda number, reason: None,
) -> None:
    """Runs ``python -m module CONFIG`` on every rank, to the end.

    Args:
        module: a rank program, see ``main``.
        config: JSON-able; a restart adds ``"resume": True``.
        where: the processes.
        on_event: called with (rank, event).
        max_restarts: see ``tfdist.launch.restarts``.
        on_restart: called with the number of a restart and the reason for it.

    Raises:
        TfdistError: a rank met a mistake of the user's, which no restart mends; the message is the
            rank's.
        click.exceptions.Exit: a rank failed otherwise; its last lines have been shown.
    """
    mistakes: dict[int, dict[str, Any]] = {}
    # What ranks say that were left alone by another, which tells the cause if it can.
    left_alone: dict[int, str] = {}

    def make_job(attempt: int) -> supervisor.Job:
        again = {"resume": True} if attempt else {}
        job = where.job([sys.executable, "-m", module, json.dumps(config | again)])
        # TensorFlow reports missing CUDA libraries as errors; what matters it raises.
        job.env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        return job

    def take(rank: int, event: dict) -> None:
        if event["event"] == "mistake":
            mistakes[rank] = event
        elif event["event"] == "left alone":
            left_alone[rank] = event["text"]
        else:
            on_event(rank, event)

    def tell_mistake() -> None:
        if mistakes:  # All ranks may have made the same one.
            event = mistakes[min(mistakes)]
            for line in event.get("traceback", ()):
                click.echo(line, err=True)
            raise TfdistError(event["text"])

    def tell() -> None:
        """Tells what the ranks of the last attempt have said of its failure."""
        tell_mistake()
        for rank, text in sorted(left_alone.items()):
            show(rank, "stderr", f"tfdist: {text}")

    def restarted(number: int, reason: str) -> None:
        tell_mistake()
        for rank, text in left_alone.items():
            if reason.startswith(f"rank {rank} ended"):  # The text says why.
                reason = text
        left_alone.clear()
        announce_restart(number, max_restarts, reason)
        on_restart(number, reason)

    num_ranks = where.place.world_size if where.place else make_job(0).world_size

    def print_line(rank: int | None, stream: str, text: str) -> None:
        if mistakes:
            return
        if num_ranks > 1:
            show(rank, stream, text)
        else:  # A prefix would tell nothing, and its output is the command's own.
            click.echo(text, err=stream == "stderr")

    try:
        outcome = restarts.run(
            make_job,
            max_restarts=max_restarts,
            on_restart=restarted,
            on_line=print_line,
            on_event=take,
        )
    except LaunchError:
        tell()
        raise
    if outcome.exit_code != 0:  # The others of an elastic job may have gone on.
        tell()
    if outcome.exit_code != 0:
        complain(outcome)
        raise click.exceptions.Exit(outcome.exit_code)


def main(body: Callable[[dict[str, Any]], None]) -> None:
    """The main program of a rank: calls ``body`` with the configuration from the command line."""
    try:
        body(json.loads(sys.argv[1]))
    except TfdistError as error:
        # The cause of a LaunchError is another rank's, which tells it itself if it can.
        is_left = isinstance(error, LaunchError)
        kind = "left alone" if is_left else "mistake"
        _end(is_left, {"event": kind, "text": str(error)[:3000]})
    except SystemExit as error:
        if user_errors.is_ours(error):  # A parameter server's work is done.
            raise
        ended = f"sys.exit({error.code!r})"[:200]
        rule = "the code of a model must not end the training"
        _end(False, {"event": "mistake", "text": str(ModelError(rule, received=ended))})
    except Exception as error:
        event = user_errors.explained(error)
        if event is None:
            raise
        _end(False, event)


def _end(is_left: bool, event: dict[str, Any]) -> NoReturn:
    events.emit(event)
    sys.stdout.flush()
    if is_left:
        time.sleep(_OTHERS_FIRST_S)
    # Without a farewell: other ranks may never come to a common end.
    os._exit(_ENGINE_ERROR if is_left else _USER_ERROR)
