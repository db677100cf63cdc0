"""The command-line options of all verbs that train: which strategy, and on which processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from tfdist.cli import completion
from tfdist.cli.launch import warn_without_srun
from tfdist.cli.option_table import options_of
from tfdist.compat import follow_program
from tfdist.launch import jobs
from tfdist.launch.jobs import Where
from tfdist.runs.ranks import chosen
from tfdist.strategies import parse_options
from tfdist.training.engine import model_path
from tfdist.training.engine.options import picked

_text = "A function that returns a compiled Keras model."
_model = functools.partial(click.option, "--model", metavar="FILE.py:NAME", help=_text)
model_option, optional_model_option = _model(required=True), _model()
data_option = click.option(
    "--data",
    required=True,
    metavar="DIR",
    shell_complete=completion.data,
    help="Shards written by tfdist shard.",
)


def where_options(command: Callable, **others: Any) -> Callable:
    """Adds the command-line options of ``Where``; the command receives ``where``.

    Args:
        others: as ``options_of`` takes them.
    """

    @functools.wraps(command)
    def gathered(strategy: str, option: tuple[str, ...], **given: Any) -> Any:
        processes = picked(Where, given)
        given = {name: value for name, value in given.items() if name not in processes}
        if given["model"] is not None:
            follow_program(os.environ, model_path.parts(given["model"])[0])
        strategy, note = chosen(strategy, processes["workers"])
        if note is not None:
            click.echo(note)
        where = Where(strategy=strategy, options=parse_options(strategy, option), **processes)
        jobs.check_keras(strategy)
        warn_without_srun(where.workers, where.hosts)
        return command(where=where, **given)

    return options_of(Where, **others)(gathered)
