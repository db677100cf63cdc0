"""The options of a table, see ``training.engine.options.option``, as those of a command."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tfdist.cli import completion
from tfdist.errors import OptionError
from tfdist.records import charts

Decorator = Callable[[Callable], Callable]
_COMPLETED = {"strategy": completion.strategies, "option": completion.options}
_NAMES = {"options": ("-o", "--option", "option")}


class Seconds(click.FloatRange):
    """A deadline that comes: neither nan, which is within any range, nor inf."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def options_of(table: type, *names: str, **others: Mapping[str, Any]) -> Decorator:
    """Returns a decorator that adds options of a table, in its order, to a command.

    Args:
        names: of those; without, all that the table has itself.
        others: name -> arguments of ``click.option`` that are others for this command; "flags" are
            what it is called there.
    """

    def decorate(command: Callable) -> Callable:
        for name in reversed(names or tuple(table.__annotations__)):
            command = _option(table.__dataclass_fields__[name], others.get(name, {}))(command)
        return command

    return decorate


def names_option(*flags: str, text: str) -> Decorator:
    """Returns an option of names with commas between, which may be given several times."""

    def joined(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> str | None:
        return ",".join(given) or None

    return click.option(*flags, multiple=True, metavar="NAME,...", callback=joined, help=text)


def plot_option(draws: str) -> Decorator:
    """Returns the option --plot: the path of a chart, which can be drawn and written there."""

    def checked(ctx: click.Context, param: click.Parameter, path: str | None) -> Path | None:
        if path is None:
            return None
        charts.figure(1, 1)  # What is missing is told before minutes of work.
        return charts.checked(path)

    return click.option("--plot", metavar="FILE.png", callback=checked, help=draws)


def others_than(taken: Container[str]) -> list[click.Parameter]:
    """Returns what the command line gives to this command that is not one of ``taken``, by name."""
    context = click.get_current_context()
    return [
        each
        for each in context.command.params
        if context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE
        and each.expose_value
        and each.name not in taken
    ]


def refuse_others(taken: Container[str], rule: str, *, beside: str) -> None:
    """Raises OptionError where the command line gives an option that is not one of ``taken``.

    Args:
        taken: names of parameters of this command.
        beside: the option that leaves no use for others.
    """
    for option in others_than(taken):
        raise OptionError(rule, received=f"{option.opts[0]} beside {beside}", mend="Leave it out")


def _option(item: Any, others: Mapping[str, Any]) -> Decorator:
    about, kind = item.metadata, item.type
    flag = f"--{item.name.removesuffix('_s').replace('_', '-')}"
    given = {"help": about["text"], "metavar": about["metavar"]}
    if item.default is not None:
        given["default"] = item.default
    if kind.startswith("bool"):
        given["is_flag"] = True
        flag += f"/--no-{flag[2:]}" * bool(item.default)
    elif kind.startswith("Mapping"):
        given["multiple"] = True
    elif about["alone"] is not None:
        given |= {"is_flag": False, "flag_value": about["alone"]}
    elif about["choices"]:
        given["type"] = click.Choice(about["choices"])
    elif item.name.endswith("_s"):
        given["type"] = Seconds(min=0, min_open=True)
    elif kind.startswith("float"):
        given["type"] = click.FloatRange(min=0, min_open=True)
    elif kind.startswith("int | str"):
        given["callback"] = _whole_or_text
    elif kind.startswith("int"):
        given["type"] = int if about["least"] is None else click.IntRange(min=about["least"])
    names = others.get("flags") or _NAMES.get(item.name, (flag, item.name))
    given |= {"shell_complete": _COMPLETED.get(names[-1])} | others
    given.pop("flags", None)
    return click.option(*names, **given)


def _whole_or_text(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    return int(text) if text and text.isdecimal() else text
