"""The elements of data: their parts, and whether they are records or batches of them.

What nothing tells is for the user to say: to guess wrongly would train wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.wording import check_unmasked

# Of a part of an element; a size, or their number, is None where it is not known.
Shape = tuple[int | None, ...] | None


def check_parts(what: str, parts: Sequence[object]) -> None:
    """Raises DataError unless they are x, (x, y) or (x, y, sample_weight)."""
    if not 1 <= len(parts) <= 3:
        raise DataError(
            f"{what} must be x, (x, y) or (x, y, sample_weight)",
            received=f"a tuple of {len(parts)}",
            mend="Put several inputs into a dict: ({'a': a, 'b': b}, y)",
        )


def parts_of(element: Any) -> tuple[Any, ...]:
    """Returns (x,), (x, y) or (x, y, sample_weight), as Keras reads an element."""
    is_several = isinstance(element, tuple) or is_list_of_parts(element)
    return tuple(element) if is_several else (element,)


def is_list_of_parts(value: Any) -> bool:
    return isinstance(value, list) and any(
        hasattr(item, "shape") or isinstance(item, (Mapping, tuple)) for item in value
    )


def kept(number: int, value: Any) -> Any:
    """Returns an element, or a part of one, that stays as it is when its generator goes on.

    A generator may fill one array, list or dict anew for each element.
    """
    check_unmasked(value, f"an array of element {number}")
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    if isinstance(value, Mapping):
        return {name: kept(number, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        holds_more = any(isinstance(part, (np.ndarray, Mapping, tuple, list)) for part in value)
        kind = list if isinstance(value, list) else tuple
        return kind(kept(number, part) for part in value) if holds_more else kind(value)
    return value


def told_by_shapes(elements: Iterable[Sequence[Shape]]) -> bool | None:
    """Returns whether elements are batches; None when they may be either.

    They are none where a part has no rows, or another number of rows than the others have. They are
    where all elements have the same, but the last, which has fewer: unless records differ in
    length.

    Args:
        elements: of each, the shapes of its parts.
    """
    rows: list[int] = []
    for shapes in elements:
        known = [shape for shape in shapes if shape is not None]
        sizes = {shape[0] for shape in known if shape} - {None}
        if () in known or len(sizes) > 1:
            return False
        rows += sizes
    return True if len(set(rows[:-1])) == 1 and rows[-1] < rows[0] else None


def cannot_be_told(what: str, shapes: Sequence[Shape]) -> DataError:
    return DataError(
        f"{what} must show whether an element is one record or a batch of them",
        received=f"elements of {in_words(shapes)}, which may be either",
        mend="Say batched=True or batched=False beside it",
    )


def in_words(shapes: Sequence[Shape]) -> str:
    listed = ", ".join("<unknown>" if shape is None else str(shape) for shape in shapes)
    return f"shape{'s' if len(shapes) > 1 else ''} {listed}"
