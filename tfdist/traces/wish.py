"""Which steps a training is asked to trace, and where: ``--profile``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tfdist.errors import OptionError

_STEPS = re.compile(r"(?:(?P<folder>.+),)?steps=(?P<first>\d{1,9}):(?P<last>\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Wish:
    """What ``--profile`` asks for.

    Attributes:
        folder: where traces go; None is the training's own folder.
        steps: first and last, counted from 1, of an epoch, both traced on every rank; None: five
            steps of rank 0, wherever the first epoch has them.
    """

    folder: str | None
    steps: tuple[int, int] | None

    def __str__(self) -> str:
        steps = self.steps and f"steps={self.steps[0]}:{self.steps[1]}"
        return ",".join(part for part in (self.folder, steps) if part)


def parsed(profile: str) -> Wish:
    """Returns what "DIR", "steps=A:B" or "DIR,steps=A:B" asks for.

    Raises:
        OptionError: steps that cannot be.
    """
    match = _STEPS.fullmatch(profile)
    if match is None and "steps=" not in profile:
        return Wish(profile, None)
    steps = match and (int(match["first"]), int(match["last"]))
    if not steps or not 1 <= steps[0] <= steps[1]:
        raise OptionError(
            "profile must be a folder, or steps as first:last, counted from 1, or both",
            received=repr(profile),
            mend="Write steps=10:20, or DIR,steps=10:20",
        )
    return Wish(match["folder"], steps)


def check_steps(wish: Wish, steps: int) -> None:
    """Checks what is asked for. Raises OptionError: an epoch of so many steps has not those."""
    if wish.steps is not None and wish.steps[1] > steps:
        raise OptionError(
            f"profile must name steps of an epoch, which has {steps}",
            received=f"steps={wish.steps[0]}:{wish.steps[1]}",
            mend=f"Choose a last step of at most {steps}",
        )
