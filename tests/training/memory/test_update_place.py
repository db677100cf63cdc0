"""Updates that are computed on the device of their weight."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.training.memory.update_place import updates_where_weights_lie


@pytest.mark.parametrize("keeps", [True, False])
def test_an_update_is_computed_where_its_weight_lies(keeps):
    """As graphs name devices, none of them has to be there; without it Keras names none."""
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:1"):
            weight = tf.Variable([1.0, 2.0], name="weight")
        optimizer = tf.keras.optimizers.Adam(jit_compile=False)
        optimizer.build([weight])
        before = set(graph.get_operations())
        if keeps:
            with updates_where_weights_lie(optimizer):
                optimizer.apply_gradients([(tf.constant([1.0, 1.0]), weight)])
        else:
            optimizer.apply_gradients([(tf.constant([1.0, 1.0]), weight)])
        roots = [each for each in graph.get_operations() if each.type in ("Sqrt", "Square")]
        assert roots
        assert {"CPU:1" in each.device for each in roots if each not in before} == {keeps}
    assert "update_step" not in vars(optimizer)
