"""What a program reads of messages that name the options of the shell.

The same functions work for `tfdist shard` and `tfdist adopt` and for a program, and their messages
name the options as the shell has them. The functions that a program calls add its own names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from tfdist.errors import TfdistError

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")

_READING = {
    "--resize": "resize=",
    "--crop": "fit='crop'",
    "--pad": "fit='pad'",
    "--color": "color=",
    "--weight": "weight=",
    "--split": "split=",
}
#: Options of `tfdist shard`, as ``write`` calls them.
OF_WRITE = {
    **_READING,
    "--num-shards": "num_shards=",
    "--compression": "compression=",
    "--label": "label=",
    "--inputs": "inputs=",
    "--drop": "drop=",
    "--text": "text=",
    "--categories": "categories=",
    "--missing": "missing=",
    "--clients": "clients=",
    "--partition": "partition=",
    "--no-decode": "decode=False",
    "--write-resized": "write_resized=True",
    "--labels": "labels=",
    "--masks": "masks=",
    "--skip-bad": "skip_bad=True",
    "--resume": "resume=True",
    "--overwrite": "overwrite=True",
    "--workers": "workers=",
}
#: Options of `tfdist adopt`, as ``adopt`` calls them.
OF_ADOPT = {
    **_READING,
    "--out": "out=",
    "--input": "inputs=",
    "--label": "labels=",
    "--first-class": "first_class=",
    "--max-length": "max_length=",
}
_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
# What is to be said in a shell stays what it is.
_COMMAND = re.compile(r"`[^`]*`")


def names_added(text: str, names: Mapping[str, str]) -> str:
    """Returns a message, and how a program says the options that it names."""
    found = dict.fromkeys(_OPTION.findall(_COMMAND.sub("", text)))
    said = [
        f"{option} is {names[option]}"
        for option in found
        if option in names and not _is_named(text, option, names[option])
    ]
    if not said:
        return text
    return f"{text.rstrip('.')}. In Python, {', '.join(said)}" + "." * text.endswith(".")


def _is_named(text: str, option: str, name: str) -> bool:
    """Whether a message says the name already, as in "resize (--resize) must"."""
    parameter = name.partition("=")[0]
    return f"{parameter} ({option}" in text or f" {parameter}=" in text


def for_programs(
    call: Callable[_Parameters, _Returned], names: Mapping[str, str]
) -> Callable[_Parameters, _Returned]:
    """Returns a function whose errors name its arguments beside the options of the shell."""

    @functools.wraps(call)
    def called(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
        try:
            return call(*args, **options)
        except TfdistError as error:
            error.args = (names_added(str(error), names), *error.args[1:])
            raise

    return called
