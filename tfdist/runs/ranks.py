"""Runs one of tfdist's own rank programs on as many processes as a strategy needs.

The process that calls it stays light: it starts the ranks, watches them, and shows what they say.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from tfdist.compat import check_versions, follow_program
from tfdist.errors import LaunchError, ModelError, OptionError, RankFailedError, TfdistError
from tfdist.launch import events, jobs, programs, restarts, supervisor
from tfdist.launch.jobs import Where
from tfdist.launch.restarts import announce_restart, complain, show
from tfdist.runs import user_errors
from tfdist.strategies import check_options
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_deadline, check_values

_USER_ERROR = 2
_ENGINE_ERROR = 1
# The end of one rank ends all others, who may be about to tell the cause.
_OTHERS_FIRST_S = 1.0
# In the environment of rank programs, which must not start others.
_IS_RANK = "TFDIST_RANK_PROGRAM"


def chosen(strategy: str, workers: int | None) -> tuple[str, str | None]:
    """Returns the strategy of a command that leaves the choice, and what to say of it, if anything.

    With one process its rank chooses.
    """
    if strategy != "auto" or (workers or 1) == 1:
        return strategy, None
    name = jobs.of_several()
    why = "" if name == "horovod" else ", and horovod is not installed"
    return name, f"strategy '{name}', because {workers} workers were asked for{why}"


def asked(call: str, model: Any, *, verbose: bool = True, **given: Any) -> Where:
    """Returns where a call from Python is to run, and prints what there is to say of the choice.

    Args:
        call: as its user writes it, such as "tfdist.train".
        model: as ``tfdist.train`` takes it.
        verbose: whether to print.
        given: attributes of ``Where``.

    Raises:
        OptionError: it cannot be had, or a rank asks for it.
        EngineMissingError: the TensorFlow or the Keras here is none that it runs on.
    """
    refuse_within_rank(call)
    follow_program(os.environ, model_path.parts(model_path.of(model))[0])
    check_versions()
    where = Where(**given)
    check_deadline("start_timeout_s", where.start_timeout_s)
    check_deadline("stall_timeout_s", where.stall_timeout_s)
    check_values(where)
    name, note = chosen(where.strategy, where.workers)
    where = replace(where, strategy=name, options=dict(where.options or {}))
    check_options(name, where.options)
    jobs.check_keras(name)
    if note is not None and verbose:
        print(note, flush=True)
    return where


def refuse_within_rank(call: str) -> None:
    """Raises OptionError where this process is a rank, which has imported the model's file."""
    if _IS_RANK in os.environ:
        raise OptionError(
            f"{call} must be called by the program, not when its file is imported",
            received="a call while a rank imports the file of the model",
            mend='Write it below if __name__ == "__main__":',
        )


def run(
    module: str,
    config: dict[str, Any],
    where: Where,
    on_event: Callable[[int, dict], None],
    *,
    max_restarts: int = 0,
    on_restart: Callable[[int, str], None] = lambda number, reason: None,
    stop: threading.Event | None = None,
) -> None:
    """Runs ``python -m module CONFIG`` on every rank, to the end.

    Args:
        module: a rank program, see ``main``.
        config: JSON-able; the strategy is added, and by a restart ``"resume": True``.
        where: the processes.
        on_event: called with (rank, event); beside those of ranks with "said", for each line that
            tfdist prints on one, and "restart".
        max_restarts: see ``tfdist.launch.restarts``.
        on_restart: called with the number of a restart and the reason for it.
        stop: see ``Job``.

    Raises:
        TfdistError: a rank met a mistake of the user's, which no restart mends; the message is the
            rank's.
        RankFailedError: a rank failed otherwise; its last lines have been shown.
    """
    mistakes: dict[int, dict[str, Any]] = {}
    # What ranks say that were left alone by another, which tells the cause if it can.
    left_alone: dict[int, str] = {}

    def make_job(attempt: int) -> supervisor.Job:
        told = config | {"strategy": where.strategy, "options": where.options}
        told |= {"resume": True} if attempt else {}
        job = where.job([sys.executable, "-m", module, *programs.in_arguments(told)])
        job = replace(job, stop=stop)
        # TensorFlow reports missing CUDA libraries as errors; what matters it raises.
        job.env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        job.env[_IS_RANK] = "1"
        return job

    joined = events.Joined()

    def take(rank: int, part: dict) -> None:
        event = joined(rank, part)
        if event is None:
            return
        if event["event"] == "mistake":
            mistakes[rank] = event
        elif event["event"] == "left alone":
            left_alone[rank] = event["text"]
        else:
            on_event(rank, event)

    def tell_mistake() -> None:
        if mistakes:  # All ranks may have made the same one.
            raise_mistake(mistakes[min(mistakes)])

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
        on_event(0, {"event": "restart", "number": number, "reason": reason})
        on_restart(number, reason)

    num_ranks = where.place.world_size if where.place else make_job(0).world_size

    def print_line(rank: int | None, stream: str, text: str) -> None:
        if mistakes:
            return
        if text.startswith("tfdist: "):  # Of tfdist itself, not of the user's code.
            on_event(rank or 0, {"event": "said", "text": text})
        if num_ranks > 1:
            show(rank, stream, text)
        else:  # A prefix would tell nothing, and its output is the command's own.
            print(text, file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)

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
        complain(outcome)
        raise RankFailedError(outcome.reason, outcome.exit_code)


def main(body: Callable[[dict[str, Any]], None]) -> None:
    """The main program of a rank: calls ``body`` with the configuration from the command line."""
    try:
        body(programs.from_arguments(sys.argv[1:]))
    except (Exception, SystemExit) as error:
        event = mistake_of(error)
        if event is None:
            raise
        is_left = event["event"] == "left alone"
        events.emit(event)
        sys.stdout.flush()
        if is_left:
            time.sleep(_OTHERS_FIRST_S)
        # Without a farewell: other ranks may never come to a common end.
        os._exit(_ENGINE_ERROR if is_left else _USER_ERROR)


def told_mistake(event: Mapping[str, Any]) -> TfdistError:
    """Returns the mistake that another process has told, in its own words."""
    return TfdistError(event["text"])


def raise_mistake(event: Mapping[str, Any]) -> NoReturn:
    """Raises the mistake of an event, below the lines of the user's own code that led to it."""
    for line in event.get("traceback", ()):
        print(line, file=sys.stderr, flush=True)
    raise told_mistake(event) from None


def mistake_of(error: Exception | SystemExit) -> dict[str, Any] | None:
    """Returns the event that tells of a user's mistake; None where ``error`` is none."""
    if isinstance(error, TfdistError):
        # The cause of a LaunchError is another rank's, which tells it itself if it can.
        kind = "left alone" if isinstance(error, LaunchError) else "mistake"
        return {"event": kind, "text": events.that_fits(str(error))}
    if not isinstance(error, SystemExit):
        return user_errors.explained(error)
    if user_errors.is_ours(error):  # A parameter server's work is done.
        return None
    mistake = ModelError(
        "the code of a model must not end the training",
        received=f"sys.exit({error.code!r})"[:200],
        mend="Take sys.exit out of it, or raise an error there",
    )
    return {"event": "mistake", "text": str(mistake)}
