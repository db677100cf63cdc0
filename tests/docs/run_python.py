"""Runs the Python of all pages in one process: ``run_python.py OUT_JSON``, in a folder with
``model.py`` and ``data/digits``. The blocks of a page share their names, as in one script.
"""

from __future__ import annotations

import json
import sys
import traceback
import types
from pathlib import Path

import blocks

from tfdist.compat import import_tensorflow


def run(page: Path) -> str:
    """Returns the traceback of the first block that fails; empty when none does."""
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    for block in blocks.blocks_of(page, "python"):
        # Lines of the page in tracebacks.
        code = "\n" * (block.line - 1) + block.code
        try:
            exec(compile(code, blocks.name_of(page), "exec"), vars(script))
        except Exception:
            return traceback.format_exc()
    return ""


def main(out: str) -> None:
    import_tensorflow()
    from tfdist.strategies.mirrored import make_logical_cpus

    make_logical_cpus(4)  # For the largest: they are made once in a process.
    sys.path.insert(0, "")
    results = {blocks.name_of(page): run(page) for page in blocks.pages_with("python")}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
