"""What a user says of the lengths of batches: ``pad_to`` and ``bucket_by_length``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import OptionError, spelt

BATCH = "batch"


@dataclass(frozen=True)
class Padding:
    """What a user says of lengths.

    Attributes:
        multiple: lengths are padded to a multiple of it.
        buckets: bounds between lengths that may share a batch; () sorts by length; None leaves the
            order of records as it is.
    """

    multiple: int
    buckets: tuple[int, ...] | None = None


def padding_of(pad_to: int | str | None, bucket_by_length: bool | Sequence[int]) -> Padding | None:
    """Returns what ``Strategy.dataset`` was told; None when batches have one length.

    Raises:
        OptionError: it cannot be.
    """
    is_multiple = type(pad_to) is int and pad_to > 0
    if pad_to is not None and pad_to != BATCH and not is_multiple:
        raise OptionError(
            'pad_to must be "batch", or a whole number of at least 1',
            received=repr(pad_to),
            mend=f"Write {spelt('pad_to', BATCH)} or {spelt('pad_to', 64)}",
        )
    is_list = isinstance(bucket_by_length, Sequence) and not isinstance(bucket_by_length, str)
    bounds = list(bucket_by_length) if is_list else []
    is_rising = all(type(bound) is int and bound > 0 for bound in bounds) and all(
        low < high for low, high in itertools.pairwise(bounds)
    )
    if not (bounds and is_rising) and not isinstance(bucket_by_length, bool):
        raise OptionError(
            "bucket_by_length must be True, or a list of rising lengths such as [32, 64, 128]",
            received=repr(bucket_by_length),
            mend="Write the lengths from the least to the greatest, each once and above 0",
        )
    if bucket_by_length and pad_to is None:
        raise OptionError(
            "bucket_by_length must be said together with pad_to, without which every batch has one "
            "length",
            received=f"bucket_by_length={bucket_by_length} alone",
            mend='Add pad_to="batch", or a multiple such as pad_to=64',
        )
    if pad_to is None:
        return None
    return Padding(pad_to if is_multiple else 1, tuple(bounds) if bucket_by_length else None)
