"""An error in the user's own code, told as briefly as it can be: his frames, and one line.

Most of a traceback through TensorFlow and Keras is theirs, and autograph writes the user's frames
into the message instead of the traceback. No TensorFlow is imported here.
"""

from __future__ import annotations

import json
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_MOST_FRAMES = 8
_MOST_CHARACTERS = 500
# Of an event, which must stay one write into a pipe: see ``tfdist.launch.events``.
_MOST_BYTES = 3500
_TFDIST = Path(__file__).resolve().parents[1]
_OTHERS = (
    _TFDIST,
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
)
_HEAD = "Traceback of your own code, most recent call last:"
_GENERATED = "__autograph_generated_file"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in ([^\s*]+)[ \t*]*\n(?:[ \t]+(.+))?', re.M)
_NODE = re.compile(r"^Node: '.*'\n(.*?)(?:^\s*\[\[|\Z)", re.M | re.S)
_OPERATION = re.compile(r"\[\[\{\{node .*|\[Op:\w+\]")
_ARGUMENTS = re.compile(r"\n\s*Call arguments received by .*", re.S)
# What the loss of another process is to TensorFlow; no mistake, and a restart may mend it.
_OF_THE_ENGINE = {
    *("AbortedError", "CancelledError", "DeadlineExceededError", "InternalError"),
    *("ResourceExhaustedError", "UnavailableError", "HorovodInternalError"),
}
# By which Keras and TensorFlow refuse what does not fit together, such as a loss and its labels.
_REFUSALS = {"ValueError", "TypeError", "InvalidArgumentError"}


def explained(error: Exception) -> dict | None:
    """Returns the event that tells of a mistake in the user's code; None when it is not his.

    Of the event: "text" is one line; "traceback" the lines of his own frames, none where Keras or
    TensorFlow refused what he gave.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        shown = [line.rstrip() for line in traceback.format_exception_only(error)]
        return _event(shown[:-1], shown[-1])
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _OF_THE_ENGINE:
        return None
    for cause in _chain(error):
        if frames := list(_frames(cause)):
            return _event([_HEAD, *frames], _line(cause))
    # What our own code raises is our own mistake, and is shown whole.
    if names & _REFUSALS and not is_ours(error):
        return _event([], _line(error))
    return None


def _event(lines: list[str], text: str) -> dict:
    lines = [line[:200] for line in lines]
    event = {"event": "mistake", "text": text, "traceback": lines}
    while len(json.dumps(event)) > _MOST_BYTES and lines:
        lines.pop()
    while len(json.dumps(event)) > _MOST_BYTES:
        event["text"] = event["text"][: len(event["text"]) // 2]
    return event


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _frames(error: BaseException) -> Iterator[str]:
    """Yields the lines of the user's frames: those of the traceback, then those in the message."""
    found: list[tuple[str, int, str, str]] = [
        (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    found += [
        (match[1], int(match[2]), match[3], match[4] or "") for match in _FRAME.finditer(str(error))
    ]
    own = dict.fromkeys(frame for frame in found if _is_users(frame[0]))
    for file, line, name, code in list(own)[-_MOST_FRAMES:]:
        yield f'  File "{file}", line {line}, in {name}'
        if code:
            yield f"    {code.strip()}"


def _is_users(file: str) -> bool:
    if file.startswith("<") or _GENERATED in file:
        return False
    return not any(map(Path(file).resolve().is_relative_to, _OTHERS))


def is_ours(error: BaseException) -> bool:
    """Whether tfdist itself has raised ``error``."""
    # Keras takes its own frames out of a traceback; in the message of autograph they stand.
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files += [match[1] for match in _FRAME.finditer(str(error))]
    return bool(files) and Path(files[-1]).resolve().is_relative_to(_TFDIST)


def _line(error: BaseException) -> str:
    """Returns the kind and the message of an error, without what Keras and autograph add to it."""
    text = str(error)
    if (node := _NODE.search(text)) is not None:
        text = node[1]
    text = _ARGUMENTS.sub("", text)
    frames = list(_FRAME.finditer(text))
    if frames:
        text = text[frames[-1].end() :].split("\n\nTraceback ")[0] or text[: frames[0].start()]
    text = " ".join(_OPERATION.sub("", text).split())[:_MOST_CHARACTERS]
    kind = type(error).__name__
    return text if re.match(rf"{kind}\b|\w+(?:Error|Exception): ", text) else f"{kind}: {text}"
