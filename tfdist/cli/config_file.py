"""``--config FILE`` and ``--print-config``: the options of a command as YAML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from click.core import ParameterSource

from tfdist.errors import OptionError, unknown_choice
from tfdist.planning.yaml_file import load


class Configurable(click.Command):
    """A command whose options can also stand in a file, by their long names.

    What is on the command line wins. Of options that can be given several times, as ``-o``, the
    file's stay beside those of the command line that have other keys.
    """

    def __init__(self, *args: Any, params: list[click.Parameter], **more: Any):
        config = click.Option(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=self._take,
            help="Options in YAML, by their long names; those on the command line win. Paths in it "
            "count from the working folder, as on the command line.",
        )
        shown = click.Option(
            ["--print-config"],
            is_flag=True,
            help="Print all options, as --config takes them, and do nothing else.",
        )
        super().__init__(*args, params=[*params, config, shown], **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # What is printed may be the beginning of a file, and lack what must be given.
        wants_print = "--print-config" in args
        with _nothing_required(self.params) if wants_print else contextlib.nullcontext():
            rest = super().parse_args(ctx, list(args))
        for param in self._by_key().values():
            if (
                param.multiple
                and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
            ):
                of_file = (ctx.default_map or {}).get(param.name, ())
                both = [*of_file, *ctx.params[param.name]]
                ctx.params[param.name] = tuple({t.partition("=")[0]: t for t in both}.values())
        if ctx.params.pop("print_config", False) and not ctx.resilient_parsing:
            found = {key: _plain(ctx.params[each.name]) for key, each in self._by_key().items()}
            click.echo(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), nl=False)
            ctx.exit()
        return rest

    def _by_key(self) -> dict[str, click.Option]:
        """Returns the options by their long names, without dashes."""
        options = [p for p in self.params if isinstance(p, click.Option) and p.expose_value]
        options = [option for option in options if option.name != "print_config"]
        return {max(option.opts, key=len).lstrip("-"): option for option in options}

    def _take(self, ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
        if path is None or ctx.resilient_parsing:
            return
        options = self._by_key()
        values = {}
        for read, value in _read(path).items():
            # An option of tfdist tune, and a word of YAML's for true.
            key = "on" if read is True and "on" in options else read
            if key not in options:
                raise unknown_choice(f"option in {path}", key, list(options))
            if value is not None:
                values[options[key].name] = _as_given(f"{key} in {path}", options[key], value)
        ctx.default_map = {**(ctx.default_map or {}), **values}


@contextlib.contextmanager
def _nothing_required(params: list[click.Parameter]) -> Iterator[None]:
    required = [param for param in params if param.required]
    for param in required:
        param.required = False
    try:
        yield
    finally:
        for param in required:
            param.required = True


def _read(path: Path) -> dict[Any, Any]:
    rule = f"{path} must hold options in YAML"
    try:
        read = load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise OptionError(rule, received=f"an error: {error}", mend="Write epochs: 5") from None
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise OptionError(rule, received=f"a {type(read).__name__}", mend="Write epochs: 5")
    return read


def _as_given(place: str, option: click.Option, value: Any) -> Any:
    """Returns a value as the command line would give it."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise OptionError(
                f"{place} must be true or false",
                received=repr(value),
                mend="Write true or false, without quotes",
            )
        return value
    if option.multiple:
        if isinstance(value, Mapping):
            return tuple(f"{key}={one}" for key, one in value.items())
        if not isinstance(value, list):
            raise OptionError(
                f"{place} must be a list, or pairs of keys and values",
                received=repr(value),
                mend="Write it as [A, B] or as {A: B}",
            )
        return tuple(map(str, value))
    if isinstance(value, bool):
        raise OptionError(
            f"{place} must be a text or a number",
            received=str(value).lower(),
            mend="Put a word such as yes, no, on or off in quotes",
        )
    if isinstance(value, Mapping):
        return ",".join(f"{key}={one}" for key, one in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
