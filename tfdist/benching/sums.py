"""How long ranks take to add something up: latency and bandwidth of each way that there is."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.errors import EngineMissingError, OptionError, unknown_choice
from tfdist.launch import programs
from tfdist.launch.jobs import Where
from tfdist.runs import ranks

RANK = "tfdist.benching.sums_rank"
# way -> who adds up, and what connects its processes.
WAYS: dict[str, dict[str, Any]] = {
    "mpi": {"strategy": "horovod", "controller": "mpi"},
    "gloo": {"strategy": "horovod", "controller": "gloo"},
    "tensorflow": {"strategy": "multi_worker", "options": {"communication": "ring"}},
}
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def sizes_of(text: str) -> list[int]:
    """Returns the bytes that "1KiB:64MiB" asks for: from the first, each four times the last.

    A number is four bytes: sizes between are told as the ones below, which are summed.

    Raises:
        OptionError: it is no such text, or not between 4 bytes and 1 GiB.
    """
    found = [re.fullmatch(r"(\d{1,12})(\w*)", part) for part in text.split(":")]
    if len(found) not in (1, 2) or any(m is None or m[2] not in _UNITS for m in found):
        raise _no_sizes(text)
    first, last = (
        int(match[1]) * _UNITS[match[2]] // 4 * 4
        for match in (found[0], found[-1])
        if match is not None
    )
    if not 4 <= first <= last <= 1 << 30:
        raise _no_sizes(text)
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return sizes if sizes[-1] == last else [*sizes, last]


def _no_sizes(text: str) -> OptionError:
    return OptionError(
        "sizes must be one of bytes, or a smallest and a largest of 4B to 1GiB",
        received=repr(text),
        mend="Write them as --sizes 1KiB:64MiB",
    )


def available() -> list[str]:
    """Returns the ways whose packages and programs are installed."""
    if importlib.util.find_spec("horovod") is None:
        return ["tensorflow"]
    try:
        programs.find("mpirun", "the MPI controller", os.environ)
    except EngineMissingError:
        return ["gloo", "tensorflow"]
    return list(WAYS)


def run(
    ways: Sequence[str],
    sizes: Sequence[int],
    workers: int,
    on_event: Callable[[str, dict[str, Any]], None] = lambda way, event: None,
) -> list[tuple[str, int, float]]:
    """Returns (way, bytes, seconds) of sums of float32 over ``workers`` processes: medians.

    Args:
        on_event: is called with a way and each event of its ranks.

    Raises:
        OptionError: there is no such way.
        EngineMissingError: it is not installed.
    """
    for way in ways:
        if way not in WAYS:
            raise unknown_choice("way to add up", way, list(WAYS))
    found = []
    for way in ways:
        where = Where(workers=workers, **{"options": {}} | WAYS[way])

        def take(rank: int, event: dict[str, Any], way: str = way) -> None:
            if rank == 0 and event["event"] == "summed":
                found.append((way, event["bytes"], event["seconds"]))
            on_event(way, event)

        ranks.run(RANK, {"sizes": list(sizes)}, where, take)
    return found


def bus_bandwidth(size: int, seconds: float, workers: int) -> float:
    """Returns the bytes a second that each link carries, whatever the number of ranks.

    A ring sends 2 (p - 1) / p of the bytes over each link, as NCCL's tests count (nccl-tests,
    PERFORMANCE.md).
    """
    return 2 * (workers - 1) / workers * size / seconds
