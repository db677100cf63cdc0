"""The ``tfdist`` command itself: finds the verb, turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys

import click

from tfdist import __version__
from tfdist.cli import voice
from tfdist.compat import check_versions
from tfdist.errors import (
    DivergedError,
    OptionError,
    RankFailedError,
    TfdistError,
    cannot_write,
    unknown_choice,
)

EXIT_USER_ERROR = 2
EXIT_DIVERGED = 1
_EXIT_INTERRUPTED = 128 + signal.SIGINT
_EXIT_BROKEN = 1  # With a traceback.
_EXIT_TERMINATED = 128 + signal.SIGTERM
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# verb, which a module is called as, -> one line for --help: the listing imports no verb.
_VERBS = {
    "init": "Write a small project that trains as it stands.",
    "shard": "Write data as TFRecord shards with a manifest.",
    "adopt": "Make shards of other people's TFRecords, as they are.",
    "inspect": "Show what is in a folder of shards, and check every byte.",
    "plan": "Show what a model needs on some devices, and what to take.",
    "train": "Train a Keras model on a strategy; starts its own processes.",
    "tune": "Search for hyperparameters: many trainings, the best goes on.",
    "trace": "Show where the time of a step goes, on every rank.",
    "verify": "Prove that a strategy gives one device's weights.",
    "bench": "Measure strategies side by side, or sums alone.",
    "evaluate": "Compare trained models on the same records.",
    "predict": "Write a trained model's outputs for each record.",
    "serve": "Answer requests over HTTP with a trained model.",
    "merge": "Join the parts that jobs have made apart to one.",
    "options": "Show the options of a strategy, and what they mean.",
    "export": "Write a model as a TFLite file, and prove it the same.",
    "rehearse": "Break a training on purpose, and see what is lost.",
    "aws": "Train on Amazon SageMaker, or rehearse it on this machine.",
    "launch": "Run any script on several processes, and end them all.",
    "install": "Bring the engines that pip alone cannot.",
    "doctor": "Show which engines work here, and how to mend the rest.",
}


# All others use TensorFlow, or have ranks or containers that do: the wrong one is told before they
# begin.
_MENDING = ("install", "doctor")


class _LazyVerbs(click.Group):
    """A group whose commands are imported only when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = importlib.import_module(f"tfdist.cli.{name}").command
        command.short_help = _VERBS[name]  # For a shell that completes.
        return voice.with_options(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]):
        if args and not args[0].startswith("-"):
            if ctx.resilient_parsing:  # A shell completes.
                return super().resolve_command(ctx, args)
            if args[0] not in _VERBS:
                raise unknown_choice("command", args[0], list(_VERBS))
            if args[0] not in _MENDING and not {"-h", "--help"} & set(args):
                _check_working_folder()
                check_versions()
        return super().resolve_command(ctx, args)


def _check_working_folder() -> None:
    """Raises OptionError where it is gone: no path, and no program that is started, can do without
    it."""
    try:
        os.getcwd()
    except OSError as error:
        raise OptionError(
            "a command must be called in a folder that is there",
            received=f"a working folder of which the system says: {error.strerror}",
            mend="Go to another one, or to the one that is there now in its place: cd",
        ) from None


@click.group(
    cls=_LazyVerbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="Example: tfdist shard digits data && tfdist inspect data --check",
)
@click.version_option(__version__, prog_name="tfdist")
def tfdist() -> None:
    """Write a Keras model once, name a strategy: its fit is distributed, exact and resumable."""


def main() -> None:
    """Runs the command; a user's mistake is one line on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, _leave)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # Who called it has closed it.
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    with voice.speaking():
        code = _EXIT_BROKEN
        try:
            code = _run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else _EXIT_BROKEN
            raise
        finally:
            voice.end(code)
    sys.exit(code)


def _run() -> int:
    """Runs the command; returns its exit code."""
    try:
        code = tfdist.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USER_ERROR
    except click.ClickException as error:
        _complain(error.format_message())
        code = EXIT_USER_ERROR
    except RankFailedError as error:  # Its last lines were shown.
        voice.tell("error", text=str(error))
        code = error.exit_code
    except DivergedError as error:
        _complain(str(error))
        code = EXIT_DIVERGED
    except TfdistError as error:
        _complain(str(error))
        code = EXIT_USER_ERROR
    except (click.Abort, KeyboardInterrupt):
        _complain(f"interrupted{voice.parting()}")
        code = _EXIT_INTERRUPTED
    except SystemExit as ended:
        if ended.code == _EXIT_TERMINATED:
            _complain(f"ended by SIGTERM{voice.parting()}")
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # Nothing with a name: what could not be written to is our own output.
        voice.fall_silent()
        _complain(str(cannot_write("standard output", error)))
        code = EXIT_USER_ERROR
    return code if isinstance(code, int) else 0


def _leave(number: int, _frame: object) -> None:
    """Turns SIGTERM into SystemExit, so that every ``finally`` runs."""
    sys.exit(128 + number)


def _complain(text: str) -> None:
    text = " ".join(text.split())
    print(f"tfdist: {text}", file=sys.stderr)
    voice.tell("error", text=text)
