"""What an export found, as objects and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.errors import ExportError
from tfdist.export.latency import Benchmark
from tfdist.export.layers import ROUNDING, LayerError
from tfdist.export.parity import Parity
from tfdist.records import report_text
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from rich.table import Table

_LAYERS_SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """One way of quantizing the model.

    Attributes:
        quantization: a name of ``QUANTIZATIONS``.
        bytes: of the file; None when it could not be converted.
        parity: None without data.
        layers: the operators of an int8 file, the worst first.
        benchmark: None unless asked for.
        problem: why it could not be converted, or why it is not good enough.
    """

    quantization: str
    bytes: int | None = None
    parity: Parity | None = None
    layers: tuple[LayerError, ...] = ()
    benchmark: Benchmark | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Report:
    """What an export found.

    Attributes:
        path: of the file; None when none was good enough.
        chosen: the quantization that was written; None likewise.
        float_bytes: size of the float32 file, which the others are compared with.
        candidates: one for each quantization that was tried.
        place: the records that the files were judged on; None without data.
        max_drop: what the drop may be at most.
        note: what the user should know beside the numbers.
    """

    path: Path | None
    chosen: str | None
    float_bytes: int
    candidates: tuple[Candidate, ...]
    place: str | None
    max_drop: float
    note: str | None = None

    @property
    def best(self) -> Candidate | None:
        return next((c for c in self.candidates if c.quantization == self.chosen), None)

    def tables(self) -> Iterator[Table]:
        """Yields rich tables: sizes and parity, then layers and speed where they are known."""
        yield self._sizes()
        for candidate in self.candidates:
            if candidate.layers:
                yield _layers_table(candidate)
        if any(candidate.benchmark for candidate in self.candidates):
            yield self._speeds()

    def lines(self) -> Iterator[str]:
        """Yields what belongs below the tables."""
        for candidate in self.candidates:
            if candidate.problem is not None:
                yield f"{candidate.quantization}: {candidate.problem}"
        if self.note:
            yield f"note: {self.note}"

    def __str__(self) -> str:
        return as_text(self.tables(), self.lines())

    def _sizes(self) -> Table:
        metric = next((c.parity.metric for c in self.candidates if c.parity), None)
        title = "not compared with Keras: there was no data"
        if self.place:
            title = f"{metric or 'compared'} on {self.place}"
        right = ("bytes", "of float32", "largest diff.", "mean diff.", "Keras", "file", "drop")
        table = table_of(title, ("quantization",), right)
        table.add_column("")
        for candidate in self.candidates:
            mark = "written" if candidate.quantization == self.chosen else ""
            if candidate.problem is not None:
                mark = "impossible" if candidate.bytes is None else "refused"
            size, cells = candidate.bytes, ["", ""]
            if size is not None:
                cells = [f"{size:,}", f"{size / self.float_bytes:.1%}"]
            table.add_row(candidate.quantization, *cells, *_parity(candidate.parity), mark)
        return table

    def _speeds(self) -> Table:
        names = ("threads", "p50 ms", "p90 ms", "runs", "arena bytes")
        table = table_of("on this machine, batch 1", ("quantization",), names)
        for candidate in self.candidates:
            if candidate.benchmark is None:
                continue
            for number, latency in enumerate(candidate.benchmark.latencies):
                table.add_row(
                    candidate.quantization if number == 0 else "",
                    str(latency.threads),
                    f"{latency.p50_ms:.3f}",
                    f"{latency.p90_ms:.3f}",
                    str(latency.runs),
                    f"{candidate.benchmark.arena_bytes:,}" if number == 0 else "",
                )
        return table


class ParityError(ExportError):
    """A file whose drop against Keras is above the limit; nothing was written.

    Attributes:
        report: what was found.
    """

    def __init__(self, report: Report, *, received: str, mend: str):
        self.report = report
        super().__init__(
            f"the file must lose at most {report.max_drop:g} against Keras",
            received=received,
            mend=mend,
        )


def as_text(tables: Iterable[Table], lines: Iterable[str] = ()) -> str:
    """Returns tables, and lines below them, as plain text."""
    text = report_text.as_text(*tables).splitlines()
    return "\n".join([*(line.rstrip() for line in text), *lines])


def _parity(parity: Parity | None) -> list[str]:
    if parity is None:
        return [""] * 5
    return [
        f"{parity.largest_difference:.2e}",
        f"{parity.mean_difference:.2e}",
        f"{parity.keras:.4f}",
        f"{parity.file:.4f}",
        f"{parity.drop:+.4f}",
    ]


def _layers_table(candidate: Candidate) -> Table:
    title = f"worst layers of {candidate.quantization} ({ROUNDING:.2f} steps: rounding alone)"
    right = ("error of size", "in steps", "largest error")
    table = table_of(title, ("layer", "operator"), right)
    for error in candidate.layers[:_LAYERS_SHOWN]:
        table.add_row(
            error.layer,
            error.operator,
            f"{error.relative_error:.1%}",
            f"{error.rmse_in_steps:.2f}",
            f"{error.largest_error:.2e}",
        )
    return table
