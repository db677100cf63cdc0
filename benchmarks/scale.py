"""More than memory: what 3 GB take while they are written and read, and a manifest of 1 TB.

Each is measured in a process of its own. "By hand" stands the most that it may take.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import apart

_SHAPE = (448, 448)  # Of a record of 0.8 MB.
_MOST_MB = 2048.0
_SHARDS, _RECORDS_OF_A_SHARD, _MOST_S = 10_000, 10_000, 1.0


def run(quick: bool = False) -> list[dict[str, Any]]:
    records = 64 if quick else 3 * 2**30 // (4 * _SHAPE[0] * _SHAPE[1])
    shards = 100 if quick else _SHARDS
    rows = []
    with tempfile.TemporaryDirectory(prefix="tfdist-scale-") as name:
        for kind in ("memmap", "npz", "generator"):
            peak = apart.call("benchmarks.scale", "write", kind=kind, records=records, folder=name)
            rows.append(_row(f"MB of memory to write 3 GB: {kind}", _MOST_MB, peak))
        peak = apart.call("benchmarks.scale", "write_table", rows=records * 4000, folder=name)
        rows.append(_row("MB of memory to write 3 GB: a CSV of 20 columns", _MOST_MB / 2, peak))
        peak = apart.call("benchmarks.scale", "read", folder=name)
        rows.append(_row("MB of memory to read 3 GB, shuffled", _MOST_MB, peak))
        took = apart.call("benchmarks.scale", "open_large", folder=name, shards=shards)
        rows.append(_row("s to open 10,000 shards, 100 million records", _MOST_S, took))
    return rows


def _row(work: str, most: float, ours: float) -> dict[str, Any]:
    ratio = round(most / ours, 3)
    return {"work": work, "baseline": most, "ours": round(ours, 3), "ratio": ratio, "target": 1.0}


# What runs in processes of its own -----------------------------------------------------------


def write(kind: str, records: int, folder: str) -> float:
    """Writes that many records as shards; returns the most memory that it took, in MB."""
    from tfdist.records import write as write_shards

    out = Path(folder, "shards")
    shutil.rmtree(out, ignore_errors=True)
    labels = np.arange(records) % 10
    rng = np.random.default_rng(0)

    def images() -> Iterator[np.ndarray]:
        for _ in range(records):
            yield rng.random(_SHAPE, np.float32)

    def pairs() -> Iterator[dict[str, Any]]:
        for image, label in zip(images(), labels, strict=True):
            yield {"x": image, "label": label}

    source: Any = pairs
    file = Path(folder, "x.npy")
    if kind != "generator":
        stored = np.lib.format.open_memmap(file, "w+", np.float32, (records, *_SHAPE))
        for number, image in enumerate(images()):
            stored[number] = image
        stored.flush()
        del stored
        source = (np.load(file, mmap_mode="r", allow_pickle=False), labels)
    if kind == "npz":
        source = Path(folder, "data.npz")
        _store(source, file, labels)
        file.unlink()
    _forget_peak()
    write_shards(source, out, split="train=1")
    for left in (file, Path(folder, "data.npz")):
        left.unlink(missing_ok=True)
    return _peak_mb()


def write_table(rows: int, folder: str) -> float:
    """Writes a table of that many rows as shards; returns the most memory that it took, in MB."""
    from tfdist.records import write as write_shards

    path, out = Path(folder, "table.csv"), Path(folder, "of_table")
    rng = np.random.default_rng(0)
    numbers = [",".join(f"{value:.6f}" for value in rng.normal(size=16)) for _ in range(2000)]
    with path.open("w") as file:
        file.write(",".join([*(f"x{n}" for n in range(16)), "city", "note", "when", "y"]) + "\n")
        for row in range(rows):
            when = f"20{row % 90 + 10}-0{row % 9 + 1}-1{row % 10} {row % 23:02d}:{row % 59:02d}:00"
            file.write(f"{numbers[row % 2000]},city{row % 50},note {row},{when},{row % 3}\n")
    _forget_peak()
    write_shards(path, out, split="train=1")
    peak = _peak_mb()
    path.unlink()
    shutil.rmtree(out)
    return peak


def _store(target: Path, x: Path, labels: np.ndarray) -> None:
    """Writes an .npz of a file .npy, which numpy.savez would read whole."""
    import zipfile

    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.write(x, "x.npy")
        with archive.open("label.npy", "w") as member:
            np.lib.format.write_array(member, labels)


def read(folder: str) -> float:
    """Reads all shards, shuffled; returns the most memory that it took, in MB."""
    from tfdist.records import read as read_shards

    for _ in read_shards(Path(folder, "shards", "train"), batch_size=16, shuffle=True, cache=False):
        pass
    return _peak_mb()


def open_large(folder: str, shards: int) -> float:
    """Returns the seconds until a split of so many shards, which hold nothing, can be read from."""
    import tensorflow  # noqa: F401  Its import is not what is measured.

    from tfdist.records import open_records
    from tfdist.records import write as write_shards

    place = Path(folder, "large")
    write_shards((np.zeros((40, 8), np.float32), np.arange(40) % 4), place, split="train=1")
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["checksum"]
    size = (manifest["layout"]["record_bytes"] + 16) * _RECORDS_OF_A_SHARD
    names = [f"train-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)]
    for name in names:
        with open(place / name, "wb") as file:
            os.truncate(file.fileno(), size)
    total = shards * _RECORDS_OF_A_SHARD
    manifest["splits"]["train"] = {
        "records": total,
        "class_counts": {str(label): total // 4 for label in range(4)},
        "shards": [
            {"file": name, "records": _RECORDS_OF_A_SHARD, "bytes": size, "checksum": "00000000"}
            for name in names
        ],
    }
    (place / "manifest.json").write_text(json.dumps(manifest))
    start = time.perf_counter()
    open_records(place / "train")
    return time.perf_counter() - start


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    apart.answer((write, write_table, read, open_large))
