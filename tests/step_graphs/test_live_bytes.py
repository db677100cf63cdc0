"""The most bytes of small graphs, against what can be followed by hand."""

from __future__ import annotations

from dataclasses import replace

from tfdist.step_graphs.live_bytes import most_on_each
from tfdist.step_graphs.step_graph import Operation


def graph(*given: tuple) -> list[Operation]:
    """Operations as (kind, bytes of the output, numbers of the inputs[, device])."""
    return [
        Operation(
            name=f"{kind}_{number}",
            kind=kind,
            device=device[0] if device else "CPU:0",
            inputs=tuple((source, 0) for source in inputs),
            after=(),
            shapes=((size,),),
            sizes=(size,),
            attributes={},
        )
        for number, (kind, size, inputs, *device) in enumerate(given)
    ]


def test_a_buffer_lies_until_its_last_reader_has_run():
    chain = graph(("Iterator", 10, []), ("Pad", 20, [0]), ("Pad", 40, [1]), ("Pad", 5, [2]))
    assert most_on_each(chain, 0) == {"CPU:0": 60}
    read_late = graph(("Iterator", 10, []), ("Pad", 20, [0]), ("Pad", 40, [1]), ("Pad", 5, [2, 0]))
    assert most_on_each(read_late, 0) == {"CPU:0": 70}


def test_elementwise_kernels_take_the_buffer_of_a_dead_input():
    assert most_on_each(graph(("Iterator", 10, []), ("Neg", 10, [0])), 0) == {"CPU:0": 10}
    both = graph(("Iterator", 10, []), ("Neg", 10, [0]), ("Pad", 1, [1, 0]))
    assert most_on_each(both, 0) == {"CPU:0": 21}


def test_each_output_of_several_is_the_buffer_of_its_own_input():
    operations = graph(("Iterator", 10, []), ("Iterator", 30, []), ("IdentityN", 10, [0, 1]))
    both = replace(operations[2], shapes=((10,), (30,)), sizes=(10, 30))
    reader = replace(operations[0], name="Pad_3", kind="Pad", inputs=((2, 1),), sizes=(5,))
    # Of the second alone there is a reader; the first is left when it was handed on.
    assert most_on_each([*operations[:2], both, reader], 0) == {"CPU:0": 40}


def test_what_is_handed_on_is_one_buffer_and_variables_are_none():
    handed = graph(("Iterator", 10, []), ("Reshape", 10, [0]), ("Pad", 3, [1]))
    assert most_on_each(handed, 0) == {"CPU:0": 13}
    variable = graph(("VarHandleOp", 0, []), ("ReadVariableOp", 10, [0]), ("Neg", 10, [1]))
    assert most_on_each(variable, 0) == {"CPU:0": 10}


def test_what_is_sent_lies_on_both_devices():
    sent = graph(("Iterator", 10, []), ("Pad", 4, [0], "CPU:1"))
    assert most_on_each(sent, 0) == {"CPU:0": 10, "CPU:1": 14}


def test_a_thread_finishes_a_branch_before_it_takes_another():
    branches = graph(
        ("Iterator", 10, []), ("Pad", 40, [0]), ("Pad", 40, [0]), ("Sum", 1, [1]), ("Sum", 1, [2])
    )
    assert most_on_each(branches, 0) == {"CPU:0": 90}, "in order, both are there at once"
    assert most_on_each(branches, 1) == {"CPU:0": 51}
    assert most_on_each(branches, 2) == {"CPU:0": 91}, "each thread has one, and one ends first"


def test_the_worst_of_several_orders_is_told_and_each_time_the_same():
    operations = [("Iterator", 10, [])]
    for _ in range(6):
        branch = len(operations)
        operations += [("Pad", 1000 * branch, [0]), ("Sum", 100, [branch])]
    found = [most_on_each(graph(*operations), 2)["CPU:0"] for _ in range(2)]
    assert found[0] == found[1]
    # The last branch lies beside one of those that another thread takes from the first on.
    assert found[0] > 11_000 + 3000 > most_on_each(graph(*operations), 1)["CPU:0"] > 11_000


def test_branches_that_join_leave_nothing_behind():
    joined = graph(
        ("Iterator", 10, []), ("Pad", 20, [0]), ("Pad", 20, [0]), ("Merge", 20, [1, 2]),
        ("Pad", 40, [3]), ("Pad", 1, [4]),
    )  # fmt: skip
    assert most_on_each(joined, 0) == {"CPU:0": 60}


def test_aligned_rows_of_a_tensor_lie_in_its_buffer():
    def rows(kind: str, shape: tuple[int, ...], columns: int) -> int:
        whole, some = graph(("Iterator", 8 * columns * 4, []), (kind, 2 * columns * 4, [0]))
        whole = replace(whole, shapes=((8, columns),))
        return most_on_each([whole, replace(some, shapes=(shape,))], 0)["CPU:0"]

    assert rows("StridedSlice", (2, 16), 16) == 512
    assert rows("Unpack", (16,), 16) == 512
    assert rows("StridedSlice", (8, 4), 16) == 512 + 128, "columns"
    assert rows("StridedSlice", (2, 15), 15) == 480 + 120, "rows that are not aligned"
    assert rows("Pad", (2, 16), 16) == 512 + 128
