"""How unequal the clients are: how many records each one has, and of which classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.records import charts
from tfdist.records.report_text import as_text, table_of

if TYPE_CHECKING:
    from rich.table import Table

_CLIENTS_SHOWN = 20
_CLASSES_SHOWN = 12


@dataclass(frozen=True)
class Skew:
    """The records of all clients, counted. Prints as two tables; ``plot`` draws it.

    Attributes:
        ids: the clients.
        num_records: int64 [clients].
        partition: how the records were dealt, "dirichlet:0.3"; None when that is not known.
        class_ids: the ids that occur, and those between that have a name; None without class ids.
        class_names: the name of each, or its id as text.
        counts: int64 [clients, classes], or None; a client that cannot be read has none.
    """

    ids: tuple[str, ...]
    num_records: np.ndarray
    partition: str | None = None
    class_ids: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None
    counts: np.ndarray | None = None

    @property
    def distances(self) -> np.ndarray | None:
        """How far each client's classes are from those of all clients together, float64 [clients].

        The total variation distance of the proportions: 0 when they are the same, near 1 when the
        client has but classes that are rare elsewhere. NaN for a client without records.
        """
        if self.counts is None:
            return None
        everyone = self.counts.sum(axis=0) / self.counts.sum()
        totals = self.counts.sum(axis=1, keepdims=True)
        shares = np.divide(
            self.counts, totals, np.full(self.counts.shape, np.nan), where=totals > 0
        )
        return np.abs(shares - everyone).sum(axis=1) / 2

    def tables(self) -> Iterator[Table]:
        """Gives the table of all clients together, and that of the first ones."""
        yield self._summary()
        yield self._first_clients()

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: the classes of the first clients, and histograms over all of them.

        Raises:
            OptionError: ``path`` is no .png file in a folder that exists.
        """
        target = charts.checked(path)
        figure = charts.figure(11, 6.5)
        figure.suptitle(self._title)
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
        _draw_clients(self, figure.add_subplot(grid[0, :]))
        records = self.num_records
        bins = 30
        if np.ptp(records) < bins:
            bins = np.arange(records.min(), records.max() + 2) - 0.5
        _draw_histogram(figure.add_subplot(grid[1, 0]), records, bins, "records of a client")
        if self.counts is not None:
            label = "label skew of a client: 0 as all together, to 1"
            distances = self.distances[np.isfinite(self.distances)]
            bins = np.linspace(0, 1, 31)
            _draw_histogram(figure.add_subplot(grid[1, 1]), distances, bins, label)
        charts.save(figure, target)

    def __str__(self) -> str:
        return as_text(*self.tables())

    __repr__ = __str__

    @property
    def _title(self) -> str:
        dealt = "" if self.partition is None else f", {self.partition}"
        return f"{len(self.ids):,} clients, {self.num_records.sum():,} records{dealt}"

    def _summary(self) -> Table:
        table = table_of(self._title, ("of a client",), ("smallest", "median", "mean", "largest"))
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
        table = table_of("records of each class" if few else "clients", ("client",), tuple(columns))
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


def _whole(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


# More bars are thinner than a pixel, more names than a legend has room for.
_CLIENTS_DRAWN = 100
_CLASSES_NAMED = 20


def _draw_clients(skew: Skew, axes: Any) -> None:
    from matplotlib import colormaps

    shown = min(len(skew.ids), _CLIENTS_DRAWN)
    places = np.arange(shown)
    if skew.counts is None:
        axes.bar(places, skew.num_records[:shown], width=0.9)
    else:
        counts = skew.counts[:shown]
        num_classes = counts.shape[1]
        named = num_classes <= _CLASSES_NAMED
        colors = colormaps["tab20" if 10 < num_classes <= 20 else "tab10" if named else "turbo"]
        below = np.zeros(shown)
        for number, name in enumerate(skew.class_names):
            color = colors(number if named else number / num_classes)
            rows = np.flatnonzero(counts[:, number])  # A bar of no height takes as long to draw.
            axes.bar(rows, counts[rows, number], 0.9, below[rows], color=color, label=name)
            below = below + counts[:, number]
        if named:
            axes.legend(title="class", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axes.set_xlim(-0.6, shown - 0.4)
    axes.set_ylabel("records")
    first = "" if shown == len(skew.ids) else f"the first {shown} of {len(skew.ids):,} "
    axes.set_xlabel(f"{first}clients, by class" if skew.counts is not None else f"{first}clients")
    if shown <= 40:
        axes.set_xticks(places, [_short(name) for name in skew.ids], rotation=90, fontsize=7)


def _draw_histogram(axes: Any, values: np.ndarray, bins: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.hist(values, bins=bins, color="tab:blue")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if values.dtype.kind == "i":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)
    axes.set_ylabel("clients")


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
