"""Models and data that are always there, so that a machine can be measured before one has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import DataError, unknown_choice
from tfdist.records.writing.object_arrays import RefusedError, read_named_arrays

if TYPE_CHECKING:
    import tensorflow as tf

_CLASSES = 10
_TOKENS, _VOCABULARY = 64, 1_000
CIFAR_FOLDER = "cifar-10-batches-py"

# Models ------------------------------------------------------------------------------------------


def resnet50v2(image_size: int = 32) -> tf.keras.Model:
    """Returns Keras' ResNet50V2 for images of CIFAR-10: uint8 [32, 32, 3], 10 classes.

    Args:
        image_size: height and width to which the model itself resizes them.
    """
    return _residual("ResNet50V2", image_size)


def resnet152v2(image_size: int = 32) -> tf.keras.Model:
    """Returns Keras' ResNet152V2; see ``resnet50v2``."""
    return _residual("ResNet152V2", image_size)


def mlp(image_size: int = 32) -> tf.keras.Model:
    """Returns three dense layers of 1,024 on the pixels: all of its step is products of matrices
    and gradients to send. See ``resnet50v2``."""
    from tensorflow import keras

    images, scaled = _images(image_size)
    values = keras.layers.Flatten()(scaled)
    for _ in range(3):
        values = keras.layers.Dense(1024, activation="relu")(values)
    return _classifier(images, keras.layers.Dense(_CLASSES)(values), "mlp")


def transformer() -> tf.keras.Model:
    """Returns two blocks of a transformer on 64 tokens of 1,000: int32 [64], 10 classes."""
    from tensorflow import keras

    layers = keras.layers
    width, heads = 128, 4
    tokens = keras.Input((_TOKENS,), dtype="int32", name="tokens")
    values = layers.Embedding(_VOCABULARY, width)(tokens)
    for _ in range(2):
        normed = layers.LayerNormalization()(values)
        seen = layers.MultiHeadAttention(heads, width // heads)(normed, normed)
        values = layers.Add()([values, seen])
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(values))
        values = layers.Add()([values, layers.Dense(width)(inner)])
    pooled = layers.GlobalAveragePooling1D()(values)
    return _classifier(tokens, layers.Dense(_CLASSES)(pooled), "transformer")


def _residual(kind: str, image_size: int) -> tf.keras.Model:
    from tensorflow import keras

    images, scaled = _images(image_size)
    shape = (image_size, image_size, 3)
    body = getattr(keras.applications, kind)(
        include_top=False, weights=None, input_shape=shape, pooling="avg"
    )
    return _classifier(images, keras.layers.Dense(_CLASSES)(body(scaled)), kind.lower())


def _images(image_size: int) -> tuple[Any, Any]:
    """Returns an input of images, and what a model computes on: that size, from -1 to 1."""
    from tensorflow import keras

    images = keras.Input((32, 32, 3), dtype="uint8", name="image")
    values = images
    if image_size != 32:
        values = keras.layers.Resizing(image_size, image_size)(values)
    return images, keras.layers.Rescaling(1 / 127.5, offset=-1)(values)


def _classifier(inputs: Any, outputs: Any, name: str) -> tf.keras.Model:
    from tensorflow import keras

    model = keras.Model(inputs, outputs, name=name)
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# name -> the data that go with it.
MODELS = {
    "resnet50v2": "cifar10-like",
    "resnet152v2": "cifar10-like",
    "mlp": "cifar10-like",
    "transformer": "tokens-like",
}


def check_model(name: str) -> None:
    """Raises OptionError: there is no such model."""
    if name not in MODELS:
        raise unknown_choice("built-in model", name, list(MODELS))


def write_model(name: str, image_size: int, folder: Path) -> str:
    """Writes a small file that makes one of ``MODELS``, to be looked at and changed.

    Returns:
        FILE.py:NAME, as ``tfdist train`` takes it.

    Raises:
        OptionError: there is no such model.
    """
    check_model(name)
    size = "" if name == "transformer" else f"image_size={image_size}"
    file = folder / "model.py"
    file.write_text(
        f'"""What `tfdist bench` has measured; change it, and give it as --model."""\n\n'
        f"from tfdist.benching import workloads\n\n\n"
        f"def model_fn():\n    return workloads.{name}({size})\n"
    )
    return f"{file}:model_fn"


# Data --------------------------------------------------------------------------------------------


def cifar10_like(records: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of CIFAR-10's shape that can be learnt: uint8 [records, 32, 32, 3], int64.

    Each class has a pattern of its own, coarse and coloured, which noise covers for the most part.
    """
    random = np.random.default_rng(seed)
    patterns = random.normal(size=(_CLASSES, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    labels = random.integers(_CLASSES, size=records)
    images = np.empty((records, 32, 32, 3), np.uint8)
    for start in range(0, records, 1_000):  # In float64 all of them would be 1.5 GB.
        part = labels[start : start + 1_000]
        noise = random.normal(size=(len(part), 32, 32, 3))
        images[start : start + 1_000] = np.clip(
            128 + 20 * patterns[part] + 50 * noise, 0, 255
        ).astype(np.uint8)
    return images, labels


def tokens_like(records: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens, int32 [records, 64], of which some are of the row's class."""
    random = np.random.default_rng(seed)
    labels = random.integers(_CLASSES, size=records)
    tokens = random.integers(_VOCABULARY, size=(records, _TOKENS), dtype=np.int32)
    told = random.random((records, _TOKENS)) < 0.2
    own = (tokens // _CLASSES * _CLASSES + labels[:, None]).astype(np.int32)
    return np.where(told, own, tokens), labels


_GENERATED: dict[str, Callable[[int, int], tuple[np.ndarray, np.ndarray]]] = {
    "cifar10-like": cifar10_like,
    "tokens-like": tokens_like,
}


def is_built_in(data: str) -> bool:
    """Whether ``write_data`` has to write what ``data`` names before it can be trained on."""
    return data in _GENERATED or Path(data).name == CIFAR_FOLDER


def write_data(data: str, records: int, folder: Path, seed: int = 0) -> str:
    """Writes shards with the splits train and validation, 5 to 1; returns their folder.

    Args:
        data: "cifar10-like" or "tokens-like", which are generated; or the folder
            cifar-10-batches-py of CIFAR-10 "python version" (Krizhevsky 2009).
        records: how many, of both splits together.

    Raises:
        DataError: the folder of CIFAR-10 does not have its files.
    """
    from tfdist.records.writing.writer import write

    if data in _GENERATED:
        found = _GENERATED[data](records, seed)
    else:
        found = tuple(part[:records] for part in _cifar10(Path(data)))
    out = folder / "data"
    write(found, out, split="train=5,validation=1", seed=seed)
    return str(out)


def _cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        try:
            with open(folder / name, "rb") as file:
                found = read_named_arrays(file)
            images.append(np.reshape(found["data"], (-1, 3, 32, 32)).transpose(0, 2, 3, 1))
            labels.append(np.asarray(found["labels"], np.int64))
        except (OSError, KeyError, TypeError, ValueError, RefusedError) as error:
            raise DataError(
                f"{CIFAR_FOLDER} must have data_batch_1 to data_batch_5 and test_batch",
                received=f"{folder / name}: {error}",
                mend="Unpack CIFAR-10's python version anew, or give cifar10-like",
            ) from None
    return np.concatenate(images).astype(np.uint8), np.concatenate(labels)
