"""Tables as text: the same everywhere, also where colours are forced on."""

from __future__ import annotations

from rich.table import Table

from tfdist.records.report_text import as_text


def test_text_has_no_colours_and_no_markup(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    table = Table("name", title="a title")
    table.add_row("[red]")
    text = as_text(table, "a line of text" * 20)
    assert "\x1b" not in text
    assert "[red]" in text
    assert text.splitlines()[-1] == "a line of text" * 20


def test_a_notebook_does_not_take_it_away(monkeypatch):
    # What rich asks to find out whether it runs in one.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "name" in as_text(Table("name"))
