"""resources.csv: what each rank of a training has used in each epoch, and what is said of it."""

from __future__ import annotations

import contextlib
from typing import Any

from tfdist.errors import WriteError
from tfdist.runs.files import read_rows, write_history
from tfdist.runs.folder import RunFolder

_PLACE = ("epoch", "rank")
#: How a source of energy is called, by the column that it fills.
SOURCES = {
    "energy_rapl_j": "rapl",
    "energy_nvml_j": "nvml",
    "energy_stated_j": "stated power",
}


class ResourceLog:
    """Listens to a training, and keeps a row for each epoch and rank.

    Args:
        folder: whose file is gone on with.

    Raises:
        DataError: the file is not as it was written.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._rows = {(row["epoch"], row["rank"]): row for row in read_rows(folder.resources)}
        self._begun: set[int] = set()

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "restart":
            self._begun.clear()
        elif event["event"] == "resources":
            epoch, rank = (event[name] for name in _PLACE)
            figures = {k: v for k, v in event.items() if k not in ("event", *_PLACE)}
            row = {"epoch": epoch, "rank": rank, **figures}
            if epoch not in self._begun:  # It may have been trained before, by other ranks.
                self._rows = {key: row for key, row in self._rows.items() if key[0] < epoch}
                self._begun.add(epoch)
            self._rows[epoch, rank] = row
        elif event["event"] == "checkpoint":  # An earlier training has been replaced by now.
            self.write()

    def write(self) -> None:
        """Writes the file; where that fails, other files of the training tell why."""
        if self._rows:
            rows = [self._rows[key] for key in sorted(self._rows)]
            with contextlib.suppress(WriteError):
                write_history(self._folder.resources, rows)

    def summary(self) -> list[dict[str, Any]]:
        """Returns what each rank has used over all epochs: means, peaks, and sums of energy."""
        ranks = sorted({rank for _, rank in self._rows})
        return [
            _of_rank(rank, [row for row in self._rows.values() if row["rank"] == rank])
            for rank in ranks
        ]


def _of_rank(rank: int, rows: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": rank}
    for name in dict.fromkeys(name for row in rows for name in row if name not in _PLACE):
        having = [row for row in rows if name in row]
        values = [row[name] for row in having]
        if name == "seconds" or name in SOURCES:
            found[name] = round(sum(values), 4)
        elif "peak" in name:
            found[name] = max(values)
        else:
            seconds = sum(row["seconds"] for row in having)
            weighted = sum(row[name] * row["seconds"] for row in having)
            found[name] = round(weighted / seconds, 4) if seconds else values[-1]
    if sources := [source for column, source in SOURCES.items() if column in found]:
        found["energy_sources"] = sources
    return found


def told(summary: dict[str, Any]) -> str | None:
    """Returns in a line what the ranks of a training have used; None where nothing is known."""
    ranks = summary.get("resources")
    if not ranks:
        return None
    parts = []
    for name, form in (("cpu_cores", "{:,.2f} cores"), ("memory_peak_mib", "{:,.0f} MiB at most")):
        if values := [each[name] for each in ranks if name in each]:
            least, most = (form.format(each) for each in (min(values), max(values)))
            parts.append(most if least == most else f"{least.split()[0]} to {most}")
    for column, source in SOURCES.items():
        if joules := [each[column] for each in ranks if column in each]:
            parts.append(f"{sum(joules):,.0f} J ({source})")
    if not parts:
        return None
    whose = "the process" if len(ranks) == 1 else f"each of {len(ranks)} processes"
    return f"{whose}: {', '.join(parts)}"
