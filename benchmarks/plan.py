"""What a step is told to need of a device's memory before it runs, beside what it then takes.

Told from the traced graph of each strategy; measured by ``device_bytes``, on the device that holds
most. Each in a process of its own, since a strategy takes the devices of its process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks import apart

_apart = functools.partial(apart.call, "benchmarks.plan")
_SINGLE: tuple[str, dict[str, Any]] = ("single", {})
# Kept apart by what they hold: activations of products, of convolutions, of attention; weights.
_MODELS = ("stack", "convnet", "gpt", "wide")
# Those that each strategy must train as one device does, but own_loss: what labels a loss of one's
# own reads, nothing tells a plan; those on which strategies that divide a model prove themselves;
# and built-in workloads: rows.
_CASES = ("mlp", "convnet", "two_inputs", "dict_outputs", "list_outputs", "saturated", "super_loss")
_CASE_ROWS = 1024  # Of so small models a step of few rows takes some KB, of scalars and metrics.
_PROOF_MODELS = ("mlp", "convnet", "transformer", "vit", "resnet50v2")
_WORKLOADS = {"mlp": 64, "transformer": 32, "resnet50v2": 16}
_STRATEGIES = (
    ("mirrored", {"devices": 2}),
    ("pipeline", {"stages": 2}),
    ("pipeline", {"stages": 2, "schedule": "1f1b"}),
    ("pipeline", {"stages": 2, "recompute": "blocks"}),
    ("mesh", {"batch": 1, "model": 2}),
    ("mesh", {"batch": 2, "model": 2}),
    ("single", {"recompute": "blocks"}),
    ("single", {"accumulate_steps": 4}),
    ("mirrored", {"devices": 2, "shard": "optimizer"}),
)
_MEASURED = 2  # Each time of several steps.
#: Told is to be within 5 % of measured.
TOLERANCE = 0.05


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of work, baseline, ours, ratio and target: MB measured, and told."""
    if quick:
        cases = [("stack", *_SINGLE)]
    else:
        models = [f"case {name}" for name in _CASES]
        models += [f"proof {name}" for name in _PROOF_MODELS]
        models += [f"workload {name}" for name in _WORKLOADS]
        cases = [(model, *_SINGLE) for model in (*_MODELS, *models)]
        cases += [("stack", name, options) for name, options in _STRATEGIES]
    rows = []
    for model, name, options in cases:
        found = _apart("told_and_measured", model=model, strategy=name, options=options)
        said = ",".join([name, *(f"{key}={value}" for key, value in options.items())])
        # The smaller of the two over the larger: a plan may err to neither side.
        told, measured = found["told"] / 1e6, found["measured"] / 1e6
        rows.append(
            {
                "work": f"MB at most on a device, {model} on {said}",
                "baseline": round(measured, 3),
                "ours": round(told, 3),
                "ratio": round(min(told, measured) / max(told, measured), 3),
                "target": 1 - TOLERANCE,
            }
        )
    return rows


def told_and_measured(model: str, strategy: str, options: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes on the device that holds most, told from the graph and measured."""
    import tfdist

    with tfdist.strategy(strategy, **options) as started:
        from tfdist.runs import device_bytes, traced_step

        model_fn, rows = _model(model)
        built = started.build(model_fn)
        given = traced_step.made_up_rows(built, 2 * rows)
        data = started.dataset(given, global_batch_size=rows).limited(2)

        def fit() -> None:
            built.fit(data, verbose=0)

        fit()  # Slots lie where they are to after the first step.
        # What is told is the worst order of operations, which a few steps may all miss.
        measured = [max(device_bytes.of_a_step(built, fit).values()) for _ in range(_MEASURED)]
        told = traced_step.most_on_each(started, built, rows)
    return {"told": max(told.values()), "measured": max(measured)}


def _model(name: str) -> tuple[Callable[[], Any], int]:
    """Returns a function that makes a model, and the rows of its global batch."""
    kind, _, known = name.partition(" ")
    if kind == "proof":
        from tests.conformance import conformance_models

        proof = getattr(conformance_models, known)()
        return proof.model_fn, proof.global_batch_size
    if kind == "case":
        from tests.conformance import conformance_cases

        optimizer = conformance_cases.optimizer_of(known)
        return functools.partial(conformance_cases.build, known, optimizer), _CASE_ROWS
    if kind == "workload":
        from tfdist.benching import workloads

        return getattr(workloads, known), _WORKLOADS[known]
    import tensorflow as tf

    keras = tf.keras
    layers = keras.layers

    def stack(width: int, depth: int) -> Any:
        hidden = [layers.Dense(width, "gelu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *hidden])
        model.compile("adam", "mse")
        return model

    def of_classes(inputs: Any, outputs: Any) -> Any:
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return model

    def convnet() -> Any:
        inputs = x = keras.Input((32, 32, 3))
        for filters in (32, 64, 64):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
            x = layers.AveragePooling2D()(x)
        return of_classes(inputs, layers.Dense(10)(layers.Flatten()(x)))

    def gpt() -> Any:
        inputs = keras.Input((64,), dtype="int32")
        x = layers.Embedding(512, 128)(inputs)
        for _ in range(3):
            y = layers.LayerNormalization()(x)
            y = layers.MultiHeadAttention(4, 32)(y, y, use_causal_mask=True)
            x = layers.Add()([x, y])
            y = layers.Dense(512, "gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(128)(y)])
        return of_classes(inputs, layers.Dense(512)(layers.LayerNormalization()(x)))

    return {
        "stack": (functools.partial(stack, 512, 6), 1024),
        "convnet": (convnet, 64),
        "gpt": (gpt, 32),
        "wide": (functools.partial(stack, 2048, 4), 64),
    }[name]


if __name__ == "__main__":
    apart.answer((told_and_measured,))
