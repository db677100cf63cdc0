"""Where the verbs print: results on stdout, progress on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Wide enough for the tables when the output is a file or a pipe, which have no width of their own.
_FILE_WIDTH = 120


def stdout() -> Console:
    """Returns the console for results. Text is printed as it is: names may hold brackets."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def progress_bar(unit: str) -> Progress:
    """Returns a bar on stderr that counts ``unit`` and vanishes at the end; silent in a pipe."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"
