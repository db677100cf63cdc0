import pytest

from tfdist.runs.planning import fixed_seconds


def test_what_rows_do_not_change_is_where_their_line_begins():
    assert fixed_seconds({16: 0.031, 64: 0.034}) == pytest.approx(0.03)
    assert fixed_seconds({64: 0.4, 16: 0.1}) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param({16: 0.03, 64: 0.03}, id="no slope"),
        pytest.param({16: 0.04, 64: 0.03}, id="noise"),
        pytest.param({1: 0.03}, id="one row"),
        pytest.param({16: 0.1, 64: 0.5}, id="begins below zero"),
    ],
)
def test_what_tells_nothing_is_all_computing(measured):
    assert fixed_seconds(measured) == 0.0
