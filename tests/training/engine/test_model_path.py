"""Names of models: a file or module, a function, and the arguments that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.errors import ModelError
from tfdist.training.engine import model_path

_FILE = """
def made(width=8, *, name="a", trial=None):
    return width, name, trial and trial.suggest_int("n", 1, 9)

def needs(width):
    return width
"""


@pytest.fixture
def within(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(_FILE)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m.py:made", ("m.py", "made")),
        ("a:b/m.py:made", ("a:b/m.py", "made")),
        ("m.py:made(width=3)", ("m.py", "made(width=3)")),
        ("m.py:made(name='x:y(z)')", ("m.py", "made(name='x:y(z)')")),
        ("a.b:c", ("a.b", "c")),
    ],
)
def test_parts(name, parts):
    assert model_path.parts(name) == parts


def test_arguments_are_added_and_replaced():
    name = model_path.with_arguments("m.py:made(width=3, name='x:y(')", {"width": 0.1, "n": None})
    assert name == "m.py:made(width=0.1, name='x:y(', n=None)"
    assert model_path.with_arguments("m.py:made", {}) == "m.py:made()"


def test_the_function_is_called_with_them(within):
    assert model_path.load("m.py:made")() == (8, "a", None)
    assert model_path.load("m.py:made()")() == (8, "a", None)
    function = model_path.load("m.py:made(width=3, name='x:y(z)')")
    assert function() == (3, "x:y(z)", None)
    model_path.check_no_arguments(model_path.load("m.py:needs(width=1)"), "needs")


def test_a_trial_suggests_what_was_chosen(within):
    assert model_path.load("m.py:made(trial={'n': 7})")() == (8, "a", 7)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("m.py:made(3)", "must be names with plain values"),
        ("m.py:made(width=open('x'))", "must be names with plain values"),
        ("m.py:made(**{})", "must be names with plain values"),
        ("m.py:made(width=3)(name='a')", "must be names with plain values"),
        ("m.py:made(width=3, width=4)", "must be names with plain values.*a name twice"),
        ("m.py:made(width=)", "must be names with plain values"),
        ("m.py:made(depth=3)", "depth: got an unexpected keyword argument 'depth'"),
        ("none.py:made(width=3)", "no file none.py"),
        ("m.py:(width=3)", "must be given as FILE.py:NAME"),
    ],
)
def test_what_cannot_be(within, name, told):
    with pytest.raises(ModelError, match=told) as found:
        model_path.load(name)
    assert "\n" not in str(found.value)


def test_a_file_that_fails_is_not_taken_for_imported(within):
    Path("bad.py").write_text("x = 1\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model_path.load("bad.py:made", again=False)
