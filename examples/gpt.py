"""A small GPT on the characters of a text that ships with scikit-learn.

It is divided over a mesh of devices; CPUs are taken where there are no GPUs. First it proves that
its weights are those of one device, then it prints where each weight lies, trains and writes on:

python -m tfdist.examples.gpt --batch 1 --model 2 --epochs 5
"""

from __future__ import annotations

import argparse
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

CONTEXT = 32
WIDTH, HEADS, BLOCKS = 64, 4, 2
VOCABULARY = 128  # ASCII


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns (x, y): int32 [windows, CONTEXT], each character and the one that follows it."""
    try:
        folder = resources.files("sklearn.datasets") / "descr"
    except ModuleNotFoundError:
        raise SystemExit(
            "gpt: its text comes with scikit-learn: pip install scikit-learn"
        ) from None
    names = ("breast_cancer.rst", "diabetes.rst", "digits.rst", "iris.rst", "wine_data.rst")
    text = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    characters = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(characters, CONTEXT + 1)[:: CONTEXT // 2]
    return windows[:, :-1].copy(), windows[:, 1:].copy()


class Positions(layers.Layer):
    """Adds a learned vector for each position. x: float32 [batch, time, WIDTH]."""

    def __init__(self, **options: object):
        super().__init__(**options)
        self.table = layers.Embedding(CONTEXT, WIDTH)

    def call(self, x):
        import tensorflow as tf

        return x + self.table(tf.range(tf.shape(x)[1]))


def model_fn() -> keras.Model:
    """Returns a compiled model: characters [batch, CONTEXT] -> logits of the next ones."""
    inputs = keras.Input((CONTEXT,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(inputs))
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    outputs = layers.Dense(VOCABULARY)(layers.LayerNormalization()(x))
    model = keras.Model(inputs, outputs, name="gpt")
    model.compile(
        # A larger epsilon than Adam's own: gradients near zero would enlarge rounding.
        keras.optimizers.Adam(3e-3, epsilon=1e-4, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def continued(model: keras.Model, text: str, length: int) -> str:
    """Returns ``text`` and ``length`` more characters, drawn one by one."""
    rng = np.random.default_rng(0)
    characters = [ord(c) for c in text]
    for _ in range(length):
        window = np.zeros((1, CONTEXT), np.int32)
        last = characters[-CONTEXT:]
        window[0, : len(last)] = last
        logits = model.predict(window, verbose=0)
        odds = np.exp(logits[0, len(last) - 1].astype(np.float64))
        characters.append(rng.choice(VOCABULARY, p=odds / odds.sum()))
    return "".join(map(chr, characters))


def main() -> None:
    import tfdist
    from tfdist.errors import TfdistError

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1, help="parts of each batch (1)")
    parser.add_argument("--model", type=int, default=2, help="parts of the weights (2)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs to train for (5)")
    options = parser.parse_args()
    try:
        with tfdist.strategy("mesh", batch=options.batch, model=options.model) as strategy:
            run(strategy, options.epochs)
    except TfdistError as error:
        parser.error(str(error))


def run(strategy: Strategy, epochs: int) -> None:
    import tfdist

    report = tfdist.verify(model_fn, data(), strategy, global_batch_size=32)
    print(report, flush=True)
    model = strategy.build(model_fn)
    strategy.describe(model, global_batch_size=32)
    model.fit(strategy.dataset(data(), global_batch_size=32), epochs=epochs, verbose=2)
    print(continued(model, "The data set ", 60))


if __name__ == "__main__":
    main()
