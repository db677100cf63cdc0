"""Checkpoints in parts, which all ranks write together.

The scenarios stand in shared_checkpoints_scenarios.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from scenario_plugin import Job

from tfdist.cli import saved_weights
from tfdist.records.writing.writer import write
from tfdist.training.checkpoints import checkpoint_files

SCENARIOS = "shared_checkpoints_scenarios.py"
JOBS = {
    "mirrored": Job("mirrored", {"devices": 2}),
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2),
    "multi_worker": Job("multi_worker", ranks=2),
}


def test_on(scenario):
    scenario.check()


MODEL = """
from tensorflow import keras

def model_fn():
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((8,))
    for number in range(3):
        x = keras.layers.Dense(16, "tanh", name=f"dense{number}")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(x))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy")
    return model
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_other_numbers_of_ranks_and_other_strategies_go_on(run_cli, tmp_path):
    """Which have whole weights and slots in the end, those of trainings that divided nothing."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 250)
    x = (rng.normal(size=(250, 8)) + y[:, None]).astype(np.float32)
    write((x, y), tmp_path / "shards", num_shards=3)
    (tmp_path / "model.py").write_text(MODEL)

    def train(output, epochs, *options):
        done = run_cli(
            *("train", "--model", "model.py:model_fn", "--data", "shards", "--output", output),
            *("--global-batch-size", 20, "--checkpoint-every", 3, "--epochs", epochs, "--resume"),
            *("--strategy", *options),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return saved_weights.read(tmp_path / output / "model.keras")

    three, two = ("--workers", 3, "--hosts", "localhost:3"), ("--workers", 2)
    train("parts", 1, "horovod", *three, "-o", "shard=weights")
    kept = checkpoint_files.whole(p.name for p in (tmp_path / "parts" / "checkpoints").iterdir())
    assert {len(files) for files in kept.values()} == {3 + 1}  # One for each rank, and an index.
    train("parts", 2, "horovod", *two, "-o", "shard=optimizer")
    ours = train("parts", 3, "mesh", "-o", "batch=1", "-o", "model=2")
    train("whole", 1, "horovod", *three)
    train("whole", 2, "horovod", *two)
    theirs = train("whole", 3, "single")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5, err_msg=name)
