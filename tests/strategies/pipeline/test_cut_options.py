"""What a user may ask of the cuts; no TensorFlow."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.strategies.pipeline import cut_options


def test_cuts_after_the_last_call_of_a_layer():
    assert cut_options.cuts_after([("a", [0, 1]), ("b", [2])], 4) == (2, 3)


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ([("b", [1]), ("a", [0])], "in the order of the model"),
        ([("c", [2])], "the last stage must have a layer"),
    ],
)
def test_cuts_that_cannot_be(named, part):
    with pytest.raises(OptionError) as caught:
        cut_options.cuts_after(named, 3)
    assert part in str(caught.value)
