"""What an export found, as text."""

from __future__ import annotations

import rich.console

from tfdist.export.reports import Candidate, Report


def test_a_notebook_prints_the_tables_as_a_terminal_does(monkeypatch):
    report = Report(None, "none", 1000, (Candidate("none", 1000), Candidate("int8", 300)), None, 0)
    in_a_terminal = str(report)
    assert "300" in in_a_terminal
    assert not any(line.endswith(" ") for line in in_a_terminal.splitlines())
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(report) == in_a_terminal
