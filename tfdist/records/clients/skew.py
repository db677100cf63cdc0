"""How unequal the clients are: how many records each one has, and of which classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.records.clients.counts import ClientCounts
from tfdist.records.clients.skew_plot import draw
from tfdist.records.report_text import as_text

if TYPE_CHECKING:
    from rich.table import Table

_CLIENTS_SHOWN = 20
_CLASSES_SHOWN = 12


class Skew(ClientCounts):
    """The records of all clients, counted. Prints as two tables; ``plot`` draws it."""

    def tables(self) -> Iterator[Table]:
        """Gives the table of all clients together, and that of the first ones."""
        yield self._summary()
        yield self._first_clients()

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: the classes of the first clients, and histograms over all of them.

        Raises:
            OptionError: ``path`` is no .png file in a folder that exists.
        """
        draw(self, path)

    def __str__(self) -> str:
        return as_text(*self.tables())

    __repr__ = __str__

    def _summary(self) -> Table:
        dealt = "" if self.partition is None else f", {self.partition}"
        title = f"{len(self.ids):,} clients, {self.num_records.sum():,} records{dealt}"
        table = _table(title, ("of a client",), ("smallest", "median", "mean", "largest"))
        for name, values, form in self._measures():
            of_readable = values[self.num_records > 0]
            if len(of_readable):
                kinds = (np.min, np.median, np.mean, np.max)
                table.add_row(name, *(form(kind(of_readable)) for kind in kinds))
        return table

    def _measures(self) -> Iterator[tuple[str, np.ndarray, Any]]:
        yield "records", self.num_records, _whole
        if self.counts is not None:
            yield "classes", (self.counts > 0).sum(axis=1), _whole
            yield "label skew, 0 (as all together) to 1", self.distances, "{:.2f}".format

    def _first_clients(self) -> Table:
        columns = ["records"]
        few = self.counts is not None and self.counts.shape[1] <= _CLASSES_SHOWN
        if self.counts is not None:
            columns += ["classes", "skew"]
            columns += self.class_names if few else ["largest class"]
        table = _table("records of each class" if few else "clients", ("client",), tuple(columns))
        for row, client in enumerate(itertools.islice(self.ids, _CLIENTS_SHOWN)):
            table.add_row(client, f"{self.num_records[row]:,}", *self._classes_of(row, few))
        if len(self.ids) > _CLIENTS_SHOWN:
            table.add_row(f"and {len(self.ids) - _CLIENTS_SHOWN:,} more")
        return table

    def _classes_of(self, row: int, few: bool) -> list[str]:
        if self.counts is None:
            return []
        counts = self.counts[row]
        if not counts.any():
            return []
        cells = [str((counts > 0).sum()), f"{self.distances[row]:.2f}"]
        if few:
            return cells + [f"{count:,}" if count else "" for count in counts]
        largest = int(counts.argmax())
        return [*cells, f"{self.class_names[largest]} ({counts[largest] / counts.sum():.0%})"]


def measure_skew(
    ids: Sequence[str],
    num_records: Sequence[int],
    class_counts: Sequence[Mapping[int, int] | None],
    *,
    class_names: Sequence[str] | None = None,
    partition: str | None = None,
) -> Skew:
    """Returns the skew of clients of which each has the given numbers of records.

    Args:
        class_counts: for each client the number of records by class id, or None.
        class_names: the name of each class id; None when they have none.
    """
    known = Skew(tuple(ids), np.array(num_records, np.int64), partition)
    present = sorted({class_id for counts in class_counts for class_id in counts or ()})
    if not present:
        return known
    named = class_names is not None and present[-1] < len(class_names)
    class_ids = range(len(class_names)) if named else present
    column = {class_id: number for number, class_id in enumerate(class_ids)}
    matrix = np.zeros((len(ids), len(class_ids)), np.int64)
    for row, counts in enumerate(class_counts):
        for class_id, count in (counts or {}).items():
            matrix[row, column[class_id]] = count
    names = class_names if named else map(str, class_ids)
    return Skew(known.ids, known.num_records, partition, tuple(class_ids), tuple(names), matrix)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _whole(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
