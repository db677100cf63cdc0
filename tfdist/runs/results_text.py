"""What programs are told of a training: events with names and fields that stay; see docs/logs.md.

Ranks tell their supervisor more, and in words of their own: those may change.
"""

from __future__ import annotations

import logging
from typing import Any

#: Users configure it as any logger of Python's; by itself it shows nothing.
LOG = logging.getLogger("tfdist")
LOG.addHandler(logging.NullHandler())

_LEVELS = {
    **dict.fromkeys(("step", "progress", "resources"), logging.DEBUG),
    "warning": logging.WARNING,
}
_OF_TIME = ("epoch", "seconds", "samples_per_s", "data_wait")


def told(event: dict[str, Any], rank: int, epochs: int, steps: int | None) -> dict[str, Any] | None:
    """Returns the event for programs that an event of a rank is; None when it is none.

    Args:
        epochs: of the whole training.
        steps: of an epoch; None before that is known.
    """
    kind = event["event"]
    if kind == "said":
        text = event["text"].removeprefix("tfdist: ")
        is_warning = text.lower().startswith("warning: ")
        text = text[len("warning: ") :] if is_warning else text
        return {"event": "warning" if is_warning else "message", "rank": rank, "text": text}
    if kind == "restart":
        return {"event": kind, "number": event["number"], "reason": event["reason"]}
    if kind == "resources":
        return {"event": kind, "rank": rank, **event}
    if rank != 0:
        return None
    if kind == "data":
        return {"event": "ready", "epochs": epochs, "steps_per_epoch": event["steps"]}
    if kind == "step":
        phase = "validation" if event["step"] is None else "training"
        more = {"samples_per_s": event["samples_per_s"]} if "samples_per_s" in event else {}
        return {
            "event": kind,
            "epoch": event["epoch"] + 1,
            "epochs": epochs,
            "phase": phase,
            "step": event["step"],
            "steps_per_epoch": steps,
            **more,
        }
    if kind in ("epoch", "evaluated"):
        row, names = event["row"], _OF_TIME if kind == "epoch" else ("epoch", "step")
        about = {"epochs": epochs} if kind == "epoch" else {"path": event["path"]}
        about |= {name: row[name] for name in names if name in row}
        metrics = {name: value for name, value in row.items() if name not in names}
        return {"event": kind, **about, "metrics": metrics}
    if kind in ("checkpoint", "best"):
        return {key: value for key, value in event.items() if key != "long"}
    return None


def log(event: dict[str, Any]) -> None:
    """Tells Python's logging, under the name "tfdist"."""
    level = _LEVELS.get(event["event"], logging.INFO)
    if LOG.isEnabledFor(level):
        LOG.log(level, described(event), extra={"tfdist_event": event})


def described(event: dict[str, Any]) -> str:
    """Returns an event as one line for people."""
    if event["event"] in ("warning", "message"):
        return event["text"]
    fields = {key: value for key, value in event.items() if key not in ("event", "metrics")}
    fields |= event.get("metrics", {})
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
    return " ".join([event["event"], *shown])
