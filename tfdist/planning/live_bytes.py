"""The most bytes that lie on each device while a step runs, told from its operations.

An executor of TensorFlow runs what is ready first in, first out; so does this one, an operation at
a time on each device, for as long as its work takes there. A buffer lies from the operation that
makes it until the last one that reads it has run. What a kernel takes for itself meanwhile is not
seen, as by ``tfdist/runs/device_bytes.py``.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from tfdist.planning.kernel_flops import flops_of
from tfdist.planning.step_graph import Operation

# What hands its input on as it is.
_ALIASES = frozenset(
    """Enter EnsureShape Exit ExpandDims Identity IdentityN Merge NextIteration PreventGradient
    Reshape Snapshot Squeeze StopGradient Switch""".split()  # noqa: SIM905
)
# Rows of a tensor, or some of them, which lie in its buffer where kernels find them aligned.
_TAKE_ROWS = frozenset(("Slice", "Split", "SplitV", "StridedSlice", "Unpack"))
_ALIGNED_BYTES = 64
_OF_VARIABLES = frozenset(("VarHandleOp", "ReadVariableOp"))
# Kernels that write into the buffer of an input which nobody else reads, where it has the size.
_FORWARDING = frozenset(
    """Abs Add AddN AddV2 BiasAdd Cast Ceil Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor
    Inv LeakyRelu LeakyReluGrad Log Log1p LogSoftmax Maximum Minimum Mul MulNoNan Neg Pow RealDiv
    Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Softmax Softplus SoftplusGrad Softsign Sqrt SqrtGrad Square
    SquaredDifference Sub Tanh TanhGrad Xdivy Xlogy _UnaryOpsComposition""".split()  # noqa: SIM905
)
# Of a core: only how devices' clocks go beside each other depends on them.
_FLOPS_PER_S, _BYTES_PER_S, _START_S = 5e10, 1e10, 5e-6


def most_on_each(operations: Sequence[Operation]) -> dict[str, int]:
    """Returns device -> the most bytes of buffers there at any time, without variables."""
    return _Execution(operations).run()


class _Buffer:
    """Bytes on a device that several outputs may share.

    Attributes:
        readers: edges to operations that have not run yet.
        is_own: whether a kernel may take it for its output: no variable, no constant.
    """

    __slots__ = ("device", "is_own", "readers", "size")

    def __init__(self, device: str, size: int, *, is_own: bool):
        self.device, self.size, self.is_own, self.readers = device, size, is_own, 0


class _Execution:
    """A step that runs by the clocks of its devices."""

    def __init__(self, operations: Sequence[Operation]):
        self._operations = operations
        self._readers: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        self._followers: dict[int, list[int]] = collections.defaultdict(list)
        self._missing = []
        for number, operation in enumerate(operations):
            for given in operation.inputs:
                self._readers[given].append(number)
            for before in {source for source, _ in operation.inputs} | set(operation.after):
                self._followers[before].append(number)
            waits = len({source for source, _ in operation.inputs} | set(operation.after))
            # One of several branches is taken, and the first turn of a loop.
            self._missing.append(min(waits, 1) if operation.kind == "Merge" else waits)
        self._held: dict[tuple[int, int, str], _Buffer] = {}
        self._live: collections.Counter[str] = collections.Counter()
        self._most: collections.Counter[str] = collections.Counter()
        self._queues: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
        self._is_busy: set[str] = set()
        self._ends: list[tuple[float, int, int]] = []
        self._begun = 0

    def run(self) -> dict[str, int]:
        for number, missing in enumerate(self._missing):
            if not missing:
                self._queues[self._operations[number].device].append(number)
        for device in list(self._queues):
            self._begin_next(device, 0.0)
        while self._ends:
            now, _, number = heapq.heappop(self._ends)
            self._end(number, now)
        return dict(self._most)

    def _begin_next(self, device: str, now: float) -> None:
        queue = self._queues[device]
        if device in self._is_busy or not queue:
            return
        self._is_busy.add(device)
        number = queue.popleft()
        self._make_outputs(number)
        self._begun += 1
        heapq.heappush(self._ends, (now + self._seconds(number), self._begun, number))

    def _seconds(self, number: int) -> float:
        operation = self._operations[number]
        taken = [self._operations[source].sizes[slot] for source, slot in operation.inputs]
        moved = 0 if operation.kind in _ALIASES | _OF_VARIABLES else sum((*taken, *operation.sizes))
        shapes = [self._operations[source].shapes[slot] for source, slot in operation.inputs]
        return _START_S + flops_of(operation, shapes) / _FLOPS_PER_S + moved / _BYTES_PER_S

    def _make_outputs(self, number: int) -> None:
        operation = self._operations[number]
        for slot, size in enumerate(operation.sizes):
            places = self._places(number, slot)
            buffer = self._shared(operation, slot, size)
            if buffer is None:
                is_own = operation.kind not in ("Const", *_OF_VARIABLES)
                counted = 0 if operation.kind in _OF_VARIABLES else size
                buffer = self._taken(_Buffer(operation.device, counted, is_own=is_own))
            self._held[number, slot, operation.device] = buffer
            # Its own operation reads it until it has ended, and what sends it until it is there.
            buffer.readers += 1 + places.pop(operation.device, 0) + len(places)

    def _places(self, number: int, slot: int) -> collections.Counter[str]:
        """Returns device -> how often an output is to be read there."""
        readers = self._readers[number, slot]
        # What joins branches has run when the first of them has.
        waiting = [each for each in readers if self._missing[each] > 0]
        return collections.Counter(self._operations[reader].device for reader in waiting)

    def _shared(self, operation: Operation, output: int, size: int) -> _Buffer | None:
        """Returns the buffer of an input that the output is written into, if there is one."""
        given = operation.inputs
        if operation.kind == "IdentityN":
            given = given[output : output + 1]
        for source, slot in given:
            buffer = self._held.get((source, slot, operation.device))
            if buffer is None:
                continue
            if operation.kind in _ALIASES or self._are_rows(operation, output, source, slot):
                return buffer
            is_last = buffer.is_own and buffer.readers == 1 and buffer.size == size
            if operation.kind in _FORWARDING and is_last:
                return buffer
        return None

    def _are_rows(self, operation: Operation, output: int, source: int, slot: int) -> bool:
        """Whether an output is some rows of an input, whose buffer it shares."""
        whole, some = self._operations[source].shapes[slot], operation.shapes[output]
        if operation.kind not in _TAKE_ROWS or len(whole) < 2:
            return False
        row_bytes = self._operations[source].sizes[slot] // max(1, whole[0])
        return whole[1:] in (some, some[1:]) and row_bytes % _ALIGNED_BYTES == 0

    def _taken(self, buffer: _Buffer) -> _Buffer:
        self._live[buffer.device] += buffer.size
        self._most[buffer.device] = max(self._most[buffer.device], self._live[buffer.device])
        return buffer

    def _left(self, buffer: _Buffer) -> None:
        buffer.readers -= 1
        if not buffer.readers:
            self._live[buffer.device] -= buffer.size

    def _end(self, number: int, now: float) -> None:
        operation = self._operations[number]
        for slot, size in enumerate(operation.sizes):
            self._send(number, slot, size)
            self._left(self._held[number, slot, operation.device])
        for source, slot in operation.inputs:
            buffer = self._held.get((source, slot, operation.device))
            if buffer is not None:
                self._left(buffer)
        self._is_busy.discard(operation.device)
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._queues[self._operations[follower].device].append(follower)
        for device in list(self._queues):
            self._begin_next(device, now)

    def _send(self, number: int, slot: int, size: int) -> None:
        """Copies an output to the other devices where it is read."""
        home = self._operations[number].device
        places = self._places(number, slot)
        places.pop(home, None)
        for device, readers in places.items():
            copy = self._taken(_Buffer(device, size, is_own=True))
            copy.readers = readers
            self._held[number, slot, device] = copy
            self._left(self._held[number, slot, home])
