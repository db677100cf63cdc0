"""A process of a trial: ``python -m tfdist.tuning.trial REQUEST`` trains up to the next rung.

Where the request has a journal, it calls the model's function with a trial of Optuna's first of
all: what it suggests is chosen, and the processes that train are given the same.

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
from pathlib import Path
from typing import Any

from tfdist import errors
from tfdist.compat import import_tensorflow
from tfdist.errors import DivergedError, ModelError, TfdistError
from tfdist.launch import programs
from tfdist.launch.cleanup import die_with_parent
from tfdist.launch.jobs import Where
from tfdist.runs.progress import Silent
from tfdist.runs.settings import Start
from tfdist.runs.training import carry_out
from tfdist.training.engine import model_path
from tfdist.tuning.study import DEFINED, Study


def main() -> None:
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
        if "journal" in request:
            _define(request)
        else:
            _train(request, tell)
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


def _define(request: dict[str, Any]) -> None:
    import_tensorflow()
    study = Study(Path(request["journal"]), **request["study"])
    trial = study.trial(request["number"])
    function = model_path.load(request["model"])
    try:
        function(trial=trial)
    except TypeError as error:
        if model_path.TRIAL not in str(error):
            raise
        raise ModelError(
            "the model's function must take a trial where no space is given",
            received=str(error),
            mend="Write def model_fn(trial): ..., or give a space with its arguments",
        ) from None
    trial.set_user_attr(DEFINED, True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # Whoever listened is being ended.
        main()
