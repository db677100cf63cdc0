"""Charts as .png files. Here, and only when one is drawn, matplotlib is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.errors import OptionError, package_missing
from tfdist.records.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure of that size, in inches.

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise package_missing("matplotlib", "charts", "plots", error) from error
    empty = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(empty)
    return empty


def checked(path: str | os.PathLike) -> Path:
    """Returns the path of a chart. Raises OptionError when it cannot be one."""
    target = Path(path)
    if target.suffix != ".png" or not target.parent.is_dir() or target.is_dir():
        raise OptionError(
            "a chart must be written to a .png file in a folder that exists",
            received=str(target),
            mend="Name such a file, and make its folder first",
        )
    return target


def save(drawn: Figure, target: Path) -> None:
    """Writes a figure whole, or not at all. Raises WriteError where it cannot be written."""
    with replacing(target) as temporary:
        drawn.savefig(temporary, dpi=100, format="png")
