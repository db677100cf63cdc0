"""What a shell completes beside the names of commands and options, which click knows itself."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from tfdist.errors import TfdistError
from tfdist.strategies import REGISTRY, known_options


def strategies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of strategies."""
    told = {name: spec.summary for name, spec in REGISTRY.items()}
    if param.default == "auto":
        told["auto"] = "what fits this machine and this launcher"
    return _items(told, incomplete)


def options(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes KEY= of the strategy that stands before it on the line."""
    strategy = ctx.params.get("strategy")
    if strategy not in REGISTRY:
        return []
    known = known_options(strategy).values()
    return _items({f"{option.name}=": option.meaning for option in known}, incomplete)


def data(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes folders, and the splits of one that holds shards."""
    from tfdist.records.format.manifest import MANIFEST_NAME, load_manifest

    if "://" in incomplete:
        return []
    start = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(start or ".")
    found: dict[str, str] = {}
    if (folder / MANIFEST_NAME).is_file():
        try:
            splits = load_manifest(folder).splits
        except TfdistError:
            splits = {}
        found |= {f"{start}{name}": f"{split.records:,} records" for name, split in splits.items()}
    try:
        inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        inside = []
    found |= {f"{start}{name}/": "" for name in inside if not name.startswith(".")}
    return _items(found, incomplete)


def _items(told: dict[str, str], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=meaning or None)
        for name, meaning in told.items()
        if name.startswith(incomplete)
    ]
