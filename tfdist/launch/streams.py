"""Sorts the mixed output of several ranks into (rank, stream, line).

mpirun tags every *write* of a rank, not every line, so lines of several ranks come interleaved in
one line of its output, and one line of a rank comes in pieces. horovodrun tags whole lines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

Line = tuple[int | None, str, str]
"""(rank, or None for the launcher's own words; "stdout" or "stderr"; text without its end)"""

# One line longer than this is passed on in parts, so that memory stays bounded.
LONGEST_LINE_BYTES = 1 << 20

NUMBERED = re.compile(rb"\[(\d+)\]<(stdout|stderr)>:")

TAGS = {
    "mpi": re.compile(rb"\[\d+,(\d+)\]<(stdout|stderr|stddiag)>:"),
    "gloo": NUMBERED,
    "elastic": NUMBERED,
    "together": NUMBERED,
}


class LineSorter:
    """Takes the bytes of a launcher's two pipes as they come, and yields lines with their rank.

    Args:
        tags: whose tags the output carries: "mpi", "gloo" (horovodrun), "elastic", "together"
            (both tfdist's own), or "none" for a single process.
        single_rank: the rank of a single process.
    """

    def __init__(self, tags: str, single_rank: int = 0):
        self._single_rank = single_rank
        self._tag = TAGS.get(tags)
        self._raw: dict[str, bytes] = defaultdict(bytes)
        self._partial: dict[tuple[int, str], bytes] = defaultdict(bytes)

    def feed(self, pipe: str, data: bytes) -> Iterator[Line]:
        """Yields the lines that ``data``, read from ``pipe``, completes."""
        *complete, rest = (self._raw[pipe] + data).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            complete, rest = [*complete, rest], b""
        self._raw[pipe] = rest
        for raw in complete:
            yield from self._line(pipe, raw, ended=True)

    def close(self) -> Iterator[Line]:
        """Yields what came without an end of line."""
        for pipe, raw in self._raw.items():
            if raw:
                yield from self._line(pipe, raw, ended=False)
        for (rank, stream), text in self._partial.items():
            if text:
                yield rank, stream, _shown(text)
        self._raw.clear()
        self._partial.clear()

    def push_back(self, rank: int, stream: str, text: str) -> None:
        """Gives back the beginning of a line whose end is still to come."""
        self._partial[rank, stream] = text.encode() + self._partial[rank, stream]

    def _line(self, pipe: str, raw: bytes, ended: bool) -> Iterator[Line]:
        if self._tag is None:
            key = (self._single_rank, pipe)
            self._partial[key] += raw
        else:
            own, *tagged = self._tag.split(raw)
            if own or not tagged:
                yield None, pipe, _shown(own)
            if not tagged:
                return
            for rank, stream, text in zip(tagged[::3], tagged[1::3], tagged[2::3], strict=True):
                key = (int(rank), "stdout" if stream == b"stdout" else "stderr")
                self._partial[key] += text
        if ended:
            yield *key, _shown(self._partial.pop(key))


def _shown(text: bytes) -> str:
    """What a terminal would show of a line: a progress bar's last state, not all of them."""
    states = [state for state in text.decode(errors="replace").split("\r") if state.strip("\b")]
    return states[-1].strip("\b") if states else ""
