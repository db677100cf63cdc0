"""Where the verbs print: results on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tfdist.cli import voice
from tfdist.records.report_text import table_of

# Wide enough for the tables when the output is a file or a pipe, which have no width of their own.
_FILE_WIDTH = 120


class _Results(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        """Prints, each line of a text whole, however long: it may be a path or a command."""
        super().print(*objects, **{"soft_wrap": isinstance(objects[0], str), **how})


def stdout() -> Console:
    """Returns the console for results. Text is printed as it is: names may hold brackets."""
    console = _Results(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def plain_table(*titles: str) -> Table:
    """Returns an empty table without lines."""
    table = table_of(None, titles, ())
    table.box, table.pad_edge = None, False
    return table


@contextlib.contextmanager
def step_status(doing: str) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Shows what is being done, and at which step; gives what takes the events of ranks."""
    with stdout().status(doing) as status:

        def take(rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "step" and rank == 0:
                status.update(f"{doing}: step {event['step']:,} of {event['steps']:,}")
            voice.take(rank, event)

        yield take


class _Bar(Progress):
    """Tells programs what it shows."""

    def __init__(self, unit: str, *columns: Any, **options: Any):
        super().__init__(*columns, **options)
        self._unit = unit

    def update(self, task_id: Any, **values: Any) -> None:
        super().update(task_id, **values)
        self._tell(task_id)

    def advance(self, task_id: Any, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: Any) -> None:
        if voice.is_heard():
            task = self._tasks[task_id]
            voice.progress(task.description, task.completed, task.total, self._unit)


def progress_bar(unit: str, *, is_told: bool = True) -> Progress:
    """Returns a bar on stderr that counts ``unit`` and vanishes at the end; silent in a pipe.

    Args:
        is_told: whether programs are told of it; not where they are told more than it shows.
    """
    console = Console(stderr=True)
    kind = functools.partial(_Bar, unit) if is_told else Progress
    return kind(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=voice.is_quiet() or not console.is_terminal,
    )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"
