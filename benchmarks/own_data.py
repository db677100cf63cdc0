"""Reading what users bring, photos, text and tables, against the best loops written by hand.

As in ``records``, baseline and tfdist run in turn, in one process, on the same files.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import apart
from benchmarks.records import row, time_reads

if TYPE_CHECKING:
    import tensorflow as tf

_SIDE = 64
_BATCH_SIZE = 32
_ROWS_OF_A_BATCH = 256
_SHARDS = 4
_WEBDATASET = ("webdataset==1.0.2", "numpy==2.4.6", "pillow==13.0.0")
# Processes that read, each a file of its own.
_READERS = 2


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind: work, baseline and ours (records/s), ratio, target."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    scale, rounds = (20, 1) if quick else (1, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = _photos(folder, 1_000 // scale, rounds)
        if not quick:
            rows.append(_webdataset(folder, 1_000, rounds))
        rows += _text(folder, 50_000 // scale, rounds)
        rows += _table(folder, 50_000 // scale, rounds)
        rows += _limit(folder, 50_000 // scale, rounds)
    return rows


def _photos(folder: Path, count: int, rounds: int) -> list[dict]:
    import tensorflow as tf

    import tfdist
    from tfdist import records

    source = folder / "photos"
    for number, file in enumerate(_jpegs(count)):
        path = source / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file)
    data = folder / "photo_shards"
    options = {"split": "train=1", "num_shards": _SHARDS, "decode": False}
    records.write(source, data, resize=(_SIDE, _SIDE), **options)
    files = _files(data)
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def by_hand(antialias: bool, augmented: bool) -> tf.data.Dataset:
        def decoded(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            parsed = tf.io.parse_single_example(serialized, spec)
            image = tf.io.decode_jpeg(parsed["image"], 3)
            image = tf.image.resize(image, (_SIDE, _SIDE), antialias=antialias)
            return tf.saturate_cast(tf.round(image), tf.uint8), parsed["label"]

        def changed(number: tf.Tensor, record: tuple[tf.Tensor, tf.Tensor]) -> Any:
            image, label = record
            seed = tf.stack([number, number])
            image = tf.image.stateless_random_flip_left_right(image, seed)
            image = tf.image.stateless_random_brightness(image, 0.2, seed)
            image = tf.image.stateless_random_contrast(image, 0.8, 1.2, seed)
            return tf.image.stateless_random_saturation(image, 0.8, 1.2, seed), label

        dataset = tf.data.TFRecordDataset(files).map(decoded, num_parallel_calls=tf.data.AUTOTUNE)
        if augmented:
            dataset = dataset.enumerate().map(changed, num_parallel_calls=tf.data.AUTOTUNE)
        return dataset.batch(_BATCH_SIZE).prefetch(tf.data.AUTOTUNE)

    read = {"batch_size": _BATCH_SIZE, "cache": False}
    times = time_reads(
        {
            "smooth": by_hand(antialias=True, augmented=False),
            "jagged": by_hand(antialias=False, augmented=False),
            "augmented by hand": by_hand(antialias=True, augmented=True),
            "read": records.read(data, **read),
            "augmented": records.read(data, record_fn=tfdist.augment("flip,color"), **read),
        },
        rounds,
    )
    adopted = _adopting(folder, files, count, rounds)
    return [
        _row("photos resized", count, times["smooth"], times["read"], 1.0),
        _row("photos resized, aliased by hand", count, times["jagged"], times["read"], None),
        _row("photos augmented", count, times["augmented by hand"], times["augmented"], 1.0),
        adopted,
    ]


def _webdataset(folder: Path, count: int, rounds: int) -> dict:
    """The same photos in .tar files, read by webdataset in a process for each."""
    import tfdist
    from tfdist import records

    tars = [folder / f"{number}.tar" for number in range(_READERS)]
    photos = list(_jpegs(count))
    for number, path in enumerate(tars):
        with tarfile.open(path, "w") as archive:
            for record in range(number, count, _READERS):
                for suffix, content in (("jpg", photos[record]), ("cls", b"%d" % (record % 10))):
                    member = tarfile.TarInfo(f"{record}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    ours = records.read(
        folder / "photo_shards",
        record_fn=tfdist.augment("flip,crop"),
        batch_size=_BATCH_SIZE,
        cache=False,
    )
    python = apart.python_with("webdataset", *_WEBDATASET)
    program = Path(__file__).parent / "programs" / "webdataset_epochs.py"
    with subprocess.Popen(
        [python, program, str(_SIDE), str(_BATCH_SIZE), *tars],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        class Theirs:
            def __iter__(self) -> Iterator[int]:
                print(file=process.stdin, flush=True)
                read = int(process.stdout.readline())
                assert read == count, f"{read} of {count} photos were read"
                yield read

        times = time_reads({"theirs": Theirs(), "ours": ours}, rounds)
        process.stdin.close()
    return _row("photos augmented, webdataset", count, times["theirs"], times["ours"], 1.0)


def _jpegs(count: int) -> Iterable[bytes]:
    """Pieces of scikit-learn's two photos, each of a size of its own."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photos = load_sample_images().images
    for number in range(count):
        photo = photos[number % 2]
        height, width = rng.integers(200, 400, 2)
        top, left = rng.integers(0, 427 - height), rng.integers(0, 640 - width)
        file = io.BytesIO()
        Image.fromarray(photo[top : top + height, left : left + width]).save(file, "JPEG")
        yield file.getvalue()


