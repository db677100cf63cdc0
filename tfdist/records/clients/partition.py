"""Which record belongs to which client: a pure function of the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import DataError, OptionError, unknown_choice

KNOWN = ("iid", "dirichlet:ALPHA", "shards:K", "by:COLUMN")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How records are dealt to clients.

    Attributes:
        kind: "iid", "dirichlet", "shards" or "by".
        alpha: of "dirichlet", > 0: the smaller, the fewer classes a client has.
        shards_per_client: of "shards", >= 1: about the number of classes that a client has.
        column: of "by", the name of the column whose values are the clients.
    """

    kind: str
    alpha: float | None = None
    shards_per_client: int | None = None
    column: str | None = None

    def __str__(self) -> str:
        values = (self.alpha, self.shards_per_client, self.column)
        return ":".join([self.kind, *(f"{value}" for value in values if value is not None)])

    @property
    def needs_class_ids(self) -> bool:
        return self.kind in ("dirichlet", "shards")


def parse_partition(text: str) -> Partition:
    """Returns the partition of "iid", "dirichlet:ALPHA", "shards:K" or "by:COLUMN".

    Raises:
        OptionError: another name, or a number that cannot be.
    """
    kind, colon, value = str(text).partition(":")
    if kind == "iid" and not colon:
        return Partition(kind=kind)
    if kind == "dirichlet" and colon:
        alpha = _number(value, float)
        if alpha is None or not 0 < alpha < math.inf:
            raise OptionError(
                "the ALPHA of dirichlet:ALPHA must be a positive number",
                received=repr(value),
                mend="Write for example dirichlet:0.3, where small values skew the labels and 100 "
                "is nearly iid",
            )
        return Partition(kind=kind, alpha=alpha)
    if kind == "shards" and colon:
        count = _number(value, int)
        if count is None or count < 1:
            raise OptionError(
                "the K of shards:K must be a whole number of at least 1",
                received=repr(value),
                mend="Write for example shards:2",
            )
        return Partition(kind=kind, shards_per_client=count)
    if kind == "by" and value:
        return Partition(kind=kind, column=value)
    raise unknown_choice("partition", text, KNOWN)


def _number(text: str, kind: type) -> float | int | None:
    try:
        return kind(text)
    except ValueError:
        return None


def check_num_clients(partition: Partition, num_clients: int | None) -> None:
    """Raises OptionError unless the number of clients goes with the partition."""
    if partition.kind == "by":
        if num_clients is not None:
            raise OptionError(
                f"by:{partition.column} must stand without a number of clients, since it makes a "
                "client of each value of the column",
                received=f"{num_clients} clients too",
                mend="Leave the number of clients out",
            )
    elif num_clients is None:
        raise OptionError(
            f"a partition '{partition.kind}' must have a number of clients",
            received="none",
            mend="Name it: tfdist shard SOURCE OUT --clients N, or clients=N in Python",
        )
    elif (
        isinstance(num_clients, bool)
        or not isinstance(num_clients, (int, np.integer))
        or num_clients < 1
    ):
        raise OptionError(
            "the number of clients must be a whole number of at least 1",
            received=repr(num_clients),
            mend="Choose 1 or more",
        )


