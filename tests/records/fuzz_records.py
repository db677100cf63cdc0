"""What reads manifests and shards, for tests/fuzzing.py: nothing but what was written is read."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import numpy as np
from crc32c import crc32c
from fuzzing import Target, Wrong, cli
from PIL import Image

from tfdist.records import write
from tfdist.records.format.encoding import mask

_LENGTHS = (0, 1, 2**31, 2**36, 2**40, 2**63, 2**64 - 17, 2**64 - 5, 2**64 - 1)
_NUM_RECORDS = 36
_BATCH = 16


def length_with_right_checksum(path: Path, rng: Any) -> None:
    """Writes another length into a frame, with a checksum that fits; a frame begins at byte 0."""
    data = bytearray(path.read_bytes())
    starts, offset = [], 0
    while offset + 12 <= len(data):
        starts.append(offset)
        offset += 16 + struct.unpack_from("<Q", data, offset)[0]
    length = struct.pack("<Q", rng.choice((*_LENGTHS, rng.randrange(2**64))))
    start = rng.choice(starts)
    data[start : start + 12] = length + struct.pack("<I", mask(crc32c(length)))
    path.write_bytes(data)


def cut_between_records(path: Path, rng: Any) -> None:
    data = path.read_bytes()
    size = 16 + struct.unpack_from("<Q", data)[0]
    path.write_bytes(data[: rng.randrange(len(data) // size) * size])


def of_another_seed(path: Path, rng: Any) -> None:
    """Puts the shard of the same name there, of the same data dealt with another seed."""
    other = path.parents[1] / "other" / path.name
    if other.is_file():
        path.write_bytes(other.read_bytes())
    else:
        mutations.splice(path, rng)


def targets(folder: Path) -> list[Target]:
    _write(folder)
    shard = "train-00001-of-00003.tfrecord"
    damaged_shards = (*mutations.BYTES, *mutations.PLACES, cut_between_records, of_another_seed)
    lengths = (length_with_right_checksum,) * 3
    damaged_manifests = (*(*mutations.JSON, *mutations.JSON, *mutations.BYTES, *mutations.PLACES),)
    found = []

    def add(kind: str, file: str, changes: Any, use: Callable[..., object], *args: Any) -> None:
        target = folder / file
        bound = functools.partial(use, *args)
        found.append(Target(kind=kind, file=target, mutations=changes, use=bound))

    arrays, zipped, images = folder / "arrays", folder / "gzip", folder / "images"
    clients = folder / "clients"
    # What is right, read before anything is damaged.
    truth = {at: _contents(at / "train") for at in (arrays, zipped, images, clients)}
    for kind, file, changes in (
        ("shard", f"arrays/{shard}", (*damaged_shards, *lengths)),
        ("manifest.json", "arrays/manifest.json", damaged_manifests),
    ):
        add(f"{kind}, streamed", file, changes, _read, arrays, truth[arrays], False)
        add(f"{kind}, in memory", file, changes, _read, arrays, truth[arrays], True)
        add(f"{kind}, fit", file, changes, _fit, arrays)
        add(f"{kind}, inspect", file, changes, cli, "inspect", arrays)
        add(f"{kind}, inspect --check", file, changes, cli, "inspect", arrays, "--check")
    add("shard of gzip", f"gzip/{shard}.gz", damaged_shards, _read, zipped, truth[zipped], False)
    changes = (*damaged_shards[:-2], *lengths)
    add("shard of images", f"images/{shard}", changes, _read, images, truth[images], False)
    one = "train-00001-of-00004.tfrecord"
    add("shard of a client", f"clients/{one}", damaged_shards, _clients, clients, truth[clients])
    manifest = "clients/manifest.json"
    add("manifest of clients", manifest, damaged_manifests, _clients, clients, truth[clients])
    add("manifest of clients, inspect", manifest, damaged_manifests, cli, "inspect", clients)
    return found


def _write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (_NUM_RECORDS * 6 // 5, 5, 3), np.uint8)
    source = ({"x": x}, np.arange(len(x)) % 3)
    write(source, folder / "arrays", num_shards=3)
    write(source, folder / "other", num_shards=3, seed=1)
    write(source, folder / "gzip", num_shards=3, compression="gzip")
    write(source, folder / "clients", clients=4, partition="iid")
    for number in range(len(x)):
        path = folder / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number]).save(path)
    write(folder / "photos", folder / "images", num_shards=3)


def _contents(split: Path, cache: bool | str = "auto") -> list[np.ndarray]:
    import tensorflow as tf

    from tfdist import records
    from tfdist.records.reading.reader import explain_read_error

    dataset = records.read(split, batch_size=_BATCH, cache=cache)
    try:
        batches = list(dataset.as_numpy_iterator())
    except tf.errors.OpError as error:
        raise explain_read_error(error, split) or error from error
    return [np.concatenate(column) for column in zip(*batches, strict=True)]


def _read(folder: Path, truth: list[np.ndarray], cache: bool) -> None:
    _compare(_contents(folder / "train", cache), truth)


def _compare(found: list[np.ndarray], truth: list[np.ndarray]) -> None:
    if len(found) != len(truth):
        raise Wrong(f"{len(found)} columns for {len(truth)}")
    for ours, theirs in zip(found, truth, strict=True):
        if ours.dtype != theirs.dtype or not np.array_equal(ours, theirs):
            raise Wrong(f"{ours.dtype} {ours.shape} of other values")


@functools.lru_cache(maxsize=1)
def _model() -> tuple[Any, Any]:
    import tensorflow as tf

    import tfdist

    def model_fn() -> tf.keras.Model:
        layers = [tf.keras.layers.Flatten(input_shape=(5, 3)), tf.keras.layers.Dense(3)]
        model = tf.keras.Sequential(
            [tf.keras.layers.Rescaling(1 / 255, input_shape=(5, 3)), *layers]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    strategy = tfdist.strategy("single")
    strategy.__enter__()
    return strategy, strategy.build(model_fn)


def _fit(folder: Path) -> None:
    """Trains on what is streamed, and so on what may change while it is read."""
    strategy, model = _model()
    from tfdist.records.reading import reader

    kept, reader.TABLE_BYTES = reader.TABLE_BYTES, 0
    try:
        train = strategy.dataset(folder / "train", global_batch_size=8)
        test = strategy.dataset(folder / "validation", global_batch_size=8, training=False)
        model.fit(train, validation_data=test, verbose=0)
    finally:
        reader.TABLE_BYTES = kept
    if train.num_records != _NUM_RECORDS:
        raise Wrong(f"trained on {train.num_records} records")


def _clients(folder: Path, truth: list[np.ndarray]) -> None:
    from tfdist.records.clients.collection import open_clients

    clients = open_clients(folder / "train")
    loaded = [clients.load(client) for client in clients.ids]
    _compare([np.concatenate(column) for column in zip(*loaded, strict=True)], truth)
