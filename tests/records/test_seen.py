"""What users really have: a row of the table for each kind that was once refused or mangled.

Each goes through the public calls alone, and is read back as a training reads it. What else is to
be said of a kind stands in the tests of the file that reads it; the memory that large sources take
is measured in the benchmarks.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records_of_others as others
import tensorflow as tf
from PIL import Image

import tfdist
from tfdist.errors import TfdistError
from tfdist.records import adopt, write

keras = tf.keras


@dataclass(frozen=True)
class Seen:
    """One kind of source.

    Attributes:
        name: of the issue's list.
        make: makes it in a folder, and returns it.
        options: of ``write``, or of ``adopt`` where that is what takes it.
        reads: what is looked at in the inputs and labels of all records of the split "train".
        gives: what that must be.
        refused: or the words of the line that refuses it.
        told: what is said of it besides.
    """

    name: str
    make: Callable[[Path], Any]
    options: dict[str, Any] = field(default_factory=dict)
    reads: Callable[[Any, Any], Any] = lambda x, y: sorted(y)
    gives: Any = None
    refused: str | None = None
    told: str = ""
    call: Callable[..., Any] = write


def photo(path: Path, height=6, width=8, mode="RGB", cut=0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    Image.new(mode, (width, height), 200).save(file, "JPEG")
    path.write_bytes(file.getvalue()[: -cut or None])


def photos(**of_the_last):
    """Makes four photos in two classes, of which the last is another."""

    def make(folder: Path) -> Path:
        for number in range(4):
            other = of_the_last if number == 3 else {}
            photo(folder / "ab"[number % 2] / f"{number}.jpg", **other)
        return folder

    return make


def trees(folder: Path) -> Path:
    for split in ("train", "val"):
        photos()(folder / split)
    return folder


def with_readme(folder: Path) -> Path:
    (folder / "a").mkdir(parents=True)
    (folder / "README.txt").write_text("photos")
    (folder / "a" / "Thumbs.db").write_text("?")
    return photos()(folder)


def texts(folder: Path) -> Path:
    for number, text in enumerate(["good", "bad", "fine", "poor"]):
        path = folder / ("no" if number % 2 else "yes") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """Makes one file."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
        return folder / name

    return make


MESSY = """,when,city,paid,size,label
0,2024-01-31,Rome,yes,1.5,1
1,2024-02-29,Oslo,no,,0
2,2024-03-01,Rome,yes,2.5,1
3,2024-03-02,Rome,no,3.5,0
4,2024-03-03,Oslo,no,4.5,0
"""
PLAIN = "a,b,label\n1,2,0\n3,4,1\n5,6,0\n7,8,1\n"
REVIEWS = [(f"film {number} was {'very ' * number}good", number % 2) for number in range(4)]
TEXTS = [(text.encode(), number) for text, number in sorted(REVIEWS)]
X, Y = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(4) % 2
UNEQUAL = [[1], [2, 2], [], [4, 4, 4]]
SUMS = [0, 1, 4, 12]


def saved(**arrays):
    def make(folder: Path) -> Path:
        folder.mkdir()
        np.savez(folder / "a.npz", **arrays)
        return folder / "a.npz"

    return make


def objects(values) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def one_npy(folder: Path) -> Path:
    folder.mkdir()
    np.save(folder / "x.npy", X)
    return folder / "x.npy"


def memory_map(folder: Path) -> Any:
    return np.load(one_npy(folder), mmap_mode="r"), Y


def parquet(folder: Path) -> Path:
    pandas = pytest.importorskip("pandas", reason="not in this lane")
    folder.mkdir()
    pandas.DataFrame({"a": [1, 2, 3, 4], "label": Y}).to_parquet(folder / "t.parquet")
    return folder / "t.parquet"


def data_frame(_: Path) -> Any:
    pandas = pytest.importorskip("pandas", reason="not in this lane")
    return pandas.DataFrame({"a": [1.0, 2, 3, 4], "city": ["x", "y", "x", "x"], "label": Y})


