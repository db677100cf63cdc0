"""A process of a trial: ``python -m tfdist.tuning.trial REQUEST`` trains up to the next rung.

Its standard output has one JSON object a line, "done", "diverged" or "failed" the last; what it
prints otherwise goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tfdist import errors
from tfdist.errors import DivergedError, TfdistError
from tfdist.launch import programs
from tfdist.launch.cleanup import die_with_parent
from tfdist.launch.jobs import Where
from tfdist.runs.progress import Silent
from tfdist.runs.settings import Start
from tfdist.runs.training import carry_out


def main(work: Callable[[dict[str, Any], Callable[..., None]], None]) -> None:
    """The main program of a process of a trial.

    Args:
        work: is called with the request, and with what tells an event.
    """
    die_with_parent(signal.SIGKILL)
    request = programs.from_arguments(sys.argv[1:])
    if os.getppid() != request["parent"]:  # It died before.
        sys.exit(1)
    if request["cpus"] is not None:
        os.sched_setaffinity(0, request["cpus"])
    errors.in_shell = request["in_shell"]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: str, **fields: Any) -> None:
        told.write(json.dumps({"event": event, **fields}) + "\n")
        told.flush()

    try:
        work(request, tell)
    except DivergedError as error:
        tell("diverged", text=str(error))
    except TfdistError as error:
        tell("failed", text=str(error))
    else:
        tell("done")


def _train(request: dict[str, Any], tell: Callable[..., None]) -> None:
    where = Where(**request["where"])
    start = Start(resume=True, max_restarts=request["max_restarts"])
    for fold, config in enumerate(request["configs"]):

        def take(event: dict[str, Any], fold: int = fold) -> None:
            if event["event"] == "epoch":
                tell("epoch", fold=fold, epoch=event["epoch"], metrics=event["metrics"])

        carry_out(config, where, Silent(config["epochs"], on_event=take), start)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # Whoever listened is being ended.
        main(_train)
