"""Draws docs/pictures: what lies where in each strategy, and the tree of choosing.md.

Change what is said here, run it, and look at the files: in light and in dark, and on a phone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 480
LINE = 19
_COLORS = {  # In light, and in dark.
    "text": ("#1f2328", "#e6e8ea"),
    ".panel": ("#f8f9fb", "#1a1c1e"),
    ".place": ("#ffffff", "#26292c"),
    ".model": ("#cfe0ff", "#1f4788"),
    ".data": ("#cdeed3", "#1d5a31"),
    ".sent": ("#ffdfb3", "#7a4300"),
}


class Drawing:
    """Boxes and arrows, from the top down."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.height = 0

    def box(self, x: int, y: int, width: int, kind: str, text: str, height: int = 0) -> int:
        """Draws a box around lines of text, as high as they are unless told. Returns its bottom."""
        lines = text.split("\n")
        bottom = y + (height or LINE * len(lines) + 13)
        size = f'x="{x}" y="{y}" width="{width}" height="{bottom - y}"'
        self.parts.append(f'<rect class="{kind}" {size} rx="5"/>')
        for number, line in enumerate(lines):
            self.note(x + width // 2, y + 22 + LINE * number, line, "middle")
        self.height = max(self.height, bottom + 16)
        return bottom

    def note(self, x: int, y: int, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')
        self.height = max(self.height, y + 20)

    def place(self, x: int, y: int, width: int, title: str, **cells: str) -> int:
        """Draws a device or a process and what lies on it, kind by kind. Returns its bottom."""
        inner = [(kind, text, LINE * (text.count("\n") + 1) + 13) for kind, text in cells.items()]
        bottom = self.box(x, y, width, "place", title, 38 + sum(height + 8 for *_, height in inner))
        y += 32
        for kind, text, _ in inner:
            y = self.box(x + 8, y, width - 16, kind, text) + 8
        return bottom

    def arrow(self, x1: int, y1: int, x2: int, y2: int, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        line = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
        self.parts.append(f'<line {line}{start} marker-end="url(#head)"/>')

    def svg(self) -> str:
        light, dark = (
            "".join(f"{what}{{fill:{colors[scheme]}}}" for what, colors in _COLORS.items())
            for scheme in (0, 1)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
                f' width="{WIDTH}" height="{self.height}" font-family="system-ui, sans-serif"'
                ' font-size="15">',
                f"<style>.place{{stroke:#8a8f98}}line{{stroke:#8a8f98;stroke-width:2}}{light}"
                f"@media (prefers-color-scheme: dark){{{dark}}}</style>",
                '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5"'
                ' markerHeight="5" orient="auto-start-reverse">'
                '<path d="M0 0 8 4 0 8z" fill="#8a8f98"/></marker>',
                f'<rect class="panel" width="{WIDTH}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def single() -> Drawing:
    drawing = Drawing()
    drawing.place(
        100, 16, 280, "one device", data="all 128 rows of a batch", model="all weights and slots"
    )
    return drawing


def _replicas(y: int, titles: tuple[str, str], rows: str, sent: str) -> Drawing:
    """Two whole models, each with its rows, and what goes between them."""
    drawing = Drawing()
    if y > 16:
        drawing.box(12, 12, 456, "panel place", "one process", 242)
    for x, title in zip((24, 250), titles, strict=True):
        bottom = drawing.place(x, y, 206, title, data=rows, model="all weights and slots")
        drawing.arrow(x + 103, bottom + 3, x + 103, bottom + 29, both=True)
    drawing.box(24, bottom + 32, 432, "sent", sent)
    return drawing


def mirrored() -> Drawing:
    return _replicas(
        48,
        ("GPU 0", "GPU 1"),
        "64 of the 128 rows\nof a batch",
        "in each step: the sum of gradients",
    )


def horovod() -> Drawing:
    return _replicas(
        16,
        ("rank 0, writes files", "rank 1"),
        "64 of 128 rows, from\nits part of the records",
        "in each step: the sum of gradients, by MPI or Gloo",
    )


def multi_worker() -> Drawing:
    return _replicas(
        16,
        ("worker 0, writes files", "worker 1"),
        "64 of 128 rows, from\nits part of the records",
        "in each step: the sum of gradients, by TensorFlow",
    )


def parameter_server() -> Drawing:
    drawing = Drawing()
    chief = {"data": "all records"}
    some = {"model": "some weights,\ntheir slots"}
    for x, title, cells in ((16, "chief", chief), (172, "server 0", some), (328, "server 1", some)):
        bottom = drawing.place(x, 16, 136, title, **cells)
        drawing.arrow(x + 68, bottom + 3, x + 68, 142, both=title != "chief")
    y = drawing.box(16, 145, 448, "sent", "batches and weights down, gradients up:\nnobody waits")
    for x, title in ((16, "worker 0"), (248, "worker 1")):
        drawing.place(x, y + 32, 216, title, data="a batch", model="weights as it found them")
        drawing.arrow(x + 108, y + 3, x + 108, y + 29, both=True)
    return drawing


def mesh() -> Drawing:
    drawing = Drawing()
    for y, rows in ((16, "rows 0 to 63"), (158, "rows 64 to 127")):
        for x, half in ((16, "first"), (264, "second")):
            title = f"device {(y > 16) * 2 + (x > 16)}"
            drawing.place(x, y, 200, title, data=rows, model=f"{half} halves, slots")
        drawing.arrow(219, y + 59, 261, y + 59, both=True)
    for x in (116, 364):
        drawing.arrow(x, 137, x, 155, both=True)
    y = drawing.box(16, 286, 448, "sent", "↔ parts of activations, along the axis “model”")
    drawing.box(16, y + 8, 448, "sent", "↕ the sum of gradients, along the axis “batch”")
    return drawing


def pipeline() -> Drawing:
    drawing = Drawing()
    y = drawing.box(16, 16, 448, "data", "a batch: 4 microbatches of 32 rows")
    drawing.arrow(112, y + 3, 112, y + 29)
    for x, stage, layers in ((16, 0, "first"), (272, 1, "last")):
        bottom = drawing.place(
            x,
            y + 32,
            192,
            f"device {stage}: stage {stage}",
            data=f"microbatch {1 - stage}",
            model=f"{layers} layers’ weights\nand slots",
        )
    drawing.arrow(211, y + 80, 269, y + 80)
    drawing.arrow(269, y + 125, 211, y + 125)
    y = drawing.box(16, bottom + 16, 448, "sent", "→ activations, ← their gradients")
    drawing.box(
        16,
        y + 8,
        448,
        "sent",
        "with replicas: the sum of gradients of all ranks,\neach with such stages and other rows",
    )
    return drawing


def federated() -> Drawing:
    drawing = Drawing()
    y = drawing.place(120, 16, 240, "server", model="the model")
    drawing.arrow(240, y + 3, 240, y + 29, both=True)
    y = drawing.box(
        16,
        y + 32,
        448,
        "sent",
        "in each round: the model down to some clients,\nwhat each has learned up",
    )
    for x, client in ((16, 0), (172, 1), (328, 2)):
        drawing.arrow(x + 68, y + 3, x + 68, y + 29, both=True)
        drawing.place(
            x, y + 32, 136, f"client {client}", data="own records,\nwhich stay", model="a copy"
        )
    return drawing


def choosing() -> Drawing:
    drawing = Drawing()
    y = 16
    for question, answer in (
        ("Must records stay\nwith their owners?", "federated"),
        ("A pretrained backbone\nthat is not trained?", "pipeline,\nfrozen_cache"),
        ("Too large for one device,\nwith less memory, too?", "mesh\nor pipeline"),
        ("Is one device\nfast enough?", "single"),
        ("One machine\nwith several GPUs?", "mirrored"),
        ("Workers of unlike speed,\nor large embeddings?", "parameter_server"),
        ("Is MPI there, or must it\ngo on with fewer workers?", "horovod"),
    ):
        bottom = drawing.box(16, y, 236, "place", question)
        lines = answer.count("\n") + 1
        drawing.box(316, y + (2 - lines) * LINE // 2, 148, "model", answer)
        drawing.arrow(255, y + 25, 313, y + 25)
        drawing.note(284, y + 19, "yes", "middle")
        drawing.arrow(134, bottom + 3, 134, bottom + 29)
        drawing.note(146, bottom + 21, "no")
        y = bottom + 32
    drawing.box(60, y, 148, "model", "multi_worker")
    return drawing


_ALL = (
    single,
    mirrored,
    horovod,
    multi_worker,
    parameter_server,
    mesh,
    pipeline,
    federated,
    choosing,
)


def pictures() -> dict[str, str]:
    """Returns file -> SVG."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in _ALL}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
