"""What tests and benchmarks take from tfdist by name stands there: a rename is found in seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
READERS = [file for room in ("tests", "benchmarks") for file in sorted((ROOT / room).rglob("*.py"))]


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Returns what a module of tfdist binds; None where it is none, or makes its names itself."""
    place = ROOT.joinpath(*module.split("."))
    path = next((p for p in (place / "__init__.py", place.with_suffix(".py")) if p.is_file()), None)
    if path is None:
        return None
    found = {"__file__", "__name__", "__doc__", "__path__", "__dict__"}
    if path.name == "__init__.py":
        found |= {child.stem for child in place.iterdir()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if found & {"*", "__getattr__"} else frozenset(found)


def modules_named(tree: ast.Module) -> dict[str, str]:
    """Returns the modules of tfdist that a file imports, by the name it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdist"):
            modules = {
                each.asname or each.name: f"{node.module}.{each.name}" for each in node.names
            }
        elif isinstance(node, ast.Import):
            modules = {each.asname: each.name for each in node.names if each.asname}
        else:
            continue
        found |= {name: module for name, module in modules.items() if names_of(module) is not None}
    return found


def taken(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yields module, name and line of what is read as an attribute, or patched by its name."""
    modules = modules_named(tree)
    rebound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store}
    rebound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr"),
                args=[ast.Name(id=name), ast.Constant(value=str(attribute)), *_],
            ):
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "patch"),
                args=[ast.Constant(value=str(dotted)), *_],
            ):
                module, _, attribute = dotted.rpartition(".")
                if names_of(module) is not None:
                    yield module, attribute, node.lineno
                continue
            case _:
                continue
        if name in modules and name not in rebound:
            yield modules[name], attribute, node.lineno


def test_what_is_taken_by_name_stands_in_its_module():
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {module} has no {name}"
        for file in READERS
        for module, name, line in taken(ast.parse(file.read_text()))
        if name not in (names_of(module) or ())
    ]
    assert not missing, "\n".join(missing)


def test_a_name_that_is_gone_is_found():
    tree = ast.parse(
        "from tfdist.launch import hosts\n"
        "monkeypatch.setattr(hosts, '_gone', 1)\n"
        "hosts.shares, hosts.gone\n"
        "monkeypatch.setattr('tfdist.launch.hosts.too', 1)\n"
    )
    found = {name for module, name, _ in taken(tree) if name not in names_of(module)}
    assert found == {"_gone", "gone", "too"}
