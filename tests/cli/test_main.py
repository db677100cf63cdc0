"""The command itself, before any verb."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.parametrize("verb", ["options", "train"])
def test_a_working_folder_that_is_gone_is_one_line(tfdist, tmp_path, monkeypatch, verb):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, out, err = tfdist(verb, "single")
    monkeypatch.chdir(tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a command must be called in a folder that is there, but found" in err


def test_a_standard_output_that_is_closed_is_none(tfdist, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert tfdist("options")[0] == 0


def test_a_standard_error_that_is_closed_puts_no_errors_among_results(tfdist, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert tfdist("options", "nothing")[:2] == (2, "")


def test_auto_has_no_options_of_its_own(tfdist):
    code, out, err = tfdist("options", "auto")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "must be those of one strategy, but found 'auto', which" in err
