"""Which record goes to which split and which shard: a pure function of the seed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.errors import DataError, OptionError, spelt

# One record in six for validation: the split of the field's textbooks.
DEFAULT_SPLIT = "train=5,validation=1"
# What sources that are divided already are divided into, in this order; and words for it, the same
# for folders, files and arrays.
SPLITS = ("train", "validation", "test")
#: That a sum of shares still has a value.
_LARGEST_SHARE = 1e15
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}


def split_of_word(word: str) -> str | None:
    """Returns which of ``SPLITS`` a word such as "Val" stands for; None for any other."""
    return SPLIT_WORDS.get(word.lower())


def rows_of_splits(names: Sequence[str | None]) -> dict[str, np.ndarray] | None:
    """Returns the numbers of the records of each split, int64 [n]; None where nothing divides."""
    array = np.array([name or "" for name in names])
    rows = {split: np.flatnonzero(array == split) for split in SPLITS}
    return {split: found for split, found in rows.items() if len(found)} or None


def parse_split(split: str | Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each split from "train=5,validation=1" or a mapping.

    Raises:
        OptionError: a name or a share that cannot be.
    """
    example = f"Write for example {DEFAULT_SPLIT}"
    shares: dict[str, float] = {}
    pairs = split.items() if isinstance(split, Mapping) else _pairs(split, example)
    for name, share in pairs:
        check_split_name(name, example)
        try:
            number = float(share)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number <= _LARGEST_SHARE:
            raise OptionError(
                f"the share of split '{name}' must be a positive number, at most 1e15",
                received=share,
                mend=example,
            )
        if name in shares:
            raise OptionError(
                "each split must be named once",
                received=f"'{name}' twice",
                mend="Write it once, with the sum of its shares",
            )
        shares[name] = number
    if not shares:
        raise OptionError("there must be at least one split", received=repr(split), mend=example)
    return shares


def check_split_name(name: object, mend: str) -> None:
    """Raises OptionError for what no split can be called."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise OptionError(
            "a split's name must be letters, digits and _, a letter first",
            received=repr(name),
            mend=mend,
        )


def _pairs(text: str, example: str) -> list[tuple[str, str]]:
    if not isinstance(text, str):
        raise OptionError("a split must be NAME=SHARE", received=repr(text), mend=example)
    pairs = []
    for part in text.split(","):
        name, equals, share = part.partition("=")
        if not equals:
            raise OptionError("a split must be NAME=SHARE", received=repr(part), mend=example)
        pairs.append((name.strip(), share.strip()))
    return pairs


def assign(
    num_records: int, shares: Mapping[str, float], seed: int, class_ids: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Returns for each split the numbers of its records, int64 [n], in shuffled order.

    Args:
        class_ids: int64 [num_records] to give every split the proportions of the classes; None to
            split regardless of them.

    Raises:
        DataError: a split would be empty.
    """
    order = np.random.default_rng(seed).permutation(num_records)
    if class_ids is None:
        ends = np.cumsum(apportion(num_records, list(shares.values())))
        assigned = dict(zip(shares, np.split(order, ends[:-1]), strict=True))
    else:
        split_of = _stratified(class_ids[order], list(shares.values()))
        assigned = {name: order[split_of == number] for number, name in enumerate(shares)}
    for name, rows in assigned.items():
        if not len(rows):
            raise empty_split(name, f"none of {num_records} in all")
    return assigned


def empty_split(name: str, received: str) -> DataError:
    return DataError(
        f"split '{name}' must have at least one record",
        received=received,
        mend="Give it a larger share, or write one split alone: " + spelt("split", "train=1"),
    )


def check_enough(name: str, num_records: int, num_shards: int) -> None:
    """Raises DataError for a split with fewer records than the shards that are asked for."""
    if num_records < num_shards:
        raise DataError(
            f"split '{name}' must have at least one record for each shard",
            received=f"{num_records} records for {num_shards} shards",
            mend=f"Choose fewer shards ({spelt('num_shards')})",
        )


def apportion(count: int, shares: list[float], owed: np.ndarray | None = None) -> np.ndarray:
    """Divides ``count`` by shares into whole numbers, each less than 1 off the exact one.

    Args:
        owed: what each share still has to get from earlier divisions; updated in place.
    """
    exact = count * np.asarray(shares, float) / sum(shares)
    parts = np.floor(exact).astype(np.int64)
    claim = exact - parts if owed is None else exact - parts + owed
    winners = np.argsort(-claim, kind="stable")[: count - parts.sum()]
    parts[winners] += 1
    if owed is not None:
        owed += exact - parts
    return parts


def _stratified(class_ids: np.ndarray, shares: list[float]) -> np.ndarray:
    """Returns the split number of each record; each class, and the whole, divided by the shares."""
    split_of = np.empty(len(class_ids), np.int64)
    owed = np.zeros(len(shares))
    for class_id in np.unique(class_ids):
        members = np.flatnonzero(class_ids == class_id)
        split_of[members] = np.repeat(np.arange(len(shares)), apportion(len(members), shares, owed))
    return split_of


def cut_shards(rows: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """Cuts the records of a split into shards that differ by at most one record."""
    return np.array_split(rows, num_shards)
