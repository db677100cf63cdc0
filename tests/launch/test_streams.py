from __future__ import annotations

import pytest

from tfdist.launch.streams import LineSorter

# Recorded from mpirun 4.1.8: it tags each write, so two ranks share a line and a line has pieces.
MIXED = (
    b"[1,1]<stdout>:hello[1,1]<stdout>: [1,1]<stdout>:1[1,1]<stdout>:\n"
    b"[1,1]<stdout>:part[1,0]<stdout>:hello 0\n"
    b"[1,0]<stdout>:part[1,1]<stdout>:ial\n"
    b"[1,0]<stdout>:ial\n"
)
SORTED = [
    (1, "stdout", "hello 1"),
    (0, "stdout", "hello 0"),
    (1, "stdout", "partial"),
    (0, "stdout", "partial"),
]


def everything(tags: str, *chunks: bytes, pipe: str = "stdout") -> list:
    sorter = LineSorter(tags)
    lines = [line for chunk in chunks for line in sorter.feed(pipe, chunk)]
    return lines + list(sorter.close())


def test_pieces_of_two_ranks_are_put_together():
    assert everything("mpi", MIXED) == SORTED


def test_reads_may_end_anywhere():
    assert everything("mpi", *(MIXED[i : i + 1] for i in range(len(MIXED)))) == SORTED


def test_a_last_line_without_an_end_is_kept():
    assert everything("mpi", b"[1,0]<stdout>:no end") == [(0, "stdout", "no end")]


def test_words_of_the_launcher_have_no_rank():
    lines = everything("mpi", b"mpirun noticed\n[1,0]<stderr>:mine\n\n", pipe="stderr")
    assert lines == [
        (None, "stderr", "mpirun noticed"),
        (0, "stderr", "mine"),
        (None, "stderr", ""),
    ]


def test_gloo_tags():
    lines = everything("gloo", b"[0]<stdout>:a\n[1]<stderr>:b\nown\n")
    assert lines == [(0, "stdout", "a"), (1, "stderr", "b"), (None, "stdout", "own")]


def test_a_single_process_is_rank_0():
    assert everything("none", b"[1,1]<stdout>:text\n") == [(0, "stdout", "[1,1]<stdout>:text")]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"1/3\r2/3\r3/3\n", "3/3"),
        (b"1/3\b\b\b\r2/3\b\b\b\r\n", "2/3"),
        (b"windows\r\n", "windows"),
        (b"\n", ""),
        (b"na\xc3\xafve \xff\n", "naïve \ufffd"),
    ],
)
def test_a_line_is_what_a_terminal_would_show(written, shown):
    assert everything("none", written) == [(0, "stdout", shown)]


def test_a_line_without_end_does_not_fill_memory():
    sorter = LineSorter("none")
    lines = [line for _ in range(40) for line in sorter.feed("stdout", b"x" * (1 << 16))]
    kept = sum(len(raw) for raw in (*sorter._raw.values(), *sorter._partial.values()))
    assert kept <= 2 << 20
    assert sum(len(text) for _, _, text in [*lines, *sorter.close()]) == 40 << 16
