"""How a command speaks: for people, for programs (``--json``), hardly at all (``--quiet``).

What is printed for people goes to ``sys.stdout``, by whatever part of tfdist. With ``--json`` that
is stderr, and the real standard output has one JSON object a line, or of an ``Answering`` verb its
answer alone; with ``--quiet`` it is nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from tfdist import __version__, errors
from tfdist.runs.results_text import LOG, told

_SECONDS_BETWEEN_PROGRESS = 0.5


class _Voice:
    def __init__(self) -> None:
        self.stdout = sys.stdout
        self.tells_events = False
        self.wants_answer = False
        self.is_quiet = False
        self.result: dict[str, Any] = {}
        self.parting = ""
        self.told_at: datetime | None = None


_voice = _Voice()


class Answering(click.Command):
    """A verb whose ``--json`` is one document, as given to ``answer``, and no events."""


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Encloses a command: afterwards ``sys.stdout`` is what it was."""
    global _voice
    _voice = _Voice()
    handlers, level = list(LOG.handlers), LOG.level
    before, errors.in_shell = errors.in_shell, True
    try:
        yield
    finally:
        errors.in_shell = before
        sys.stdout = _voice.stdout
        LOG.handlers = handlers
        LOG.setLevel(level)


def with_options(command: click.Command) -> click.Command:
    """Returns ``command`` with ``--json``, ``--quiet`` and ``-v``, of which it may have its own.

    Commands of a group have them, too.
    """
    for within in getattr(command, "commands", {}).values():
        with_options(within)
    own = {name for param in command.params for name in param.opts}
    told = "Print one JSON object a line for what happens, on stdout."
    if isinstance(command, Answering):
        told = "Print the answer as JSON, on stdout."
    for chosen, text, *names in (
        (_tell_programs, told, "--json"),
        (_be_quiet, "Print nothing but what is wrong.", "--quiet"),
        (_log_all, "Print all that happens on stderr, with times.", "-v", "--verbose"),
    ):
        if not own & set(names):
            command.params.append(_flag(names, text, chosen))
    return command


def _flag(names: list[str], help_text: str, chosen: Any) -> click.Option:
    def take(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            chosen(ctx)

    return click.Option(
        names, is_flag=True, is_eager=True, expose_value=False, callback=take, help=help_text
    )


def _tell_programs(ctx: click.Context) -> None:
    if not _voice.is_quiet:
        sys.stdout = sys.stderr
    _voice.wants_answer = isinstance(ctx.command, Answering)
    if not _voice.wants_answer:
        _voice.tells_events = True
        # What a user has called, as "train", or "aws upload".
        group = ctx.parent
        is_within = group is not None and group.parent is not None
        verb = f"{group.info_name} {ctx.info_name}" if is_within else str(ctx.info_name)
        tell("start", verb=verb, version=__version__)


def _be_quiet(ctx: click.Context) -> None:
    _voice.is_quiet = True
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _log_all(ctx: click.Context) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)


# What it says ------------------------------------------------------------------------------------


def is_quiet() -> bool:
    return _voice.is_quiet


def is_heard() -> bool:
    """Whether a program listens."""
    return _voice.tells_events


def tell(event: str, **fields: Any) -> None:
    """Writes one event for programs; nothing without ``--json``."""
    if _voice.tells_events:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        _send(json.dumps({"event": event, "time": time, **_plain(fields)}, allow_nan=False))


def _send(text: str) -> None:
    try:
        print(text, file=_voice.stdout, flush=True)
    except BrokenPipeError:  # Whoever listened has gone, as with `| head`.
        fall_silent()
        sys.exit(128 + signal.SIGPIPE)


def progress(what: str, done: float, total: float | None, unit: str) -> None:
    """Tells how far something is, not too often."""
    now = datetime.now(UTC)
    since = _voice.told_at and (now - _voice.told_at).total_seconds()
    if since is None or since >= _SECONDS_BETWEEN_PROGRESS:
        _voice.told_at = now
        tell("progress", what=what, done=done, total=total, unit=unit)


def result(**fields: Any) -> None:
    """Notes what the last event is to say of what came of it."""
    _voice.result |= fields


def answer(value: Any) -> None:
    """Prints the document of an ``Answering`` verb; nothing without ``--json``."""
    if _voice.wants_answer:
        _send(json.dumps(_plain(value), indent=2, allow_nan=False))


def take(rank: int, event: dict[str, Any]) -> None:
    """Tells what ranks say, and that they are started again; see ``runs.ranks.run``."""
    if event["event"] in ("said", "restart"):
        tell(**told(event, rank, epochs=1, steps=None))


def splits(manifest: Any) -> dict[str, dict[str, int]]:
    """Returns what there is of each split of a manifest."""
    return {
        name: {"records": split.records, "shards": len(split.shards), "bytes": split.bytes}
        for name, split in manifest.splits.items()
    }


def part_with(text: str) -> None:
    """Notes what is to be said when the command is ended from outside, as by Ctrl-C."""
    _voice.parting = text and f"; {text}"


def parting() -> str:
    return _voice.parting


def end(exit_code: int) -> None:
    """Tells the last event."""
    tell("end", exit_code=exit_code, **_voice.result)


def fall_silent() -> None:
    """Writes nothing more to standard output, which cannot be written to."""
    _voice.tells_events = False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _voice.stdout.fileno())


def _plain(value: Any) -> Any:
    """Returns ``value`` as JSON has it: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # NumPy's.
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
