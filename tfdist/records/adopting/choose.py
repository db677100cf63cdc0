"""Which keys of other people's records are inputs, labels and the weight.

Only what is clear is guessed: a dataset's own word, or one image, or one input, and one whole
number that is called a label.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist import errors
from tfdist.errors import DataError, spelt
from tfdist.records.adopting.describe import Described
from tfdist.records.adopting.scan import Scanned
from tfdist.records.adopting.tfds import Folder
from tfdist.records.writing.roles import (
    WEIGHT,
    Asked,
    Roles,
    check_apart,
    check_there,
    looks_like_label,
    named,
)

_NAMED = 30


class UnclearError(DataError):
    """Only the user can say what the features are.

    Attributes:
        described: all features that were found.
    """

    described: tuple[Described, ...] = ()


def choose(place: str, described: Mapping[str, Described], said: Asked, told: Folder) -> Roles:
    """Returns what is read.

    Raises:
        UnclearError: only the user can say.
        DataError: a name that is not there or has two roles, or cannot be what it is to be.
    """
    names, what = tuple(described), ("the records of " + place, "feature")
    inputs = named(*what, spelt("inputs", flag="--input"), said.inputs, names)
    labels = named(*what, spelt("labels", flag="--label"), said.label, names)
    check_there(*what, said.weight, names, spelt("weight"))
    check_apart(*what, inputs, labels, filter(None, [said.weight]))
    good = {name: item for name, item in described.items() if item.problem is None}
    taken = {*(inputs or ()), *(labels or ()), said.weight}
    free = {name: item for name, item in good.items() if name not in taken}
    weight, guesses = said.weight, []
    scalars = [name for name, item in free.items() if item.shape == ()]
    if weight is None and WEIGHT in scalars:
        weight = WEIGHT
    elif weight is None and inputs is None and labels is None and told.weight in scalars:
        weight = told.weight
        guesses.append(f"the dataset calls '{weight}' the weight")
    free.pop(weight, None)
    if labels is None and told.labels and told.labels[0] in free:
        labels = told.labels
        guesses.append("the dataset calls the label so")
    elif labels is None:
        like = [name for name, item in free.items() if item.is_whole and _is_called_label(name)]
        if len(like) == 1:
            labels = (like[0],)
            guesses.append("the label by its name")
        elif inputs is None or like:
            raise _unclear(
                place, described, f"{len(like) or 'no'} features that are called a label"
            )
        else:
            labels = ()
    free = {name: item for name, item in free.items() if name not in labels}
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
    return Roles(
        inputs=inputs,
        labels=labels,
        weight=weight,
        client=None,
        dropped=(),
        guess=" and ".join(reversed(guesses)) or None,
    )


def check_roles(
    place: str,
    chosen: Roles,
    described: Mapping[str, Described],
    scanned: Mapping[str, Scanned],
) -> None:
    """Raises DataError for a feature that cannot be what it is to be."""
    for name in chosen.used:
        if (problem := described[name].problem) is not None:
            if 0 < described[name].found.images < described[name].found.values:
                problem += _first_that_is_no_image(name, scanned)
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
                mend=f"Name another feature with {spelt('weight', 'NAME')}",
            )


def _first_that_is_no_image(name: str, scanned: Mapping[str, Scanned]) -> str:
    for file, item in scanned.items():
        found = item.found.get(name)
        if found is not None and found.no_image is not None:
            # Records without the feature are not counted.
            record = f", record {found.no_image}" if found.records == item.records else ""
            return f", the first in {file}{record}"
    return ""


def _is_called_label(name: str) -> bool:
    """Of a name with folders, such as image/class/label, the last part is what it is called."""
    return looks_like_label(name.rpartition("/")[2])


def _unclear(place: str, described: Mapping[str, Described], what: str) -> UnclearError:
    items = tuple(described.values())
    listed = "; ".join(
        f"{item.name} ({' '.join(filter(None, [item.kind, item.shown_shape]))}"
        f"{', but ' + item.problem if item.problem else ''})"
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
    if errors.in_shell:
        return f"tfdist adopt ... --input {inputs} --label {label}"
    return f"inputs={inputs!r}, labels={label!r}"
