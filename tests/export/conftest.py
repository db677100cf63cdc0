"""A trained model and its data, made once for all tests of the export."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """The folder of the shards, splits train and validation."""
    from tfdist.records.writing.writer import write

    folder = tmp_path_factory.mktemp("data") / "digits"
    write("digits", folder, num_shards=2)
    return folder


@pytest.fixture(scope="session")
def trained(digits):
    """The model of examples/digits.py after some epochs: 97 % on validation."""
    import tensorflow as tf

    import tfdist

    spec = importlib.util.spec_from_file_location("digits_example", _EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tf.keras.utils.set_random_seed(0)
    with tfdist.strategy("single") as strategy:
        model = strategy.build(module.model_fn)
        data = strategy.dataset(digits / "train", global_batch_size=64)
        model.fit(data, epochs=8, verbose=0)
    return model


@pytest.fixture(scope="session")
def model_file(trained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "digits.keras"
    trained.save(path)
    return path


@pytest.fixture(scope="session")
def validation(digits):
    """All of validation: uint8 [299, 8, 8, 1] in 0..16, int64 [299]."""
    from tfdist.records.reading.reader import open_records

    records = open_records(digits / "validation")
    (batch,) = records.batches(0, records.num_records, 1000, shuffle=False, seed=0, epoch=0)
    return tuple(tensor.numpy() for tensor in batch)