def _adopting(folder: Path, files: list[str], count: int, rounds: int) -> dict:
    """Adopting files against only reading them: all bytes, both their checksums."""
    import tensorflow as tf

    from tfdist import records

    times: dict[str, list[float]] = {"read": [], "adopt": []}
    for round_number in range(rounds + 1):
        start = time.perf_counter()
        tf.data.TFRecordDataset(files).reduce(np.int64(0), lambda number, _: number + 1).numpy()
        between = time.perf_counter()
        records.adopt(files, folder / f"adopted-{round_number}", inputs="image", labels="label")
        if round_number:
            times["read"].append(between - start)
            times["adopt"].append(time.perf_counter() - between)
    return _row("adopt", count, times["read"], times["adopt"], 0.8)


def _text(folder: Path, count: int, rounds: int) -> list[dict]:
    import tensorflow as tf

    from tfdist import records

    rng = np.random.default_rng(0)
    words = np.array(["a", "film", "of", "great", "beauty", "and", "no", "plot"])
    texts = [" ".join(words[rng.integers(0, 8, rng.integers(5, 60))]) for _ in range(count)]
    data = folder / "texts"
    source = ({"text": texts}, rng.integers(0, 2, count))
    records.write(source, data, split="train=1", num_shards=_SHARDS)
    spec = {
        "text": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    parsed = tf.data.TFRecordDataset(_files(data)).map(
        lambda one: tf.io.parse_single_example(one, spec)
    )
    return [_against("text", count, parsed.batch(_ROWS_OF_A_BATCH), data, rounds, 3.0)]


def _table(folder: Path, count: int, rounds: int) -> list[dict]:
    import tensorflow as tf

    from tfdist import records

    rng = np.random.default_rng(0)
    path = folder / "table.csv"
    colours = np.array(["red", "green", "blue"])[rng.integers(0, 3, count)]
    with open(path, "w") as file:
        file.write(",".join([*(f"n{number}" for number in range(8)), "colour", "label"]) + "\n")
        numbers = rng.normal(size=(count, 8)).round(4).tolist()
        for row, colour, label in zip(numbers, colours, rng.integers(0, 2, count), strict=True):
            file.write(f"{','.join(map(str, row))},{colour},{label}\n")
    data = folder / "table"
    records.write(path, data, split="train=1", num_shards=_SHARDS)

    by_hand = tf.data.experimental.make_csv_dataset(
        str(path), _ROWS_OF_A_BATCH, label_name="label", num_epochs=1, shuffle=False
    )
    return [
        _against("table", count, by_hand, data, rounds, 3.0),
        _sharding_a_table(folder, path, count, rounds),
    ]


def _sharding_a_table(folder: Path, path: Path, count: int, rounds: int) -> dict:
    """A script that knows its columns, against one call that finds out what they are."""
    import tensorflow as tf

    from tfdist import records

    def feature(kind: str, values: list) -> tf.train.Feature:
        of_kind = type(getattr(tf.train.Feature(), kind))
        return tf.train.Feature(**{kind: of_kind(value=values)})

    def by_hand(file: Path) -> None:
        with open(path, newline="") as table, tf.io.TFRecordWriter(str(file)) as writer:
            for values in csv.DictReader(table):
                label, colour = int(values.pop("label")), values.pop("colour")
                features = {
                    "features": feature("float_list", list(map(float, values.values()))),
                    "colour": feature("bytes_list", [colour.encode()]),
                    "label": feature("int64_list", [label]),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())

    times: dict[str, list[float]] = {"by hand": [], "ours": []}
    for round_number in range(rounds + 1):
        start = time.perf_counter()
        by_hand(folder / "by_hand.tfrecord")
        between = time.perf_counter()
        out = folder / f"table-{round_number}"
        records.write(path, out, split="train=1", num_shards=_SHARDS)
        if round_number:
            times["by hand"].append(between - start)
            times["ours"].append(time.perf_counter() - between)
    return _row("table into shards", count, times["by hand"], times["ours"], 5.0)


def _limit(folder: Path, count: int, rounds: int) -> list[dict]:
    """How near reading comes to what there is to gain: the same bytes, not looked into."""
    import tensorflow as tf

    from tfdist import records

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    data = folder / "images"
    records.write(({"image": images}, rng.integers(0, 10, count)), data, split="train=1")
    limit = tf.data.TFRecordDataset(_files(data)).batch(_ROWS_OF_A_BATCH)
    return [_against("share of the limit", count, limit, data, rounds, 0.85)]


def _against(
    work: str, count: int, by_hand: tf.data.Dataset, data: Path, rounds: int, target: float
) -> dict:
    """Returns the row of reading shards against another way to the same records."""
    from tfdist import records

    ours = records.read(data, batch_size=_ROWS_OF_A_BATCH, cache=False)
    times = time_reads({"by hand": by_hand, "ours": ours}, rounds)
    return _row(work, count, times["by hand"], times["ours"], target)


def _files(data: Path) -> list[str]:
    return [str(path) for path in sorted(data.glob("*.tfrecord"))]


def _row(
    work: str, count: int, baseline: list[float], ours: list[float], target: float | None
) -> dict:
    return row(f"own data, {work}", count, baseline, ours, target)
