"""Prints the picture of the house in CONTRIBUTING.md: the packages of tfdist and their imports.

An arrow that follows from others is left out. Run it from the root of the repository.
"""

from __future__ import annotations

import grimp


def picture() -> str:
    """Returns the packages and their imports as a Mermaid graph."""
    imports = _imports()
    arrows = [
        f"    {room} --> {other}"
        for room in sorted(imports)
        for other in sorted(imports[room])
        if not any(other in _below(via, imports) for via in imports[room] - {other})
    ]
    return "\n".join(["graph TD", *arrows])


def _imports() -> dict[str, set[str]]:
    """Returns package -> the packages that it imports itself."""
    graph = grimp.build_graph("tfdist")
    rooms: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            room, other = (name.split(".")[1:2] for name in (module, imported))
            if room and other and room != other and room != ["__main__"]:
                rooms.setdefault(room[0], set()).add(other[0])
                rooms.setdefault(other[0], set())
    return rooms


def _below(room: str, imports: dict[str, set[str]]) -> set[str]:
    """Returns all that ``room`` imports, itself or through others."""
    return imports[room].union(*(_below(other, imports) for other in imports[room]))


if __name__ == "__main__":
    print(picture())
