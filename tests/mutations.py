"""Damage to a file: bytes, JSON, tables of text, and files that are no files. All by a seed.

A mutation is a function ``(path, rng)`` that damages the file ``path``. ``BYTES`` fits any file,
``JSON`` and ``TEXT`` know what they damage, ``PLACES`` put something else where the file was.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], None]

_DEPTH = 100_000
_DEEP = "@deep@"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e308, -1e-320),
    *(float("nan"), float("inf"), "", "x", "0", "\x00", "\n", "\x1b[2J", "\ud800", "../../x", "."),
    *("x" * 5000, "é" * 300, [], {}, [[]], [None], {"": {}}, [0] * 1000, {"a": 1}, _DEEP),
)


def remove(path: Path) -> None:
    """Removes whatever is at ``path``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _on_bytes(change: Callable[[bytearray, random.Random], bytes]) -> Mutation:
    def mutate(path: Path, rng: random.Random) -> None:
        path.write_bytes(bytes(change(bytearray(path.read_bytes()), rng)))

    mutate.__name__ = change.__name__
    return mutate


def _piece(data: bytearray, rng: random.Random) -> slice:
    start = rng.randrange(len(data) + 1)
    return slice(start, start + rng.choice((1, 2, 4, 12, 16, 64, 500)))


@_on_bytes
def flip_bits(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


@_on_bytes
def cut_end(data: bytearray, rng: random.Random) -> bytes:
    kept = rng.choice((0, 1, len(data) - 1, len(data) // 2, rng.randrange(len(data) + 1)))
    return data[: max(0, kept)]


@_on_bytes
def cut_out(data: bytearray, rng: random.Random) -> bytes:
    del data[_piece(data, rng)]
    return data


@_on_bytes
def repeat_piece(data: bytearray, rng: random.Random) -> bytes:
    piece = _piece(data, rng)
    return data[: piece.stop] + data[piece] * rng.choice((1, 3, 100)) + data[piece.stop :]


@_on_bytes
def splice(data: bytearray, rng: random.Random) -> bytes:
    """Overwrites a piece with another one of the same file."""
    source, start = _piece(data, rng), rng.randrange(len(data) + 1)
    data[start : start + len(data[source])] = data[source]
    return data


@_on_bytes
def overwrite(data: bytearray, rng: random.Random) -> bytes:
    piece = _piece(data, rng)
    length = len(data[piece])
    data[piece] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    return data


@_on_bytes
def append(data: bytearray, rng: random.Random) -> bytes:
    return data + rng.choice((b"\x00", b"\n", b"\xff\xfe", rng.randbytes(40), bytes(data)))


@_on_bytes
def no_utf8(data: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    if rng.random() < 0.2:
        return bytes(data).decode("utf-8", "replace").encode("utf-16")
    return data[:start] + rng.choice((b"\xff", b"\xc3\x28", b"\x00")) + data[start:]


def _nodes(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Returns (container, key) of every value inside ``value``."""
    found = [] if found is None else found
    if isinstance(value, (dict, list)):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in list(keys):
            found.append((value, key))
            _nodes(value[key], found)
    return found


def _on_json(change: Callable[[Any, Any, random.Random], None]) -> Mutation:
    """``change`` gets a container of the document, and a key in it."""

    def mutate(path: Path, rng: random.Random) -> None:
        document = json.loads(path.read_text())
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            if nodes := _nodes(document):
                change(*rng.choice(nodes), rng)
        text = json.dumps(document).replace(f'"{_DEEP}"', "[" * _DEPTH + "]" * _DEPTH)
        path.write_text(text)

    mutate.__name__ = change.__name__
    return mutate


@_on_json
def another_value(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = copy.deepcopy(rng.choice(_VALUES))


@_on_json
def near_number(container: Any, key: Any, rng: random.Random) -> None:
    """Changes a number, or a digit of a text, a little: what a check of types lets through."""
    value = container[key]
    if isinstance(value, (int, float)):
        container[key] = value + rng.choice((-1, 1, 8, 2**20, 2**33, -value, -2 * value))
    elif isinstance(value, str) and value:
        at = rng.randrange(len(value))
        container[key] = value[:at] + rng.choice("0a_/é ") + value[at + 1 :]


@_on_json
def without_key(container: Any, key: Any, rng: random.Random) -> None:
    del container[key]


@_on_json
def another_key(container: Any, key: Any, rng: random.Random) -> None:
    value = container.pop(key)
    if isinstance(container, dict):
        container[rng.choice(("", "x", str(key).upper(), "\ud800", "9" * 50))] = value


@_on_json
def values_swapped(container: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
    container[key], container[other] = container[other], container[key]


@_on_json
def value_repeated(container: Any, key: Any, rng: random.Random) -> None:
    if isinstance(container, list):
        container.extend(copy.deepcopy(container[key]) for _ in range(rng.choice((1, 1, 50))))
    else:
        container[f"{key}2"] = copy.deepcopy(container[key])


def whole_document(path: Path, rng: random.Random) -> None:
    many_digits = "9" * 5000
    one_value = (json.dumps(value) for value in _VALUES if value != _DEEP)
    nested = "[" * _DEPTH, '{"a":' * _DEPTH, "[" * _DEPTH + "]" * _DEPTH
    path.write_text(rng.choice((*one_value, *nested, many_digits, f"[{many_digits}]", "{", "")))


@_on_bytes
def another_cell(data: bytearray, rng: random.Random) -> bytes:
    """Replaces one cell of a table of text."""
    lines = bytes(data).decode("utf-8", "replace").split("\n")
    row = rng.randrange(len(lines))
    cells = lines[row].split(",")
    new = ("", "x", "nan", "inf", "-1", "1e999", "9" * 5000, '"', '"a\nb"', "\x00", "é", "1,2", "0")
    cells[rng.randrange(len(cells))] = rng.choice(new)
    lines[row] = ",".join(cells)
    return "\n".join(lines).encode()


@_on_bytes
def lines_moved(data: bytearray, rng: random.Random) -> bytes:
    """Removes, repeats or swaps lines of a text."""
    lines = bytes(data).split(b"\n")
    row, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(3)
    if how == 0:
        del lines[row]
    elif how == 1:
        lines[row:row] = [lines[other]] * rng.choice((1, 200))
    else:
        lines[row], lines[other] = lines[other], lines[row]
    return b"\n".join(lines)


def missing(path: Path, rng: random.Random) -> None:
    remove(path)


def directory(path: Path, rng: random.Random) -> None:
    remove(path)
    path.mkdir()


def pipe(path: Path, rng: random.Random) -> None:
    """A named pipe that nobody writes into: reading it waits for ever."""
    remove(path)
    os.mkfifo(path)


def device(path: Path, rng: random.Random) -> None:
    remove(path)
    path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/tty")))


def socket_file(path: Path, rng: random.Random) -> None:
    remove(path)
    short = Path("/proc/self/cwd")  # A socket's path has at most 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(short / path.name))
    finally:
        os.chdir(here)


def endless_link(path: Path, rng: random.Random) -> None:
    remove(path)
    path.symlink_to(path.name)


BYTES: tuple[Mutation, ...] = (
    *(flip_bits, flip_bits, cut_end, cut_out, repeat_piece, splice, overwrite, append),
)
JSON: tuple[Mutation, ...] = (
    *(another_value, another_value, near_number, without_key, another_key, values_swapped),
    *(value_repeated, whole_document, no_utf8),
)
TEXT: tuple[Mutation, ...] = (another_cell, lines_moved, no_utf8)
PLACES: tuple[Mutation, ...] = (missing, directory, pipe, device, socket_file, endless_link)
