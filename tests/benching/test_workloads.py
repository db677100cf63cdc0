"""Built-in models and data: they fit each other, can be learnt, and CIFAR-10's files are read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from tiers import long

from tfdist.benching import workloads
from tfdist.errors import DataError, OptionError
from tfdist.records import load_manifest, read
from tfdist.training.engine import model_path


@pytest.mark.parametrize("name", ["mlp", *long("transformer")])
def test_a_model_learns_the_data_that_go_with_it(name, tmp_path):
    data = workloads.write_data(workloads.MODELS[name], 1200, tmp_path)
    splits = load_manifest(data).splits
    assert {split: info.records for split, info in splits.items()} == {
        "train": 1000,
        "validation": 200,
    }
    model = model_path.load(workloads.write_model(name, 32, tmp_path))()
    batches = read(Path(data, "train"), batch_size=50)
    history = model.fit(batches, epochs=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["accuracy"][-1] > 0.2


def test_a_residual_network_is_that_of_its_depth_at_the_size_that_is_asked_for():
    model = workloads.resnet50v2(image_size=64)
    assert model.input_shape == (None, 32, 32, 3)
    assert model.get_layer("resnet50v2").input_shape == (None, 64, 64, 3)
    # Keras' own count without its top, and 10 classes of 2,048 features.
    assert model.count_params() == 23_564_800 + 10 * 2_049


def test_an_unknown_model_lists_the_known_ones(tmp_path):
    with pytest.raises(OptionError, match="resnet50v2, resnet152v2, mlp, transformer"):
        workloads.write_model("resnet", 32, tmp_path)


def written_by_python_2(images: np.ndarray, labels: list[int]) -> bytes:
    """Returns a batch as CIFAR-10's authors have pickled theirs: bytes are BINSTRINGs."""
    rows, values = images.shape
    shape = b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", values) + b"\x86"
    data = images.tobytes()
    return b"".join(
        [
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n",
            b"K\x00\x85U\x01b\x87R(K\x01" + shape,
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + struct.pack("<i", len(data)) + data + b"tb",
            b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu.",
        ]
    )


@pytest.fixture
def cifar(tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / workloads.CIFAR_FOLDER
    folder.mkdir()
    batches = {}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        images = random.integers(256, size=(4, 3072), dtype=np.uint8)
        labels = random.integers(10, size=4).tolist()
        (folder / name).write_bytes(written_by_python_2(images, labels))
        batches[name] = images, labels
    return folder, batches


def test_cifar_10_of_the_users_own_is_read(cifar, tmp_path):
    folder, batches = cifar
    assert workloads.is_built_in(str(folder))
    data = workloads.write_data(str(folder), 100, tmp_path)
    splits = [read(Path(data, split), batch_size=1) for split in ("train", "validation")]
    found = [(x.numpy().tobytes(), int(y[0])) for split in splits for x, y in split]
    assert len(found) == 24
    # Red, then green, then blue, row by row.
    expected = {
        (image.reshape(3, 32, 32).transpose(1, 2, 0).tobytes(), label)
        for images, labels in batches.values()
        for image, label in zip(images, labels, strict=True)
    }
    assert set(found) == expected


@pytest.mark.parametrize(
    "damaged",
    [b"", b"cposix\nsystem\n(S'true'\ntR.", b"\x80\x02]."],
    ids=["empty", "code", "a list"],
)
def test_a_damaged_batch_is_named(damaged, cifar, tmp_path):
    (cifar[0] / "data_batch_2").write_bytes(damaged)
    with pytest.raises(DataError, match=r"cifar-10-batches-py must have.*data_batch_2"):
        workloads.write_data(str(cifar[0]), 100, tmp_path)
