"""How long ranks wait for each other: what the command that has started them was asked for."""

from __future__ import annotations

from collections.abc import Mapping

# As long as those of the commands, at least.
_DEFAULTS_S = {"start_timeout_s": 120.0, "stall_timeout_s": 300.0}
# The supervisor, who sees all ranks, names more: a rank gives up later, by at least so much.
_LATER_S = 60.0


def told(start_timeout_s: float, stall_timeout_s: float | None) -> dict[str, str]:
    """Returns the variables by which the ranks of a job hear of its deadlines.

    Args:
        stall_timeout_s: None where nobody watches the ranks; they then keep to their own.
    """
    found = {"start_timeout_s": start_timeout_s}
    if stall_timeout_s is not None:
        found["stall_timeout_s"] = stall_timeout_s + max(stall_timeout_s, _LATER_S)
    return {_variable(option): repr(seconds) for option, seconds in found.items()}


def heard(environ: Mapping[str, str], option: str) -> float:
    """Returns the seconds of "start_timeout_s" or "stall_timeout_s" that a rank was told."""
    return float(environ.get(_variable(option), _DEFAULTS_S[option]))


def _variable(option: str) -> str:
    return f"TFDIST_{option.upper()}"
