"""Every error that a user of tfdist can meet.

Each says what must hold, what was found instead, and the mend, in one form and on one line:
"A must be B, but found C. Do D." The command line prints it as it is and exits with code 2. A bug
of tfdist's own is an ``assert``, never one of these.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

# Characters of each of the three parts of a message.
_LONGEST_PART = 1200
# Of what an error of a library says.
_LONGEST_REASON = 300
#: Whether a command runs in this process, so that messages have the words of the shell.
in_shell = False


class TfdistError(Exception):
    """A mistake that the user can mend.

    Args:
        rule: what must hold, as a sentence with "must" and without its full stop.
        received: what was found instead, such as could follow "but found".
        mend: what to do about it, as a sentence without its full stop.
    """

    # AutoGraph raises this class unchanged from within traced functions, instead of one of its own.
    ag_pass_through = True

    def __init__(self, rule: str, *, received: object = None, mend: str | None = None):
        self.rule = rule
        self.received = received
        self.mend = mend
        parts = [rule if received is None else f"{rule}, but found {received}"]
        if mend is not None:
            parts.append(mend)
        super().__init__(" ".join(f"{_on_one_line(part).rstrip('.')}." for part in parts))


class OptionError(TfdistError):
    """An option, a name or a combination of them that does not exist or cannot hold."""


class DataError(TfdistError):
    """Data that cannot be written, read or trained on as it is."""


class CorruptShardError(DataError):
    """Bytes of a shard that are not what was written. The message names file, record and offset."""


class ModelError(TfdistError):
    """A model that cannot be built or distributed as it is."""


class EngineMissingError(TfdistError):
    """An engine, a program or a package that is needed, and not installed."""


class LaunchError(TfdistError):
    """Processes that could not be started, or that did not end as they should."""


class SilentError(LaunchError):
    """A job that has told nothing for too long."""


class RankFailedError(LaunchError):
    """A rank that ended as it should not, and its job with it.

    Attributes:
        exit_code: that of the rank which failed first.
    """

    def __init__(self, reason: str, exit_code: int):
        super().__init__("every rank must reach its end", received=reason)
        self.exit_code = exit_code


class CheckpointError(TfdistError):
    """A checkpoint that is missing, damaged, or of another model."""


class WriteError(TfdistError):
    """A file that could not be written whole, as on a full disk. Nothing half-written is left."""


class InUseError(TfdistError):
    """A folder that another training writes in."""


class DivergedError(TfdistError):
    """A training whose loss is no finite number any more."""


class ExportError(TfdistError):
    """A model that cannot be written for another runtime, or is not the same there."""


def _on_one_line(text: str) -> str:
    """What a library, a damaged file or a file's name says may be anything; a terminal shows it."""
    line = " ".join(part.strip() for part in text.splitlines())
    shown = "".join(letter if letter.isprintable() else "?" for letter in line)
    return shown if len(shown) <= _LONGEST_PART else f"{shown[:_LONGEST_PART]}…"


class KeyTwiceError(ValueError):
    """A key that an object of JSON has twice, of which Python would take the last."""


def read_json(text: str | bytes, *, keys_once: bool = False) -> Any:
    """Returns what a text that others have written holds as JSON.

    Args:
        keys_once: whether to refuse an object that has a key twice.

    Raises:
        ValueError: it is not JSON, or nested without end. KeyTwiceError: see ``keys_once``.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_each_key_once if keys_once else None)
    except RecursionError:
        raise ValueError("too many levels") from None


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyTwiceError(f"'{next(name for name in names if names.count(name) > 1)}' twice")
    return found


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or what it is where it says nothing."""
    lines = (line for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Returns what an error says in a line that is cut, or what it is where it says nothing."""
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


def cannot_write(path: object, error: BaseException) -> WriteError:
    """The error for a file that the system did not let us write."""
    reason = getattr(error, "strerror", None)
    if reason is None:
        # TensorFlow writes "{{node ...}} temporary name; reason [Op:...]".
        reason = first_line(error).rpartition("; ")[2].partition(" [Op:")[0]
    return WriteError(
        f"{path} must be written whole",
        received=reason,
        mend="Make room, then go on: what was written before is untouched",
    )


def package_missing(package: str, purpose: str, extra: str, error: object) -> EngineMissingError:
    """The error for a package that only an extra of tfdist installs.

    Args:
        purpose: what it is needed for, such as could follow "for".
        error: of the import.
    """
    return EngineMissingError(
        f"{package} must be installed for {purpose}",
        received=f"an error: {error}",
        mend=f"Run pip install 'tfdist[{extra}]'",
    )


def extra_module(name: str, package: str, purpose: str, extra: str) -> Any:
    """Returns a module of a package that only an extra of tfdist installs.

    Args:
        name: of the module; the others as ``package_missing`` takes them.

    Raises:
        EngineMissingError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise package_missing(package, purpose, extra, error) from error


def unknown_choice(what: str, received: object, known: list[str] | tuple[str, ...]) -> OptionError:
    """The error for a name outside a closed list, with the nearest name and all of them."""
    import difflib

    near = difflib.get_close_matches(str(received), known, n=1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    choose = f"Choose one of {', '.join(known)}" if known else "Leave it out"
    return OptionError(
        f"the {what} must be a known one",
        received=repr(received),
        mend=f"{hint}{choose}",
    )


def spelt(option: str, value: object = None, *, flag: str | None = None) -> str:
    """Returns an option as its reader gives it: ``--drop age`` in the shell, else ``drop='age'``.

    Args:
        option: as a program calls it.
        value: what it is given; None: a value that is not said.
        flag: what the shell says, value and all, where these are other words.
    """
    if not in_shell:
        return f"{option}=" if value is None else f"{option}={value!r}"
    name = f"--{'no-' * (value is False)}{option.replace('_', '-')}"
    return flag or (name if value is None or isinstance(value, bool) else f"{name} {value}")


def notice(text: str) -> None:
    """Tells the user on standard error what he should know, though nothing fails."""
    print(f"tfdist: {text}", file=sys.stderr, flush=True)
