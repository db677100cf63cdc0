"""What a user may ask of the cuts; no TensorFlow."""

from __future__ import annotations

import pytest

from tfdist.errors import ModelError, OptionError
from tfdist.strategies.pipeline.options import check_enough, cuts_after


def test_cuts_after_the_last_call_of_a_layer():
    assert cuts_after([("a", [0, 1]), ("b", [2])], 4) == (2, 3)


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ([("b", [1]), ("a", [0])], "in the order of the model"),
        ([("c", [2])], "the last stage must have a layer"),
    ],
)
def test_cuts_that_cannot_be(named, part):
    with pytest.raises(OptionError) as caught:
        cuts_after(named, 3)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("calls", "whole", "parts"),
    [
        (3, (), ["'mine' with 3.", "or choose at most 3 stages."]),
        (1, (), ["Use strategy 'mirrored', 'horovod' or 'multi_worker', which hold it whole."]),
        (
            2,
            ("submodel 'bert' (TFBertModel)",),
            [
                "2, where submodel 'bert' (TFBertModel), of a class of its own, counts as one",
                "or write submodel 'bert' (TFBertModel) as a Functional model, or choose at most 2",
            ],
        ),
        (1, ("submodel 'a' (A)",), ["write submodel 'a' (A) as a Functional model."]),
    ],
)
def test_too_few_layers_say_which_submodel_stops_them(calls, whole, parts):
    with pytest.raises(ModelError) as caught:
        check_enough(calls, 4, 4, "mine", whole)
    for part in parts:
        assert part in str(caught.value)
    assert "at most 1 stages" not in str(caught.value)
