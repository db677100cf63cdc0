"""Runs a function of a notebook on several ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.errors import LaunchError, package_missing
from tfdist.launch import jobs, supervisor
from tfdist.training.engine.options import check_count


def notebook_launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    strategy: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls ``fn(*args, **kwargs)`` on each of ``workers`` ranks; shows rank 0's output.

    The ranks are fresh processes: import what ``fn`` needs inside it. TensorFlow may already be in
    use in this process.

    Args:
        fn: a function, also one defined in a cell; cloudpickle must be able to copy it.
        args: its arguments, the same on all ranks.
        workers: number of ranks, at most the slots of this machine.
        strategy: which one's ranks they are: "horovod" (MPI), "multi_worker" or
            "parameter_server"; horovod unless given, multi_worker where it is not installed.
        kwargs: its keyword arguments, the same on all ranks.

    Returns:
        What rank 0 returned.

    Raises:
        LaunchError: a rank failed; the message holds the end of its traceback.
        EngineMissingError: cloudpickle, or horovod's mpirun, is missing.
        OptionError: ``workers`` is no whole number of at least 1.
    """
    if workers is not None:
        check_count("workers", workers)
    try:
        import cloudpickle
    except ImportError as error:
        raise package_missing("cloudpickle", "notebook_launch", "notebooks", error) from error
    # TemporaryDirectory makes it for this user alone (0700): what is unpickled is our own.
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-") as folder:
        Path(folder, "task.pkl").write_bytes(cloudpickle.dumps((fn, args, kwargs)))
        command = [sys.executable, "-m", "tfdist.launch.notebook_rank", folder]
        # Modules that this process can import, the ranks can too.
        job = jobs.job_for(strategy or jobs.of_several(), command, workers=workers)
        job.env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        outcome = supervisor.run(job, on_line=_show)
        if outcome.exit_code != 0:
            if outcome.failed_rank:  # The lines of rank 0 have been shown.
                print(*outcome.last_lines, sep="\n", file=sys.stderr, flush=True)
            raise LaunchError(
                "every rank of notebook_launch must return",
                received=": ".join([outcome.reason, *outcome.last_lines[-1:]]),
                mend="Read above what the ranks have printed, and mend it in the function",
            )
        return cloudpickle.loads(Path(folder, "result.pkl").read_bytes())


def _show(rank: int | None, stream: str, text: str) -> None:
    if rank is None or rank == 0:
        print(text, file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
