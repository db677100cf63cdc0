"""What a rank makes of the outputs of a model before it writes them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tfdist.runs.predict_rank import named_outputs


def test_outputs_are_of_types_that_files_hold(tmp_path):
    words = np.array([b"cat", "b\u00e4r".encode()], object)
    outputs = {"half": np.array([[1.5, 0.1]], ml_dtypes.bfloat16), "word": words}
    np.savez(tmp_path / "found.npz", **named_outputs(None, outputs))
    with np.load(tmp_path / "found.npz", allow_pickle=False) as found:
        assert found["half"].dtype == np.float32
        np.testing.assert_array_equal(found["half"], [[1.5, 0.10009765625]])
        assert found["word"].tolist() == ["cat", "b\u00e4r"]
