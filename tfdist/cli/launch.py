"""``tfdist launch``: any script on several processes."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tfdist import topology
from tfdist.cli.option_table import options_of
from tfdist.errors import OptionError
from tfdist.launch import jobs, restarts
from tfdist.launch.jobs import Where
from tfdist.launch.restarts import announce_restart, complain, show
from tfdist.runs.settings import Start
from tfdist.strategies import REPLICAS, parse_options

_EXIT_BROKEN_PIPE = 141


@click.command(
    "launch",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: tfdist launch --strategy horovod --workers 2 -- python train.py --epochs 3",
)
@options_of(
    Where,
    *("strategy", "options", "workers", "ps", "hosts", "controller"),
    *("min_workers", "max_workers", "host_discovery", "start_timeout_s"),
    strategy={
        "default": None,
        "help": "A strategy's name.  [default: horovod; multi_worker where it is not installed]",
    },
    options={
        "metavar": "replicas=NAME",
        "shell_complete": None,
        "help": "For a strategy that divides one model (mesh, pipeline): what starts the ranks "
        f"that each hold one, {' or '.join(REPLICAS)}; the script gives the same to "
        "tfdist.strategy(replicas=), and all other options. Without it one process is started.",
    },
    workers={"help": "Number of processes.  [default: 2; 1 where one process is all]"},
    hosts={"help": "Hosts with their slots; this machine if not given."},
)
@options_of(
    Start,
    "max_restarts",
    max_restarts={
        "help": "When a process is lost: end all and start all again. The script goes on from its "
        "checkpoints: tfdist.Checkpoints(folder, resume=True)."
    },
)
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    strategy: str | None,
    option: tuple[str, ...],
    max_restarts: int,
    script: tuple[str, ...],
    **processes: Any,
) -> int:
    """Run any script on several processes, and end them all.

    Each line of output begins with its rank; in an elastic job with the first one that it had. When
    a process fails, all are ended, and the exit code is that of the first that failed. Where srun
    or mpirun has started this command once for each rank, and neither --workers nor --hosts is
    given, it runs the script as that rank.
    """

    name = strategy or jobs.of_several()
    where = Where(
        strategy=name, options=_starting_options(name, option), stall_timeout_s=None, **processes
    )
    jobs.check_keras(name)
    warn_without_srun(where.workers, where.hosts)

    try:
        outcome = restarts.run(
            lambda attempt: where.job(list(script)),
            max_restarts=max_restarts,
            on_restart=lambda number, reason: announce_restart(number, max_restarts, reason),
            on_line=show,
        )
    except BrokenPipeError:
        # Whoever read our output has gone, as with `| head`; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    if outcome.exit_code != 0:
        complain(outcome)
    return outcome.exit_code


def _starting_options(strategy: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options of a strategy that say what starts its processes.

    Raises:
        OptionError: another option, which only the script can give.
    """
    names = [pair.partition("=")[0] for pair in pairs]
    others = [name for name in names if name != "replicas"]
    if others:
        raise OptionError(
            "tfdist launch must be given no option of a strategy but replicas, which says what "
            "starts its processes",
            received=f"-o {' -o '.join(others)}",
            mend=f"Give it in the script: tfdist.strategy({strategy!r}, {others[0]}=...)",
        )
    return parse_options(strategy, pairs)


def warn_without_srun(workers: int | None, hosts: str | None) -> None:
    """Says on stderr that a Slurm job's other tasks are left idle, where nothing was said of it."""
    if workers is None and hosts is None and topology.lacks_srun():
        click.echo(
            "tfdist: warning: this Slurm job has several tasks, but srun did not start this "
            "command: its processes run on this machine only. Start it with srun, or give "
            "--workers or --hosts",
            err=True,
        )
