"""Of which kind the values of a column are: numbers, truth values, dates, text or lists."""

from __future__ import annotations

import numpy as np

from tfdist.records.writing.tables.kinds_of_text import kind_of_texts
from tfdist.records.writing.tables.kinds_of_values import kind_of_values
from tfdist.records.writing.tables.table import TEXT, Cells, Values, Written, objects


def find_kind(column: Cells | Written | Values, *, is_text: bool = False) -> Cells:
    """Returns the values of a column, of the kind that at least 95 % of them have.

    Args:
        is_text: whether they are text whatever they look like; only nothing at all is then
            missing.

    Raises:
        DataError: values that are neither numbers, text, dates, nor lists.
    """
    if isinstance(column, Written):
        if not is_text:
            return kind_of_texts(column)
        missing = [not text.strip() for text in column.texts]
        return Cells(TEXT, objects(column.texts), np.array(missing, bool))
    cells = kind_of_values(column.values, is_text) if isinstance(column, Values) else column
    return _as_text(cells) if is_text and cells.kind != TEXT else cells


def _as_text(cells: Cells) -> Cells:
    texts = [
        "" if gone else str(value)
        for value, gone in zip(cells.values.tolist(), cells.missing, strict=True)
    ]
    return Cells(TEXT, objects(texts), cells.missing)
