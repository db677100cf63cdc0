"""Rich tables as text, for reports that are printed anywhere."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 120


def as_text(*renderables: Any) -> str:
    """Returns what rich makes of each, one below the other, without colours."""
    from rich.console import Console

    text = io.StringIO()
    # By itself a console in a notebook shows what it is given, instead of writing it.
    plain = {"force_jupyter": False, "force_terminal": False, "color_system": None}
    literal = {"markup": False, "highlight": False, "emoji": False}
    console = Console(file=text, width=_WIDTH, **plain, **literal)
    for renderable in renderables:
        console.print(renderable, soft_wrap=isinstance(renderable, str))
    return text.getvalue().rstrip("\n")


def table_of(title: str | None, left: Sequence[str], right: Sequence[str]) -> Table:
    """Returns an empty table whose columns are set to the left, and then to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table
