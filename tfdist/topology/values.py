"""Reads single values of an environment; a wrong one is an error that names its variable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.errors import OptionError, read_json

_SHOWN_CHARACTERS = 200


def whole(environ: Mapping[str, str], name: str, *, at_least: int = 0) -> int:
    """Returns the whole number in a variable.

    Raises:
        OptionError: the variable is missing, or no number of at least ``at_least``.
    """
    text = environ.get(name, "").strip()
    if text.isascii() and text.isdigit() and int(text) >= at_least:
        return int(text)
    rule = f"{name} must be a whole number of at least {at_least}"
    raise wrong(rule, environ, name, "Set it so, or leave it out")


def parsed_json(environ: Mapping[str, str], name: str) -> Any:
    """Returns what a variable holds as JSON.

    Raises:
        OptionError: it is not JSON.
    """
    try:
        return read_json(environ[name])
    except ValueError as error:
        raise wrong(f"{name} must hold JSON", environ, name) from error


def wrong(rule: str, environ: Mapping[str, str], name: str, mend: str | None = None) -> OptionError:
    """Returns the error for a variable that breaks ``rule``."""
    text = environ.get(name)
    received = f"no {name}" if text is None else f"{name}={text[:_SHOWN_CHARACTERS]}"
    return OptionError(rule, received=received, mend=mend)
