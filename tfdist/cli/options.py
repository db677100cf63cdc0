"""``tfdist options``: what can be given to a strategy."""

from __future__ import annotations

import click

from tfdist.cli import completion, voice
from tfdist.cli.console import plain_table, stdout
from tfdist.errors import OptionError
from tfdist.strategies import REGISTRY, known_options, spec_of


@click.command("options", cls=voice.Answering, epilog="Example: tfdist options mirrored")
@click.argument("strategy", required=False, shell_complete=completion.strategies)
def command(strategy: str | None) -> None:
    """Show the options of STRATEGY: in Python strategy(NAME, KEY=VALUE), else -o KEY=VALUE.

    Without STRATEGY: the strategies that there are.
    """
    if strategy is None:
        summaries = {name: spec.summary for name, spec in REGISTRY.items()}
        voice.answer(summaries)
        _print_table(("strategy", "what it is"), [*summaries.items()])
        return
    if strategy == "auto":
        raise OptionError(
            "options must be those of one strategy",
            received="'auto', which chooses one and takes what that takes",
            mend=f"Name one of {', '.join(REGISTRY)}",
        )
    spec = spec_of(strategy)
    options = known_options(strategy).values()
    voice.answer(
        [
            {"name": o.name, "type": o.kind, "default": o.default, "meaning": o.meaning}
            for o in options
        ]
    )
    click.echo(f"{spec.name}: {spec.summary}\n")
    titles = ("option", "type", "default", "meaning")
    defaults = [o.default if isinstance(o.default, str) else repr(o.default) for o in options]
    rows = zip(options, defaults, strict=True)
    _print_table(titles, [(o.name, o.kind, default, o.meaning) for o, default in rows])


def _print_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = plain_table(*titles)
    for row in rows:
        table.add_row(*row)
    stdout().print(table)
