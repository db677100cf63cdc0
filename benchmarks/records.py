"""Writing and reading records against the loops that people write by hand.

Every ratio is the median over rounds in which baseline and tfdist run in turn, in one process, on
the same records: 32x32x3 uint8 images with a label, in 8 shards. Absolute times are not compared.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

_SHARDS = 8
_BATCH_SIZE = 256
_COLUMNS = ("work", "baseline", "ours", "ratio", "target")


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind of work: work, baseline and ours (records/s), ratio, target."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    num_records, rounds = (5_000, 2) if quick else (50_000, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images, labels = _photos(num_records)
        rows = _writing(folder, images, labels, rounds)
        rows += _reading(folder, images, labels, rounds)
        rows += _gzip_writing(folder, *_sparse(num_records), rounds)
        rows += _decoding(folder, images, labels, rounds)
        rows += _checksums(folder / "data", num_records, rounds)
    return rows


def _photos(num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """Smooth areas with a little noise: compresses about like photos do."""
    rng = np.random.default_rng(0)
    areas = rng.integers(0, 256, (num_records, 8, 8, 3), dtype=np.uint8)
    images = areas.repeat(4, axis=1).repeat(4, axis=2)
    images += rng.integers(0, 8, images.shape, dtype=np.uint8)
    return images, rng.integers(0, 10, num_records)


def _sparse(num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's handwritten digits, each somewhere on a black canvas."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(digits.images), num_records)
    images = np.zeros((num_records, 32, 32, 3), np.uint8)
    for image, row in zip(images, chosen, strict=True):
        top, left = rng.integers(0, 24, 2)
        image[top : top + 8, left : left + 8] = digits.images[row][..., np.newaxis] * 15
    return images, digits.target[chosen]


def _naive_write(folder: Path, images: np.ndarray, labels: np.ndarray, compression: str) -> None:
    """What tutorials show: an Example and a write for every record."""
    import tensorflow as tf

    folder.mkdir()
    options = tf.io.TFRecordOptions(compression_type=compression)
    for shard, rows in enumerate(np.array_split(np.arange(len(images)), _SHARDS)):
        with tf.io.TFRecordWriter(str(folder / f"{shard}.tfrecord"), options) as writer:
            for row in rows:
                image = tf.train.BytesList(value=[images[row].tobytes()])
                label = tf.train.Int64List(value=[labels[row]])
                example = tf.train.Example(
                    features=tf.train.Features(
                        feature={
                            "image": tf.train.Feature(bytes_list=image),
                            "label": tf.train.Feature(int64_list=label),
                        }
                    )
                )
                writer.write(example.SerializeToString())


def _our_write(
    folder: Path, images: np.ndarray, labels: np.ndarray, compression: str, workers: int
) -> None:
    from tfdist import records

    records.write(
        ({"image": images}, labels),
        folder,
        num_shards=_SHARDS,
        split="train=1",
        compression=compression,
        workers=workers,
    )


def _writing(folder: Path, images: np.ndarray, labels: np.ndarray, rounds: int) -> list[dict]:
    cases = {
        "by hand": lambda out: _naive_write(out, images, labels, ""),
        "one": lambda out: _our_write(out, images, labels, "none", 1),
        "two": lambda out: _our_write(out, images, labels, "none", 2),
    }
    times = _time_writes(folder, cases, rounds)
    return [
        row("write, 1 worker", len(images), times["by hand"], times["one"], 4.0),
        row("write, 2 workers", len(images), times["by hand"], times["two"], 5.0),
    ]


def _gzip_writing(folder: Path, images: np.ndarray, labels: np.ndarray, rounds: int) -> list[dict]:
    cases = {
        "by hand": lambda out: _naive_write(out, images, labels, "GZIP"),
        "one": lambda out: _our_write(out, images, labels, "gzip", 1),
    }
    times = _time_writes(folder, cases, rounds)
    return [row("write gzip, sparse images", len(images), times["by hand"], times["one"], 1.4)]


def _time_writes(
    folder: Path, cases: dict[str, Callable[[Path], None]], rounds: int
) -> dict[str, list[float]]:
    import shutil

    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        for name, write in cases.items():
            out = folder / "written"
            start = time.perf_counter()
            write(out)
            elapsed = time.perf_counter() - start
            shutil.rmtree(out)
            if round_number:  # the first round warms up
                times[name].append(elapsed)
    return times


def _reading(folder: Path, images: np.ndarray, labels: np.ndarray, rounds: int) -> list[dict]:
    import tensorflow as tf

    from tfdist.records.format.manifest import load_manifest
    from tfdist.records.reading.reader import open_records

    data = folder / "data"
    _our_write(data, images, labels, "none", 1)
    manifest = load_manifest(data)
    files = [str(data / shard.file) for shard in manifest.splits["train"].shards]
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse_one(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(serialized, spec)
        image = tf.io.decode_raw(parsed["image"], tf.uint8)
        return tf.reshape(image, (32, 32, 3)), parsed["label"]

    def opened(source: Path, cache: bool) -> tf.data.Dataset:
        return open_records(source, cache=cache).batches(
            0, len(images), _BATCH_SIZE, shuffle=cache, seed=0, epoch=0
        )

    cases = {
        "by hand": tf.data.TFRecordDataset(files).map(parse_one).batch(_BATCH_SIZE),
        "general": opened(_without_layout(data), cache=False),
        "layout": opened(data, cache=False),
        "memory": opened(data, cache=True),
    }
    times = time_reads(cases, rounds)
    return [
        row("read, any schema", len(images), times["by hand"], times["general"], 8.0),
        row("read, fixed layout", len(images), times["by hand"], times["layout"], 11.0),
        row("read, in memory, shuffled", len(images), times["by hand"], times["memory"], None),
    ]


def _decoding(folder: Path, images: np.ndarray, labels: np.ndarray, rounds: int) -> list[dict]:
    """What it costs `tfdist shard` to decode each image before it is kept."""
    from PIL import Image

    from tfdist import records

    source = folder / "pictures"
    for number, (image, label) in enumerate(zip(images[:5_000], labels, strict=False)):
        path = source / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)

    def write(decode: bool) -> Callable[[Path], None]:
        return lambda out: records.write(
            source, out, num_shards=_SHARDS, split="train=1", decode=decode
        )

    cases = {"no check": write(False), "check": write(True)}
    times = _time_writes(folder, cases, rounds)
    return [row("shard images, decoded", 5_000, times["no check"], times["check"], None)]


def _checksums(data: Path, num_records: int, rounds: int) -> list[dict]:
    """An epoch of a small convnet that also sums the files, against one that knows their sums.

    Processor seconds: summing happens beside the steps.
    """
    import tensorflow as tf

    from tfdist import records

    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((32, 32, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    epoch = records.read(data / "train", batch_size=_BATCH_SIZE, cache=False)
    times: dict[str, list[float]] = {"known": [], "summed": []}
    for round_number in range(rounds + 1):
        for name, seconds in times.items():
            if name == "summed":
                for shard in data.glob("*.tfrecord"):
                    shard.touch()  # As a file that nobody has seen yet.
            start = time.process_time()
            model.fit(epoch, epochs=1, verbose=0)
            if round_number:
                seconds.append(time.process_time() - start)
    return [row("epoch, files summed", num_records, times["known"], times["summed"], 0.98)]


def _without_layout(data: Path) -> Path:
    """Returns a folder of the same shards whose records have to be parsed."""
    from tfdist.records import load_manifest

    folder = data.with_name("without_layout")
    folder.mkdir()
    for shard in data.glob("*.tfrecord"):
        os.link(shard, folder / shard.name)
    dataclasses.replace(load_manifest(data), layout=None).save(folder)
    return folder


def time_reads(cases: dict[str, Iterable[Any]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round of each case; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        for name, dataset in cases.items():
            start = time.perf_counter()
            for _ in dataset:
                pass
            if round_number:
                times[name].append(time.perf_counter() - start)
    return times


def row(
    work: str, num_records: int, baseline: list[float], ours: list[float], target: float | None
) -> dict:
    return {
        "work": work,
        "baseline": round(num_records / statistics.median(baseline)),
        "ours": round(num_records / statistics.median(ours)),
        "ratio": round(statistics.median(b / o for b, o in zip(baseline, ours, strict=True)), 2),
        "target": target,
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Records per second, by hand and with tfdist")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "work" else "right")
    for row in run():
        table.add_row(*(_cell(row[name]) for name in _COLUMNS))
    Console().print(table)


if __name__ == "__main__":
    main()
