"""Runs SageMaker's training toolkit here. Run as ``python -m tfdist.aws.rehearsal.toolkit``.

It is the program ``train`` of AWS's containers, with SAGEMAKER_BASE_DIR in the place of /opt/ml.
Three things of its MPI runner exist in a container alone, and are replaced:

- it starts an ssh daemon, which one host does not need;
- it preloads a library that reads the host's name from /opt/ml, and crashes without that folder;
- it waits 30 s after mpirun, for other hosts.
"""

from __future__ import annotations

import os
import sys
import time
import types

from tfdist.errors import EngineMissingError
from tfdist.launch import events


def missing(received: str) -> EngineMissingError:
    """The error for a toolkit that cannot be imported."""
    return EngineMissingError(
        "SageMaker's training toolkit must be installed for a rehearsal",
        received=received,
        mend="Run pip install --no-deps sagemaker-training==5.1.4, then install what its import "
        "asks for, as pip alone cannot meet its requirements",
    )


def main() -> None:
    assert "SAGEMAKER_BASE_DIR" in os.environ, "the toolkit reads it when it is imported"
    try:
        from sagemaker_training import mpi, trainer
    except ImportError as error:
        print(f"tfdist: {missing(f'an error: {error}')}", file=sys.stderr)
        sys.exit(1)
    # The toolkit's mpirun would put its prefix before events, too, which no one here asks for.
    os.environ.pop(events.VARIABLE, None)
    mpi._start_sshd_daemon = lambda: None  # noqa: SLF001
    mpi.getfile = lambda module: ""
    mpi.time = types.SimpleNamespace(time=time.time, sleep=lambda seconds: None)
    trainer.train()


if __name__ == "__main__":
    main()
