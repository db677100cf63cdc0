"""``class_weight``: what each class counts in the loss, as a command or a program gives it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError, OptionError, read_json

if TYPE_CHECKING:
    from tfdist.records.format.manifest import Manifest

BALANCED = "balanced"


def class_weights(given: str | Mapping[Any, Any], split: str) -> dict[str, float]:
    """Returns the weight of each class that has one: the class's number as text -> weight.

    Args:
        given: "balanced": records / (classes * records of the class), so that each class counts
            alike; "0=1.0,1=2.0"; a JSON file of such an object; or the mapping itself. Classes
            are told by number, or by name where the data has names.
        split: the shards that are trained on.

    Raises:
        OptionError: weights that cannot be read, or of classes that there are not.
        DataError: the data does not say which classes its records have.
    """
    return of_manifest(given, *_opened(split))


def readable_again(given: str | Mapping[Any, Any], split: str) -> dict[str, float]:
    """Returns the same by what a command reads as these classes.

    That is their names, since a number may be the name of another class; but for names that have a
    comma or an equals sign.

    Raises:
        OptionError: as ``class_weights``, and where neither names nor numbers tell the classes.
    """
    manifest, split_name = _opened(split)
    names = dict(enumerate(_names(manifest)))
    weights = of_manifest(given, manifest, split_name)
    found = {_readable(names.get(int(n)), n): weight for n, weight in weights.items()}
    again = None
    with contextlib.suppress(OptionError):
        again = of_manifest(found, manifest, split_name)
    if again != weights:
        raise OptionError(
            "class_weight must be of classes that can be told by name or number, where it is "
            "written for a command to read",
            received=f"numbers that are names of others beside names with a comma or =: "
            f"{', '.join(names.values())}",
            mend="Write the shards with other names of classes, or leave class_weight out",
        )
    return found


def without_file(given: str | Mapping[Any, Any]) -> str | Mapping[Any, Any]:
    """Returns the same for a machine that has no such file.

    Raises:
        OptionError: weights that cannot be read.
    """
    if given == BALANCED:
        return given
    pairs = _pairs(given)
    for key, value in pairs:
        _weight(key, value)
    return dict(pairs) if isinstance(given, str) and _is_file(given) else given


def _opened(split: str) -> tuple[Manifest, str]:
    from tfdist.records.buckets.cache import local_shards
    from tfdist.records.format.manifest import load_manifest

    place = local_shards(split)
    return load_manifest(place.parent), place.name


def _readable(name: str | None, number: str) -> str:
    is_plain = name is not None and name == name.strip() and not set(",=") & set(name)
    return name if is_plain else number


def _names(manifest: Manifest) -> tuple[str, ...]:
    features = manifest.schema.features
    return next((f.classes for f in features if f.role == "label" and f.classes), None) or ()


def of_manifest(given: str | Mapping[Any, Any], manifest: Manifest, split: str) -> dict[str, float]:
    """Returns the same from a manifest that is not beside the shards; see ``class_weights``."""
    counts = manifest.splits[split].class_counts
    if given == BALANCED:
        if not counts:
            raise DataError(
                "class_weight balanced must have data whose records have a class each",
                received=f"no numbers of classes in the manifest for '{split}'",
                mend="Give the weights: 0=1.0,1=2.0",
            )
        records = sum(counts.values())
        return {str(c): records / (len(counts) * n) for c, n in sorted(counts.items())}
    names = _names(manifest)
    found: dict[int, float] = {}
    for key, value in _pairs(given):
        number = _class(key, names)
        if number in found:
            raise _unreadable(f"class {key} twice")
        found[number] = _weight(key, value)
    unknown = [c for c in found if counts and c not in counts and c >= (len(names) or max(counts))]
    if unknown or not found:
        known = f"0 to {(len(names) or max(counts) + 1) - 1}" if counts else "whole numbers"
        raise OptionError(
            f"class_weight must name classes of the data, {known}",
            received=", ".join(map(str, unknown)) or "none",
            mend="Name these alone, as in 0=1.0,1=2.0",
        )
    lacking = sorted(set(counts or ()) - set(found))
    nameless = [names[c] if c < len(names) else str(c) for c in lacking]
    if nameless:
        raise OptionError(
            "class_weight must have a weight for each class of the data",
            received=f"none for {', '.join(nameless[:10])}",
            mend=f"Add {nameless[0]}=1 for a class that counts as without",
        )
    return {str(number): weight for number, weight in sorted(found.items())}


def _is_file(given: str) -> bool:
    with contextlib.suppress(OSError):  # A text that is too long for a name is none.
        return Path(given).is_file()
    return False


def _pairs(given: str | Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    if not isinstance(given, str):
        raise _unreadable(given)
    if "=" in given and not _is_file(given):
        parts = [part.partition("=") for part in given.split(",")]
        return [(key.strip(), value) for key, _, value in parts]
    try:
        read = read_json(Path(given).read_text(), keys_once=True)
    except (OSError, ValueError) as error:
        raise _unreadable(f"{given!r}, of which reading says: {error}") from None
    if not isinstance(read, dict):
        raise _unreadable(f"{given!r}, a file of something else")
    return list(read.items())


def _class(key: Any, names: tuple[str, ...]) -> int:
    if str(key) in names:
        return names.index(str(key))
    try:
        number = int(str(key))
    except ValueError:
        number = -1
    if number < 0:
        raise OptionError(
            "class_weight must name classes of the data, by number or by name",
            received=repr(key),
            mend=f"Choose of {', '.join(names[:10])}" if names else "Write whole numbers",
        )
    return number


def _weight(key: Any, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise OptionError(
            f"the class_weight of {key} must be a number of at least 0",
            received=repr(value),
            mend="Choose 0 or more, such as 1.0",
        )
    return weight


def _unreadable(received: object) -> OptionError:
    return OptionError(
        "class_weight must be balanced, CLASS=WEIGHT,..., or a JSON file of such an object",
        received=received,
        mend="Write 0=1.0,1=2.0",
    )
