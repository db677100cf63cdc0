"""A small GPT on the characters of a text that ships with scikit-learn.

tfdist train reads shards; this example makes its records itself:

python examples/gpt.py --batch 1 --model 2
"""

from __future__ import annotations

import argparse
from importlib import resources

import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

CONTEXT = 32
WIDTH, HEADS, BLOCKS = 64, 4, 2
VOCABULARY = 128  # ASCII


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns (x, y): int32 [windows, CONTEXT], each character and the one that follows it."""
    folder = resources.files("sklearn.datasets") / "descr"
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


def main() -> None:
    import tfdist

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--model", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    with tfdist.strategy("mesh", batch=options.batch, model=options.model) as strategy:
        print(tfdist.verify(model_fn, data(), strategy, global_batch_size=32))
        model = strategy.build(model_fn)
        strategy.describe(model, global_batch_size=32)
        model.fit(strategy.dataset(data(), global_batch_size=32), epochs=options.epochs, verbose=2)


if __name__ == "__main__":
    main()
