"""Parts of the pages that are made from the code, so that they cannot be other than it.

``{strategy-options} NAME`` is the table of a strategy's options, ``{strategies}`` that of all
strategies.
"""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx


def _table(directive: Directive, titles: list[str], rows: list[list[str]]) -> list[nodes.Node]:
    """Returns a table whose cells are Markdown."""
    widths = [1] * (len(titles) - 1) + [4]
    group = nodes.tgroup(cols=len(titles))
    group += [nodes.colspec(colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    for part, lines in ((head, [titles]), (body, rows)):
        for line in lines:
            row = nodes.row()
            for cell in line:
                entry = nodes.entry()
                directive.state.nested_parse(StringList([cell], "generated"), 0, entry)
                row += entry
            part += row
    group += [head, body]
    table = nodes.table()
    table += group
    return [table]


class StrategyOptions(Directive):
    """The options of a strategy: name, default, meaning."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from tfdist.strategies import known_options

        rows = [
            [f"`{option.name}`", f"`{option.default!r}`", option.meaning]
            for option in known_options(self.arguments[0]).values()
        ]
        return _table(self, ["option", "default", "meaning"], rows)


class Strategies(Directive):
    """All strategies, what they are, and what starts their processes."""

    def run(self) -> list[nodes.Node]:
        from tfdist.strategies import REGISTRY

        started_by = {"mpi": "MPI", "gloo": "Gloo", "tasks": "tfdist"}
        rows = [
            [
                f"[`{name}`](strategies/{name}.md)",
                ", ".join(started_by[launcher] for launcher in spec.launchers) or "one process",
                spec.summary,
            ]
            for name, spec in REGISTRY.items()
        ]
        return _table(self, ["strategy", "processes started by", "what it is"], rows)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("strategy-options", StrategyOptions)
    app.add_directive("strategies", Strategies)
    return {"parallel_read_safe": True}
