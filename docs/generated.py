"""Parts of the pages that are made from the code, so that they cannot be other than it.

``{strategy-options} NAME`` is the table of a strategy's options, ``{strategies}`` that of all
strategies, ``{gallery}`` the notebooks with a chart of each, ``{prints}`` what a command prints:
it is run. A notebook is a page, with the outputs that it is kept with.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
# How a terminal is told of colors and of bold letters.
_STYLE = re.compile(r"\x1b\[[\d;]*m")


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


class Gallery(SphinxDirective):
    """The notebooks that README.md names: the last chart of each, its title, what it shows."""

    def run(self) -> list[nodes.Node]:
        lines = ["::::{container} gallery"]
        readme = ROOT / "README.md"
        self.env.note_dependency(str(readme))
        for file, shows in re.findall(r"\((notebooks/.+)\) \| (.+) \|", readme.read_text()):
            self.env.note_dependency(str(ROOT / file))
            notebook = nbformat.read(ROOT / file, as_version=4)
            title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
            chart = [part for part in _parts(notebook) if part.startswith("![")][-1]
            lines += [":::{container} card", f"[{chart}]({file})", ""]
            lines += [f"**[{title}]({file})**: {shows}", ":::"]
        gallery = nodes.Element()
        self.state.nested_parse(StringList([*lines, "::::"], "generated"), 0, gallery)
        return gallery.children


class Prints(Directive):
    """Shows the last of some lines of the shell, run in a new folder, with what it prints."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
        with tempfile.TemporaryDirectory() as folder:
            for line in re.split(r"(?<!\\)\n", "\n".join(self.content)):
                command = [sys.executable, "-m", *shlex.split(line.replace("\\\n", ""))]
                done = subprocess.run(
                    command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
                )
                if done.returncode:
                    # It ends the build; the next one would take the page as read after a warning.
                    raise ExtensionError(f"{line}: {done.stderr}")
        text = f"$ {line}\n{done.stdout}"
        return [nodes.literal_block(text, text, language="console", classes=["terminal"])]


def _parts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yields a notebook as Markdown: its texts, its code, and what that printed and drew."""
    title = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            title = [title, *re.findall(r"^#+ (.+)", cell.source, re.MULTILINE)][-1]
            yield cell.source
            continue
        yield f"`````python\n{cell.source}\n`````"
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"].split())
                yield f"![{title}](data:image/png;base64,{png})"
            else:
                text = _STYLE.sub("", output.get("text") or data["text/plain"])
                yield f"`````{{code-block}} text\n:class: output\n\n{text}\n`````"


def _copy_notebooks(app: Sphinx) -> None:
    """Copies the notebooks among the pages: links do not lead out of their folder."""
    copy = Path(app.srcdir) / "notebooks"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", copy)  # As old as they are, so only changed ones are read.


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes Markdown of a notebook; links of either lead where the other lies on the site."""
    if app.env.doc2path(docname).suffix == ".ipynb":
        title, *parts = _parts(nbformat.reads(source[0], as_version=4))
        file = f"{{download}}`The notebook as a file <{Path(docname).name}.ipynb>`"
        source[0] = "\n\n".join([title, f"{file}, to run it yourself.", *parts])
    source[0] = source[0].replace("](../docs/", "](../").replace("](../notebooks/", "](notebooks/")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("strategy-options", StrategyOptions)
    app.add_directive("strategies", Strategies)
    app.add_directive("gallery", Gallery)
    app.add_directive("prints", Prints)
    app.add_source_suffix(".ipynb", "markdown")
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