def take_column(
    column: str, inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the values of a column that names the clients, [records], and the other inputs.

    An input that names the clients is none any more: a model would learn the names by heart. A
    label stays a label.

    Raises:
        DataError: no such column, no input beside it, or more than one value a record.
    """
    others = {name: values for name, values in inputs.items() if name != column}
    found = inputs.get(column, labels.get(column))
    if found is None or not others:
        known = [*(inputs if len(inputs) > 1 else ()), *labels]
        raise DataError(
            "the column of by:COLUMN must be one of several inputs, or a label",
            received=f"'{column}' of {', '.join([*inputs, *labels])}",
            mend=f"Choose one of {', '.join(known)}" if known else "Choose another partition",
        )
    values = np.asarray(found)
    if values.dtype.kind in "SU":  # Which would lose the NULs that a name ends with.
        values = np.array(found, object)
    if values.shape == (len(values), 1):
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(
            f"column '{column}' must have one value a record",
            received=f"shape {values.shape}",
            mend="Choose a column of one number or one text a record",
        )
    return values, others


def deal(
    partition: Partition,
    num_records: int,
    num_clients: int | None,
    *,
    seed: int,
    class_ids: np.ndarray | None = None,
    values: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns for each client the numbers of its records, int64 [n], n >= 1, in shuffled order.

    Every record is dealt exactly once. Clients are named "client-0" and so on, or, of "by", as the
    values of the column.

    Args:
        num_clients: None for "by".
        class_ids: int64 [num_records], for "dirichlet" and "shards".
        values: [num_records] numbers or text, for "by".

    Raises:
        OptionError: a number of clients that does not go with the partition.
        DataError: fewer records than clients, no class ids, or a value that is missing.
    """
    check_num_clients(partition, num_clients)
    if partition.needs_class_ids and class_ids is None:
        raise DataError(
            f"a partition '{partition.kind}' must have one label of class ids",
            received="no class ids",
            mend="Choose iid or by:COLUMN, or give one label of integers or text",
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_records)
    if partition.kind == "by":
        assert values is not None
        return _by(order, values, partition.column)
    assert num_clients is not None
    pieces = num_clients * (partition.shards_per_client or 1)
    if num_records < pieces:
        received = f"{num_records} records for {num_clients} clients"
        if pieces != num_clients:
            received += f" of {partition.shards_per_client} shards each"
        raise DataError(
            "every client, and each of its shards, must have at least one record",
            received=received,
            mend="Choose fewer clients",
        )
    if partition.kind == "iid":
        parts = np.array_split(order, num_clients)
    elif partition.kind == "shards":
        parts = _shards(order, class_ids, num_clients, partition.shards_per_client, rng)
    else:
        parts = _dirichlet(order, class_ids, num_clients, partition.alpha, rng)
    digits = len(str(num_clients - 1))
    return {f"client-{number:0{digits}d}": part for number, part in enumerate(parts)}


def _absent(column: str | None) -> DataError:
    return DataError(
        f"every value of column '{column}' must be present",
        received="an empty value",
        mend="Fill it in, or remove the record",
    )


def _by(order: np.ndarray, values: np.ndarray, column: str | None) -> dict[str, np.ndarray]:
    if values.dtype == object:
        kinds = {isinstance(value, (str, bytes)) for value in values}
        if any(value is None or value != value for value in values):
            raise _absent(column)
        if len(kinds) > 1:
            raise DataError(
                f"the values of column '{column}' must be all texts, or all numbers",
                received="both",
                mend="Write the numbers as texts",
            )
    names, numbers = np.unique(values, return_inverse=True)
    texts = [_text(name).strip() for name in names.tolist()]
    if "" in texts or (names.dtype.kind == "f" and np.isnan(names).any()):
        raise _absent(column)
    if len(set(texts)) != len(texts):
        raise DataError(
            f"the values of column '{column}' must differ in more than blanks",
            mend="Remove the blanks around them",
        )
    owners = numbers[order]
    by_owner = order[np.argsort(owners, kind="stable")]
    ends = np.cumsum(np.bincount(owners, minlength=len(names)))[:-1]
    return dict(zip(texts, np.split(by_owner, ends), strict=True))


def _text(name: Any) -> str:
    # A tf.data.Dataset gives text as bytes.
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _shards(
    order: np.ndarray,
    class_ids: np.ndarray,
    num_clients: int,
    shards_per_client: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Sorts by label, cuts into equal shards and deals these at random.

    McMahan et al. 2017, arXiv:1602.05629, section 3.
    """
    by_class = order[np.argsort(class_ids[order], kind="stable")]
    shards = np.array_split(by_class, num_clients * shards_per_client)
    dealt = rng.permutation(len(shards)).reshape(num_clients, shards_per_client)
    return [rng.permutation(np.concatenate([shards[n] for n in hand])) for hand in dealt]


def _dirichlet(
    order: np.ndarray,
    class_ids: np.ndarray,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Gives each client as many records, of classes in proportions from a Dirichlet distribution.

    A client's proportions are drawn from Dirichlet(alpha * classes * the proportions of all data):
    the concentration is ``alpha`` for each class when the data has equally many of each. Hsu et al.
    2019, arXiv:1909.06335, section 3. A class that has run out gives nothing more, so that who
    chooses late has fewer classes: clients are numbered in another order than they choose in.
    """
    _, classes, left = np.unique(class_ids, return_inverse=True, return_counts=True)
    by_class = order[np.argsort(classes[order], kind="stable")]
    taken = np.cumsum(left) - left  # where the next record of each class lies in by_class
    # Numbers beyond are no other distributions: one class a client, or all as in the data.
    concentration = np.clip(alpha, 1e-200, 1e200) * (len(left) * left / left.sum())
    sizes = [len(part) for part in np.array_split(order, num_clients)]
    parts: list[np.ndarray] = []
    for size in sizes:
        counts = _draw(size, left, concentration, rng)
        rows = [
            by_class[start : start + count]
            for start, count in zip(taken.tolist(), counts.tolist(), strict=True)
            if count
        ]
        parts.append(rng.permutation(np.concatenate(rows)))
        left = left - counts
        taken = taken + counts
    return [parts[number] for number in rng.permutation(num_clients)]


def _proportions(concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws from a Dirichlet distribution; NumPy's own does not end for tiny concentrations.

    They are gamma variates divided by their sum: here in logarithms, with G(a) = G(a + 1) U^(1/a).
    """
    logs = np.log(rng.standard_gamma(concentration + 1))
    logs += np.log(1 - rng.random(len(logs))) / concentration
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def _draw(
    size: int, left: np.ndarray, concentration: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Returns how many records of each class: ``size`` in all, at most ``left`` of each."""
    proportions = _proportions(concentration, rng)
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        remain = counts < left
        weights = np.where(remain, proportions, 0.0)
        if not weights.sum() > 1e-12:
            # All classes of the client have run out: it draws proportions of the others.
            proportions = np.zeros(len(left))
            proportions[remain] = _proportions(concentration[remain], rng)
            weights = proportions
        drawn = rng.multinomial(missing, weights / weights.sum())
        counts = np.minimum(counts + drawn, left)
    return counts
