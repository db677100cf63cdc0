"""The most bytes that lie on each device while a step runs, told from its operations.

A buffer lies from the operation that makes it until the last one that reads it has run. What a
kernel takes for itself meanwhile is not seen, as by ``tfdist/runs/device_bytes.py``. In which order
operations run is as in TensorFlow's executor:

- A GPU runs what is ready first in, first out.
- CPUs of a process share a pool of threads. A thread that has run an operation goes on with what
  that made ready, and leaves all but one of the costly ones to the pool; then it takes what it left
  last itself, or what another thread left first. So the order changes from step to step with the
  time that each takes, and a device must have room for the worst of them: several are followed.

Source: ``ScheduleReady`` of tensorflow/core/common_runtime/executor.cc, and the queues of Eigen's
NonBlockingThreadPool.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Iterable, Sequence

from tfdist.step_graphs.kernel_flops import flops_of
from tfdist.step_graphs.step_graph import Operation

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
# Kernels that a thread runs at once, whatever else it has to do.
_CHEAP = frozenset(
    """BroadcastGradientArgs ConcatOffset Const ControlTrigger Enter Exit ExpandDims Identity
    IdentityN LoopCond Merge NextIteration NoOp Rank Reshape Shape ShapeN Size Squeeze StridedSlice
    Switch VarHandleOp VariableShape""".split()  # noqa: SIM905
)
# Copies what another device reads; an operation of its own, which gives a buffer there.
_SEND = "_Send"
# Of a core: only how clocks go beside each other depends on them.
_FLOPS_PER_S, _BYTES_PER_S, _START_S = 5e10, 1e10, 5e-6
# How far the time of an operation is off those, as the deviation of its logarithm.
_SPREAD = 0.5
_ORDERS = 8


def most_on_each(operations: Sequence[Operation], threads: int) -> dict[str, int]:
    """Returns device -> the most bytes of buffers there at any time, without variables.

    Args:
        threads: of the pool that runs the operations of CPUs; 0 for GPUs.
    """
    listed = _Listed(operations)
    if not threads:
        return dict(_InOrder(listed).run())
    found: collections.Counter[str] = collections.Counter()
    for order in range(_ORDERS):
        found |= _OnThreads(listed, threads, random.Random(order)).run()
    return dict(found)


class _Listed:
    """The operations of a step, with those that send what another device reads.

    Attributes:
        operations: each reads what lies on its own device.
        lies_on: the device of each one's outputs.
        readers: (operation, output) -> numbers of those that read it, once for each input.
        followers: numbers of those that wait for each one.
        waits: how many each one waits for.
    """

    def __init__(self, operations: Sequence[Operation]):
        self.operations = list(operations)
        self.lies_on = [each.device for each in operations]
        self._sends: dict[tuple[int, int | None, str], int] = {}
        for number, each in enumerate(operations):
            if len({operations[source].device for source in _before(each)} | {each.device}) > 1:
                inputs = tuple(self._brought(source, slot, each) for source, slot in each.inputs)
                after = tuple(self._brought(source, None, each)[0] for source in each.after)
                self.operations[number] = dataclasses.replace(each, inputs=inputs, after=after)
        self.readers: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        self.followers: list[list[int]] = [[] for _ in self.operations]
        self.waits = []
        for number, each in enumerate(self.operations):
            for given in each.inputs:
                self.readers[given].append(number)
            before = dict.fromkeys(_before(each))
            for source in before:
                self.followers[source].append(number)
            # One of several branches is taken, and the first turn of a loop.
            self.waits.append(min(len(before), 1) if each.kind == "Merge" else len(before))

    def _brought(self, source: int, slot: int | None, reader: Operation) -> tuple[int, int]:
        """Returns the operation and output that ``reader`` finds on its device."""
        maker = self.operations[source]
        if maker.device == reader.device:
            return source, slot or 0
        key = (source, slot, reader.device)
        if key not in self._sends:
            self._sends[key] = len(self.operations)
            has_value = slot is not None
            send = Operation(
                name=f"{maker.name}/to {reader.device}",
                kind=_SEND,
                device=maker.device,
                inputs=((source, slot),) if has_value else (),
                after=() if has_value else (source,),
                shapes=(maker.shapes[slot],) if has_value else (),
                sizes=(maker.sizes[slot],) if has_value else (),
                attributes={},
            )
            self.operations.append(send)
            self.lies_on.append(reader.device)
        return self._sends[key], 0


def _before(operation: Operation) -> Iterable[int]:
    return (*(source for source, _ in operation.inputs), *operation.after)


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
    """A step that runs by a clock: what runs next is told by a subclass."""

    def __init__(self, listed: _Listed):
        self._listed = listed
        self._operations = listed.operations
        self._missing = list(listed.waits)
        self._held: dict[tuple[int, int], _Buffer] = {}
        self._live: collections.Counter[str] = collections.Counter()
        self._most: collections.Counter[str] = collections.Counter()
        # When each operation ends, in which order they began, and who runs them.
        self._ends: list[tuple[float, int, int, int]] = []
        self._begun = 0

    def run(self) -> collections.Counter[str]:
        self._start([number for number, missing in enumerate(self._missing) if not missing])
        while self._ends:
            now, _, worker, number = heapq.heappop(self._ends)
            self._free_inputs(number)
            self._go_on(worker, number, self._made_ready(number), now)
        return self._most

    def _start(self, ready: list[int]) -> None:
        raise NotImplementedError

    def _go_on(self, worker: int, number: int, ready: list[int], now: float) -> None:
        raise NotImplementedError

    def _begin(self, worker: int, number: int, now: float) -> None:
        self._make_outputs(number)
        self._begun += 1
        heapq.heappush(self._ends, (now + self._seconds(number), self._begun, worker, number))

    def _seconds(self, number: int) -> float:
        operation = self._operations[number]
        taken = [self._operations[source].sizes[slot] for source, slot in operation.inputs]
        moved = 0 if operation.kind in _ALIASES | _OF_VARIABLES else sum((*taken, *operation.sizes))
        shapes = [self._operations[source].shapes[slot] for source, slot in operation.inputs]
        return _START_S + flops_of(operation, shapes) / _FLOPS_PER_S + moved / _BYTES_PER_S

    def _made_ready(self, number: int) -> list[int]:
        ready = []
        for follower in self._listed.followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready.append(follower)
        return ready

    def _make_outputs(self, number: int) -> None:
        operation = self._operations[number]
        for slot, size in enumerate(operation.sizes):
            buffer = self._shared(operation, slot, size)
            if buffer is None:
                is_own = operation.kind not in ("Const", *_OF_VARIABLES)
                counted = 0 if operation.kind in _OF_VARIABLES else size
                buffer = _Buffer(self._listed.lies_on[number], counted, is_own=is_own)
                self._take(buffer)
            self._held[number, slot] = buffer
            # What joins branches has run when the first of them has.
            waiting = sum(self._missing[each] > 0 for each in self._listed.readers[number, slot])
            buffer.readers += 1 + waiting  # Its own operation reads it until it has ended.

    def _shared(self, operation: Operation, output: int, size: int) -> _Buffer | None:
        """Returns the buffer of an input that the output is written into, if there is one."""
        given = operation.inputs
        if operation.kind == "IdentityN":
            given = given[output : output + 1]
        for source, slot in given:
            buffer = self._held.get((source, slot))
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

    def _take(self, buffer: _Buffer) -> None:
        self._live[buffer.device] += buffer.size
        self._most[buffer.device] = max(self._most[buffer.device], self._live[buffer.device])

    def _free_inputs(self, number: int) -> None:
        operation = self._operations[number]
        own = [(number, slot) for slot in range(len(operation.sizes))]
        for given in (*own, *operation.inputs):
            buffer = self._held.get(given)
            if buffer is not None:
                buffer.readers -= 1
                if not buffer.readers:
                    self._live[buffer.device] -= buffer.size


class _InOrder(_Execution):
    """On devices that run one operation at a time, first in, first out."""

    def __init__(self, listed: _Listed):
        super().__init__(listed)
        self._devices = list(dict.fromkeys(each.device for each in self._operations))
        self._queues = [collections.deque[int]() for _ in self._devices]
        self._is_busy = [False] * len(self._devices)

    def _start(self, ready: list[int]) -> None:
        self._enqueue(ready, 0.0)

    def _go_on(self, worker: int, number: int, ready: list[int], now: float) -> None:
        self._is_busy[worker] = False
        self._enqueue(ready, now)

    def _enqueue(self, ready: list[int], now: float) -> None:
        for number in ready:
            self._queues[self._devices.index(self._operations[number].device)].append(number)
        for device, queue in enumerate(self._queues):
            if queue and not self._is_busy[device]:
                self._is_busy[device] = True
                self._begin(device, queue.popleft(), now)


class _OnThreads(_Execution):
    """On the threads of a pool, whose operations take more or less time by chance."""

    def __init__(self, listed: _Listed, threads: int, chance: random.Random):
        super().__init__(listed)
        self._chance = chance
        # What each thread runs next, and what it has left to the pool, newest first.
        self._next = [collections.deque[int]() for _ in range(threads)]
        self._left = [collections.deque[int]() for _ in range(threads)]
        self._is_busy = [False] * threads

    def _seconds(self, number: int) -> float:
        factor = self._chance.lognormvariate(0.0, _SPREAD)
        return super()._seconds(number) * factor + _START_S * self._chance.expovariate(1.0)

    def _start(self, ready: list[int]) -> None:
        for place, number in enumerate(ready):
            self._left[place % len(self._left)].append(number)
        self._wake(0, 0.0)

    def _go_on(self, worker: int, number: int, ready: list[int], now: float) -> None:
        kept = None
        for follower in ready:
            # What was sent arrives in a callback, which leaves all to the pool.
            if self._operations[number].kind == _SEND:
                self._left[worker].appendleft(follower)
            elif self._operations[follower].kind in _CHEAP:
                self._next[worker].append(follower)
            else:
                if kept is not None:
                    self._left[worker].appendleft(kept)
                kept = follower
        if kept is not None and self._next[worker]:
            self._left[worker].appendleft(kept)
        elif kept is not None:
            self._next[worker].append(kept)
        self._is_busy[worker] = False
        self._wake(worker, now)

    def _wake(self, first: int, now: float) -> None:
        """Lets each thread that is free begin something, ``first`` before all others."""
        count = len(self._next)
        for thread in (first, *(each for each in range(count) if each != first)):
            if self._is_busy[thread]:
                continue
            number = self._taken(thread)
            if number is not None:
                self._is_busy[thread] = True
                self._begin(thread, number, now)

    def _taken(self, thread: int) -> int | None:
        for queue in (self._next[thread], self._left[thread]):
            if queue:
                return queue.popleft()
        count = len(self._left)
        others = (self._left[(thread + step) % count] for step in range(1, count))
        return next((queue.pop() for queue in others if queue), None)
