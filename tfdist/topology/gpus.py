"""The GPUs that this process may use, found out without TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Returns their names, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    told = os.environ.get(VISIBLE)
    if told is not None:
        names = [name.strip() for name in told.split(",") if name.strip()]
        return [] if "-1" in names else names
    count = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in range(count)]
