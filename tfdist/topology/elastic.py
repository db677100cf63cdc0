"""The place of a worker in an elastic Horovod job, as tfdist's driver tells it.

Each slot is a host to Horovod there, so the driver tells which it is of its real host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.errors import OptionError
from tfdist.topology.values import whole

MARKS = ("HOROVOD_ELASTIC",)
_WORKERS = "TFDIST_ELASTIC_WORKERS"
_LOCAL_RANK = "TFDIST_LOCAL_RANK"
_DRIVER = "TFDIST_DRIVER"
_KEPT = "TFDIST_KEPT"


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an elastic job."""
    return any(environ.get(mark) for mark in MARKS)


def place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the place of a worker: fields of ``Topology``.

    Raises:
        OptionError: another program than tfdist started it.
    """
    if not environ.get(_WORKERS):
        raise OptionError(
            "an elastic job must be started by tfdist, which keeps its batches the same",
            received=f"{MARKS[0]} without {_WORKERS}",
            mend="Start it with tfdist launch --workers 2 --min-workers 1 -- python script.py",
        )
    workers = whole(environ, _WORKERS, at_least=1)
    words, _, orders = environ[_DRIVER].partition(",")
    joins = "HOROVOD_SIZE" not in environ  # Without a rank before it does.
    return {
        "local_rank": whole(environ, _LOCAL_RANK),
        "local_size": workers,
        "elastic_workers": workers,
        "driver": (int(words), int(orders)),
        "kept": environ[_KEPT],
        "world_size": workers + 1 if joins else whole(environ, "HOROVOD_SIZE", at_least=1),
        "rank": workers if joins else whole(environ, "HOROVOD_RANK"),
    }
