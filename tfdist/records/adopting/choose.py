"""Which keys of other people's records are inputs, labels and the weight.

Only what is clear is guessed: a dataset's own word, or one image, or one input, and one whole
number that is called a label.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.errors import DataError, spelt
from tfdist.records.adopting.describe import Described
from tfdist.records.adopting.tfds import Folder
from tfdist.records.writing.roles import WEIGHT, looks_like_label

_NAMED = 30


class UnclearError(DataError):
    """Only the user can say what the features are.

    Attributes:
        described: all features that were found.
    """

    described: tuple[Described, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the user says; None where nothing is said."""

    inputs: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    weight: str | None = None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The keys that are read.

    Attributes:
        guess: how they were found, where the user did not say; else None.
    """

    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None
    guess: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.labels, *((self.weight,) if self.weight else ()))


def named(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the names of "a,b", of a list, or of a list of such texts."""
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip() for part in parts for name in part.split(",") if name.strip())


def check_apart(said: Said) -> None:
    """Raises DataError when a name has two roles."""
    weight = (said.weight,) if said.weight else ()
    names = [*(said.inputs or ()), *(said.labels or ()), *weight]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError("each feature must have one role", received=f"two for {', '.join(twice)}")


def choose(place: str, described: Mapping[str, Described], said: Said, told: Folder) -> Chosen:
    """Returns what is read.

    Raises:
        UnclearError: only the user can say.
        DataError: a name that is not there, or cannot be what it is to be.
    """
    for name in (*(said.inputs or ()), *(said.labels or ()), said.weight):
        if name is not None and name not in described:
            raise _missing(place, name, described)
    good = {name: item for name, item in described.items() if item.problem is None}
    taken = {*(said.inputs or ()), *(said.labels or ()), said.weight}
    free = {name: item for name, item in good.items() if name not in taken}
    weight = said.weight
    if weight is None and WEIGHT in free and free[WEIGHT].shape == ():
        weight = WEIGHT
        free.pop(WEIGHT)
    guesses = []
    labels = said.labels
    if labels is None and told.labels and told.labels[0] in free:
        labels = told.labels
        guesses.append("the dataset calls the label so")
    elif labels is None:
        like = [name for name, item in free.items() if item.is_whole and _is_called_label(name)]
        if len(like) == 1:
            labels = (like[0],)
            guesses.append("the label by its name")
        elif said.inputs is None or like:
            raise _unclear(
                place, described, f"{len(like) or 'no'} features that are called a label"
            )
        else:
            labels = ()
    free = {name: item for name, item in free.items() if name not in labels}
    inputs = said.inputs
    if inputs is None and told.inputs and told.inputs[0] in free:
        inputs = told.inputs
        guesses.append("the dataset calls the input so")
    elif inputs is None:
        images = [name for name, item in free.items() if item.is_image]
        if len(images) == 1:
            inputs = (images[0],)
            guesses.append("the input is the only image")
        elif not images and len(free) == 1:
            inputs = tuple(free)
            guesses.append("the input is the only other feature")
        else:
            several = f"{len(images)} images" if images else f"{len(free)} features for the input"
            raise _unclear(place, described, several)
    return Chosen(
        inputs=inputs,
        labels=labels,
        weight=weight,
        guess=" and ".join(reversed(guesses)) or None,
    )


def check_roles(place: str, chosen: Chosen, described: Mapping[str, Described]) -> None:
    """Raises DataError for a feature that cannot be what it is to be."""
    for name in chosen.names:
        if name not in described:
            raise _missing(place, name, described)
        if (problem := described[name].problem) is not None:
            raise DataError(
                f"'{name}' of {place} must be a feature that can be read",
                received=f"one with {problem}",
                mend=f"Choose others with {spelt('inputs', flag='--input')} and "
                f"{spelt('labels', flag='--label')}",
            )
    for name in chosen.labels:
        item = described[name]
        if item.shape == (None,) and item.found.most == 1:
            raise DataError(
                f"every record of {place} must have the label '{name}'",
                received="records without it",
                mend="Take the files without those records, or name another label",
            )
    if chosen.weight is not None:
        item = described[chosen.weight]
        if item.shape != () or item.encoding not in ("int64", "float"):
            raise DataError(
                "a sample weight must be one number in every record",
                received=f"'{item.name}', {item.kind} {item.shown_shape}",
            )


def _is_called_label(name: str) -> bool:
    """Of a name with folders, such as image/class/label, the last part is what it is called."""
    return looks_like_label(name.rpartition("/")[2])


def _unclear(place: str, described: Mapping[str, Described], what: str) -> UnclearError:
    items = tuple(described.values())
    listed = "; ".join(
        f"{item.name} ({' '.join(filter(None, [item.kind, item.shown_shape]))})"
        for item in items[:_NAMED]
    )
    error = UnclearError(
        f"which features of {place} are inputs and labels must be said where it is not clear",
        received=f"{what} among {len(items)}: {listed}",
        mend=f"Say it: {_command(described)}",
    )
    error.described = items
    return error


def _command(described: Mapping[str, Described]) -> str:
    good = [item for item in described.values() if item.problem is None]
    like = [item.name for item in good if _is_called_label(item.name)]
    whole = [item.name for item in good if item.is_whole]
    label = next(iter([*like, *whole]), "NAME")
    others = [item for item in good if item.name != label]
    # Text is more often an identity than an input.
    others.sort(key=lambda item: (not item.is_image, item.encoding == "bytes", item.is_whole))
    inputs = others[0].name if others else "NAME"
    return f"tfdist adopt ... --input {inputs} --label {label}"


def _missing(place: str, name: str, described: Mapping[str, Described]) -> DataError:
    near = difflib.get_close_matches(name, list(described), n=1)
    return DataError(
        f"the records of {place} must have the feature '{name}'",
        received=f"features {', '.join(described) or 'none'}",
        mend=f"Write '{near[0]}', if that is what you mean" if near else None,
    )
