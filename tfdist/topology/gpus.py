"""The GPUs that this process may use, found out without TensorFlow."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

from tfdist.errors import EngineMissingError, OptionError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\d+|(GPU|MIG)-.+", re.ASCII)
# The driver wakes GPUs that sleep.
_TIMEOUT_S = 60


def visible_gpus() -> list[str]:
    """Returns their names, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    told = os.environ.get(VISIBLE)
    if told is not None:
        # As CUDA reads it: what is no GPU, as -1 or Slurm's NoDevFiles, ends the list.
        names = (name.strip() for name in told.split(","))
        return list(itertools.takewhile(_GPU.fullmatch, names))
    count = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in range(count)]


def kind_and_memory() -> tuple[str, int]:
    """Returns the name of the GPUs of this machine, and the bytes that each has.

    Raises:
        EngineMissingError: the driver's nvidia-smi does not tell.
        OptionError: they are of several kinds.
    """
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        # TensorFlow and the driver number GPUs each in their own order, so that all must be alike.
        kinds = {
            (name.strip(), int(mebibytes) * 2**20)
            for name, mebibytes in (line.rsplit(",", 1) for line in told.stdout.splitlines())
        }
        kind = next(iter(kinds))
    except (OSError, subprocess.SubprocessError, ValueError, StopIteration) as error:
        raise EngineMissingError(
            "nvidia-smi must tell the memory of the GPUs",
            received=f"{type(error).__name__}: {error}",
            mend="Name a strategy, which `tfdist plan --devices` chooses, too",
        ) from None
    if len(kinds) > 1:
        raise OptionError(
            "the GPUs of this machine must be of one kind",
            received=" and ".join(sorted(name for name, _ in kinds)),
            mend="Name a strategy, which `tfdist plan --devices` chooses, too",
        )
    return kind
