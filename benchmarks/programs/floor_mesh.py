"""What a step of the transformer in parts takes in plain TensorFlow: ``floor_mesh.py ROUNDS OUT``.

The forward and the backward pass, and Adam, in one graph on one device and without an engine:
whole, and as a mesh of 2x2 divides them, by halves of the batch, of the heads, of the hidden units
and of the vocabulary. Rounds of both run in turn, and their losses must be equal.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

_WIDTH, _LENGTH, _VOCABULARY, _ROWS, _HEADS, _BLOCKS = 256, 64, 1024, 16, 8, 2
_SIZE = _WIDTH // _HEADS
_STEPS = 5


def _kernels() -> list[np.ndarray]:
    """Returns embedding, for each block query, key, value, output, up and down, and logits."""
    rng = np.random.default_rng(0)
    heads = (_WIDTH, _HEADS, _SIZE)
    out, up = (_HEADS, _SIZE, _WIDTH), (_WIDTH, 4 * _WIDTH)
    block = [heads, heads, heads, out, up, up[::-1]]
    shapes = [(_VOCABULARY, _WIDTH), *block * _BLOCKS, (_WIDTH, _VOCABULARY)]
    return [rng.normal(0, 0.05, shape).astype(np.float32) for shape in shapes]


# Of the kernels of a block and of the logits: the axis that the model's halves divide.
_AXES = (1, 1, 1, 0, 1, 0)


def _divided(kernels: list[np.ndarray], parts: int) -> list[list[tf.Variable]]:
    """Returns for each kernel its parts; the embedding is whole."""
    axes = (*_AXES * _BLOCKS, 1)
    divided = [np.split(k, parts, axis) for k, axis in zip(kernels[1:], axes, strict=True)]
    return [[tf.Variable(one) for one in part] for part in ([kernels[0]], *divided)]


def _normalized(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def _attention(x: tf.Tensor, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    query, key, value = (tf.einsum("btd,dhe->bthe", x, kernel) for kernel in (q, k, v))
    scores = tf.einsum("bthe,bshe->bhts", query * _SIZE**-0.5, key)
    unseen = 1 - tf.linalg.band_part(tf.ones((_LENGTH, _LENGTH)), -1, 0)
    seen = tf.nn.softmax(scores - 1e9 * unseen)
    return tf.einsum("bthe,hed->btd", tf.einsum("bhts,bshe->bthe", seen, value), out)


def _hidden(x: tf.Tensor, up: tf.Tensor, down: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(x @ up, approximate=False) @ down


def _loss(parts: list[list[tf.Variable]], tokens: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the sum over a part of the rows; each sum over a kernel's parts is an exchange."""
    x = tf.gather(parts[0][0], tokens)
    for block in range(_BLOCKS):
        *attention, up, down = parts[1 + 6 * block : 7 + 6 * block]
        y = _normalized(x)
        x += tf.add_n([_attention(y, *kernels) for kernels in zip(*attention, strict=True)])
        y = _normalized(x)
        x += tf.add_n([_hidden(y, *kernels) for kernels in zip(up, down, strict=True)])
    logits = [x @ part for part in parts[-1]]
    most = tf.stop_gradient(tf.reduce_max([tf.reduce_max(one, -1) for one in logits], 0))
    sums = tf.add_n([tf.reduce_sum(tf.exp(one - most[..., None]), -1) for one in logits])
    size = _VOCABULARY // len(logits)
    own = [
        tf.reduce_sum(one * tf.one_hot(labels - number * size, size), -1)
        for number, one in enumerate(logits)
    ]
    return tf.reduce_sum(tf.math.log(sums) + most - tf.add_n(own))


def _step(rows: int, parts: int) -> Callable[[], tf.Tensor]:
    """Returns a step, a loss, in so many parts of the rows and of the kernels."""
    kernels = _divided(_kernels(), parts)
    flat = [part for each in kernels for part in each]
    slots = [(tf.Variable(tf.zeros_like(w)), tf.Variable(tf.zeros_like(w))) for w in flat]
    drawn = np.random.default_rng(1).integers(0, _VOCABULARY, (_ROWS, _LENGTH + 1))
    tokens, labels = (tf.constant(x, tf.int32) for x in (drawn[:, :-1], drawn[:, 1:]))

    @tf.function
    def step() -> tf.Tensor:
        found = []
        for own, wanted in zip(tf.split(tokens, rows), tf.split(labels, rows), strict=True):
            with tf.GradientTape() as tape:
                loss = _loss(kernels, own, wanted) / (_ROWS * _LENGTH)
            found.append((loss, tape.gradient(loss, flat)))
        losses, gradients = zip(*found, strict=True)
        for weight, (first, second), *each in zip(flat, slots, *gradients, strict=True):
            gradient = tf.add_n([tf.convert_to_tensor(one) for one in each])
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle, m=first.handle, v=second.handle, beta1_power=0.9,
                beta2_power=0.999, lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient,
            )  # fmt: skip
        return tf.add_n(losses)

    return step


def _seconds(step: Callable[[], tf.Tensor]) -> float:
    begun = time.perf_counter()
    for _ in range(_STEPS):
        loss = step()
    float(loss)
    return (time.perf_counter() - begun) / _STEPS


if __name__ == "__main__":
    whole, divided = _step(1, 1), _step(2, 2)
    for _ in range(3):
        np.testing.assert_allclose(whole(), divided(), rtol=1e-4)
    pairs = [(_seconds(whole), _seconds(divided)) for _ in range(int(sys.argv[1]))]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    row = {
        "work": "mesh 2x2, transformer, step in plain TensorFlow, whole and in parts",
        "baseline": round(1 / before, 2),
        "ours": round(1 / after, 2),
        "ratio": round(statistics.median(one / other for one, other in pairs), 2),
        "target": None,
    }
    Path(sys.argv[2]).write_text(json.dumps(row))
