"""Checks requests against botocore's own service model: more than moto does, and without AWS.

Enums, patterns, lengths and ranges are in the model, and neither botocore's validator nor moto
looks at them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\d",
    r"\p{M}": "\u0300-\u036f",
    r"\p{Z}": r"\s",
    r"\p{P}": re.escape("!\"#%&'()*,-./:;?@[\\]_{}"),
    r"\p{S}": re.escape("$+<=>^`|~"),
    r"\p{Alnum}": "A-Za-z0-9",
}


class _AtRunTime:
    """A value that only the running pipeline knows."""

    def __repr__(self) -> str:
        return "a value known at run time"


AT_RUN_TIME = _AtRunTime()


@dataclass(frozen=True)
class Problem:
    """One thing that AWS would refuse.

    Attributes:
        place: of the value, such as "Train.ResourceConfig.InstanceType".
        rule: what must hold there, such as "must be true or false".
        received: what was found.
    """

    place: str
    rule: str
    received: str

    def __str__(self) -> str:
        return f"{self.place} {self.rule}, but found {self.received}."


@functools.cache
def service_model(service: str = "sagemaker") -> Any:
    """Returns botocore's model of an API of AWS's; reads files of botocore's alone."""
    import botocore.session

    return botocore.session.Session().get_service_model(service)


def check_request(
    operation: str, request: Any, place: str, service: str = "sagemaker"
) -> list[Problem]:
    """Returns what is wrong with a request; empty when it is as the service model says.

    Args:
        operation: such as "CreateTrainingJob".
        request: its parameters; ``AT_RUN_TIME`` stands for a value that is not known yet.
        place: name of the request for the problems.
    """
    shape = service_model(service).operation_model(operation).input_shape
    return list(_check(request, shape, place))


def _check(value: Any, shape: Any, place: str) -> Iterator[Problem]:
    if value is AT_RUN_TIME or shape.type_name not in _KINDS:
        return
    kind, name, within = _KINDS[shape.type_name]
    # Python's True is a whole number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        yield Problem(place, f"must be {name}", _shown(value))
    else:
        yield from within(value, shape, place)


def _structure(value: Any, shape: Any, place: str) -> Iterator[Problem]:
    for name in shape.required_members:
        if name not in value:
            yield Problem(place, f"must have {name}", "none")
    for name, item in value.items():
        if name in shape.members:
            yield from _check(item, shape.members[name], f"{place}.{name}")
        else:
            known = ", ".join(shape.members)
            yield Problem(place, f"must have only {known}", name)


def _list(value: Any, shape: Any, place: str) -> Iterator[Problem]:
    yield from _within(len(value), shape, place, "items")
    for number, item in enumerate(value):
        yield from _check(item, shape.member, f"{place}[{number}]")


def _map(value: Any, shape: Any, place: str) -> Iterator[Problem]:
    yield from _within(len(value), shape, place, "entries")
    for key, item in value.items():
        yield from _check(key, shape.key, f"{place} key '{key}'")
        yield from _check(item, shape.value, f"{place}['{key}']")


def _string(value: Any, shape: Any, place: str) -> Iterator[Problem]:
    if shape.enum and value not in shape.enum:
        yield Problem(place, f"must be one of {_nearest(value, shape.enum)}", _shown(value))
    yield from _within(len(value), shape, place, "characters")
    pattern = _compiled(shape.metadata.get("pattern"))
    if pattern is not None and not pattern.fullmatch(value):
        yield Problem(place, f"must match {shape.metadata['pattern']}", _shown(value))


def _within(size: float, shape: Any, place: str, unit: str = "") -> Iterator[Problem]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    received = f"{size:g} {unit}".strip()
    must = "must have" if unit else "must be"
    if least is not None and size < float(least):
        yield Problem(place, f"{must} at least {least} {unit}".strip(), received)
    if most is not None and size > float(most):
        yield Problem(place, f"{must} at most {most} {unit}".strip(), received)


#: Type of a shape -> Python's, what people call it, and what else is wrong with a value of it.
_KINDS: dict[str, tuple[Any, str, Callable[..., Iterable[Problem]]]] = {
    "structure": (dict, "an object", _structure),
    "list": (list, "a list", _list),
    "map": (dict, "a map", _map),
    "string": (str, "a text", _string),
    "boolean": (bool, "true or false", lambda *_: ()),
    **dict.fromkeys(("integer", "long"), (int, "a whole number", _within)),
    **dict.fromkeys(("float", "double"), ((int, float), "a number", _within)),
}


@functools.cache
def _compiled(pattern: str | None) -> re.Pattern | None:
    """Returns the pattern for Python's re; None for the few that it cannot express."""
    if pattern is None:
        return None
    for name, equal in _CLASSES.items():
        pattern = pattern.replace(name, equal)
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _nearest(value: str, known: list[str]) -> str:
    import difflib

    if len(known) <= 8:
        return ", ".join(known)
    near = difflib.get_close_matches(value, known, n=5, cutoff=0.0)
    return f"{', '.join(near)}, and {len(known) - len(near)} more"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
