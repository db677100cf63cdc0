"""A share in microbatches: every row once, padding where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.steps.shared_steps import divide


@pytest.mark.parametrize(("rows", "count"), [(7, 3), (6, 3), (1, 4), (0, 2), (5, 1)])
def test_every_true_row_is_in_one_microbatch(rows, count):
    x = np.arange(max(rows, 1), dtype=np.float32)[:, None]
    parts = divide((x, {"y": x[:, 0]}, None), tf.constant([rows, 20], tf.int64), count)
    assert len(parts) == count
    shares = [share.numpy().tolist() for _, share in parts]
    own = [share[0] for share in shares]
    assert sum(own) == rows
    assert max(own) - min(own) <= 1
    assert {share[1] for share in shares} == {20}
    true = [np.array(part[0])[:n] for (part, _), n in zip(parts, own, strict=True)]
    np.testing.assert_array_equal(np.concatenate(true), x[:rows])
    for part, _ in parts:
        assert len(part[0]) >= 1
        assert len(part[1]["y"]) == len(part[0])
        assert part[2] is None