def boxes(folder: Path) -> Path:
    photos()(folder)
    lines = [{"file": f"{'ab'[n % 2]}/{n}.jpg", "boxes": [[0, 0, 0.5, 0.5]] * n} for n in range(4)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def records(_: Path):
    return ({"x": row, "label": label} for row, label in zip(X, Y, strict=True))


class Batches(keras.utils.Sequence):
    """A Keras Sequence of two batches."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return X[number * 2 : number * 2 + 2], Y[number * 2 : number * 2 + 2]


def unequal_dataset(_: Path) -> tf.data.Dataset:
    spec = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(
        lambda: zip(UNEQUAL, Y, strict=True), output_signature=spec
    )


def of_output_types(_: Path) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: zip(X, Y, strict=True), output_types=(tf.float32, tf.int64)
    )


def sequence_examples(folder: Path) -> Path:
    rows = [
        others.sequence_example({"label": n % 2}, {"tokens": [[t] for t in UNEQUAL[n]]})
        for n in range(4)
    ]
    others.write(folder / "train.tfrecord", rows)
    return folder


def total(x, y):
    return sorted(np.sum(x, axis=1))


SEEN = [
    Seen(
        "unequal photos",
        photos(height=20, width=3),
        {"resize": "5x4"},
        reads=lambda x, y: (x.shape, sorted(y)),
        gives=((4, 5, 4, 3), [0, 0, 1, 1]),
    ),
    Seen(
        "gray image among colour ones",
        photos(mode="L"),
        reads=lambda x, y: x.shape,
        gives=(4, 6, 8, 3),
    ),
    Seen("truncated JPEG", photos(cut=99), refused=r"b/3\.jpg"),
    Seen("train/CLASS trees", trees, gives=[0, 0, 1, 1]),
    Seen(
        "README.txt in a folder",
        with_readme,
        gives=[0, 0, 1, 1],
        told="2 files are left out as no images: README.txt, a/Thumbs.db",
    ),
    Seen(
        "text folder",
        texts,
        reads=lambda x, y: sorted(zip(x, y, strict=True)),
        gives=[(b"bad", 0), (b"fine", 1), (b"good", 1), (b"poor", 0)],
    ),
    Seen(
        "text CSV",
        file("t.csv", "text,label\n" + "".join(f"{t},{n}\n" for t, n in REVIEWS)),
        reads=lambda x, y: sorted(zip(x, y, strict=True)),
        gives=TEXTS,
    ),
    Seen(
        "JSON lines",
        file("t.jsonl", "\n".join(json.dumps({"text": t, "label": n}) for t, n in REVIEWS)),
        reads=lambda x, y: sorted(zip(x, y, strict=True)),
        gives=TEXTS,
    ),
    Seen(
        "string .npz",
        saved(x=np.array([text for text, _ in REVIEWS]), y=Y),
        reads=lambda x, y: sorted(zip(x, y, strict=True)),
        gives=TEXTS,
    ),
    Seen(
        "CSV with strings, dates, missing values, booleans and an index",
        file("t.csv", MESSY),
        refused=r"size.*missing",
    ),
    Seen(
        "the same, filled",
        file("t.csv", MESSY),
        {"missing": "mean"},
        reads=lambda x, y: sorted(
            zip(*x["features"].T.tolist(), x["city"], x["when"], y, strict=True)
        ),
        gives=[
            (0, 3, 0, 1709164800, 0),  # no, filled, Oslo, 2024-02-29
            (0, 3.5, 1, 1709337600, 0),
            (0, 4.5, 0, 1709424000, 0),
            (1, 1.5, 1, 1706659200, 1),
            (1, 2.5, 1, 1709251200, 1),
        ],
        told="1 missing in column 'size': filled with 3",
    ),
    Seen(
        "separators and latin-1",
        file("t.csv", "größe;label\n1,5;0\n2,5;1\n3,5;0\n4,5;1\n".encode("latin-1")),
        reads=total,
        gives=[1.5, 2.5, 3.5, 4.5],
    ),
    Seen("TSV", file("t.tsv", PLAIN.replace(",", "\t")), reads=total, gives=[3, 7, 11, 15]),
    Seen("gz", file("t.csv.gz", gzip.compress(PLAIN.encode())), reads=total, gives=[3, 7, 11, 15]),
    Seen("Parquet", parquet, reads=total, gives=[1, 2, 3, 4]),
    Seen(".npy", one_npy, reads=total, gives=list(X.sum(axis=1))),
    Seen(
        "three label columns",
        file("t.csv", "a,label_x,label_y,label_z\n1,0,1,1\n2,1,0,0\n"),
        refused="found label_x, label_y, label_z",
    ),
    Seen(
        "mnist.npz",
        saved(x_train=X, y_train=Y, x_test=X, y_test=Y),
        reads=total,
        gives=list(X.sum(axis=1)),
    ),
    Seen("ragged .npz", saved(x=objects(UNEQUAL), y=Y), reads=total, gives=SUMS),
    Seen("RaggedTensor", lambda _: (tf.ragged.constant(UNEQUAL), Y), reads=total, gives=SUMS),
    Seen("dataset of unequal lengths", unequal_dataset, reads=total, gives=SUMS),
    Seen(
        "detection boxes",
        boxes,
        {"labels": "labels.jsonl"},
        reads=lambda x, y: sorted(np.sum(y, axis=(1, 2))),
        gives=[0, 1, 2, 3],
    ),
    Seen(
        "DataFrame",
        data_frame,
        reads=lambda x, y: sorted(zip(x["features"][:, 0], x["city"], y, strict=True)),
        gives=[(1, b"x", 0), (2, b"y", 1), (3, b"x", 0), (4, b"x", 1)],
    ),
    Seen("generator", records, reads=total, gives=list(X.sum(axis=1))),
    Seen("Sequence", lambda _: Batches(), reads=total, gives=list(X.sum(axis=1))),
    Seen("generator with output_types", of_output_types, reads=total, gives=list(X.sum(axis=1))),
    Seen("memory map", memory_map, reads=total, gives=list(X.sum(axis=1))),
    Seen("TFDS folder", others.tfds, gives=[0, 0, 1, 1, 2, 2], call=adopt),
    Seen("Model Garden", others.imagenet, {"resize": "4x4"}, gives=[1, 1, 2, 2, 3, 3], call=adopt),
    Seen("SequenceExample", sequence_examples, reads=total, gives=SUMS, call=adopt),
    Seen(
        "s3:// shown as s3:/",
        lambda _: (X, Y),
        {"out": Path("s3://bucket/data"), "resume": True},
        refused="found s3://bucket/data",
    ),
]


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen.name)
def test_what_users_have(seen, tmp_path, capsys):
    source, out = seen.make(tmp_path / "source"), tmp_path / "out"
    options = dict(seen.options)
    if "labels" in options:
        options["labels"] = source / options["labels"]
    if seen.call is write:
        options = {"num_shards": 1, "out": out, **options}
        if seen.name not in ("train/CLASS trees", "mnist.npz"):
            options["split"] = "train=1"
    if seen.refused is not None:
        with pytest.raises(TfdistError, match=seen.refused):
            seen.call(source, **options)
        assert not out.exists()
        return
    seen.call(source, **options)
    folder = out if seen.call is write else source
    feed = tfdist.strategy("single").dataset(
        str(folder / "train"), global_batch_size=100, training=False
    )
    (batch,) = feed.epochs(0, 1)
    x, *y = tf.nest.map_structure(lambda part: part.numpy(), batch)
    assert seen.reads(x, *y or [None]) == seen.gives
    assert seen.told in capsys.readouterr().out
