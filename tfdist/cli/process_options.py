"""The command-line options of all verbs that train: which strategy, and on which processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from tfdist.cli import completion
from tfdist.cli.launch import Seconds, elastic_options, ps_option, warn_without_srun
from tfdist.compat import follow_program
from tfdist.launch import jobs
from tfdist.launch.jobs import Where
from tfdist.runs.ranks import chosen
from tfdist.strategies import REGISTRY, parse_options

model_option = click.option(
    "--model",
    required=True,
    metavar="FILE.py:NAME",
    help="A function that returns a compiled Keras model.",
)
data_option = click.option(
    "--data",
    required=True,
    metavar="DIR",
    shell_complete=completion.data,
    help="Shards written by tfdist shard.",
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Of weights and order."
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

    def gathered(strategy: str, option: tuple[str, ...], **given: Any) -> Any:
        names = [field.name for field in fields(Where) if field.name in given]
        processes = {name: given.pop(name) for name in names}
        if given["model"] is not None:
            follow_program(os.environ, given["model"].rpartition(":")[0])
        strategy, note = chosen(strategy, processes["workers"])
        if note is not None:
            click.echo(note)
        where = Where(strategy=strategy, options=parse_options(strategy, option), **processes)
        jobs.check_keras(strategy)
        warn_without_srun(where.workers, where.hosts)
        return command(where=where, **given)

    gathered.__doc__ = command.__doc__
    gathered.__click_params__ = getattr(command, "__click_params__", [])
    for decorate in (
        click.option(
            "--stall-timeout",
            "stall_timeout_s",
            type=Seconds(min=0, min_open=True),
            default=300.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest silence of a running job.",
        ),
        click.option(
            "--start-timeout",
            "start_timeout_s",
            type=Seconds(min=0, min_open=True),
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
            "--option",
            "option",
            multiple=True,
            metavar="KEY=VALUE",
            shell_complete=completion.options,
            help="An option of the strategy, such as precision=mixed_float16, accumulate_steps=4, "
            "recompute=blocks, lr_scaling=linear; an unknown one lists all. Repeatable.",
        ),
        click.option(
            "--strategy",
            default="auto",
            shell_complete=completion.strategies,
            show_default=True,
            help=f"How to train: {', '.join(REGISTRY)}, or auto.",
        ),
    ):
        gathered = decorate(gathered)
    return gathered
