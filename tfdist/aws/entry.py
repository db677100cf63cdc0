"""How the scripts that SageMaker runs begin and end."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tfdist.errors import OptionError, TfdistError, unknown_choice

# What DescribeTrainingJob gives of the file is no longer.
_FAILURE_CHARACTERS = 1024


class Parser(argparse.ArgumentParser):
    """Arguments as SageMaker passes hyperparameters; a mistake is a TfdistError."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise OptionError(
            "hyperparameters must be those that the script knows",
            received=f"an error: {message}",
            mend="Correct that value in the configuration",
        )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Returns the values of all arguments.

        Raises:
            OptionError: an unknown one (the message lists the known ones), or a wrong value.
        """
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [action.dest.replace("_", "-") for action in self._actions[1:]]
            raise unknown_choice("hyperparameter", unknown[0].lstrip("-"), known)
        return values


def run(body: Callable[[list[str]], None], output_dir: Path | None) -> None:
    """Runs the body of a script with the command line's arguments; ends the process on an error.

    Args:
        output_dir: where the file ``failure`` goes, whose text SageMaker shows; None for none.
    """
    try:
        body(sys.argv[1:])
    except Exception as error:
        reason = str(error)
        if not isinstance(error, TfdistError):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        text = " ".join(reason.split())
        print(f"tfdist: Error: {text}", file=sys.stderr, flush=True)
        if output_dir is not None:
            # The first rank that fails knows the cause; those that follow see its end.
            with contextlib.suppress(OSError), open(output_dir / "failure", "x") as file:
                file.write(text[:_FAILURE_CHARACTERS])
        sys.stdout.flush()
        os._exit(1)  # At once: other ranks may never come to a common end.
