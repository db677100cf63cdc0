"""The code in README.md and docs/: what is between fences, in the order of the page.

A comment ``<!-- not run: REASON -->`` before a block says why the tests leave it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?P<left_out><!-- not run: .+ -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A piece of code that can be run.

    Attributes:
        line: of the page on which it begins, for people.
        language: "python" or "sh".
    """

    line: int
    language: str
    code: str


def blocks_of(page: Path, language: str) -> list[Block]:
    """Returns what is to be run of ``page`` in a language."""
    text = page.read_text()
    return [
        Block(text.count("\n", 0, found.start("code")) + 1, language, found["code"])
        for found in _BLOCK.finditer(text)
        if found["language"] == language and not found["left_out"]
    ]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks_of(page, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
