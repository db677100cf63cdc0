"""Operations of products, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.step_graphs.kernel_flops import flops_of
from tfdist.step_graphs.step_graph import Operation


def operation(kind: str, output: tuple[int, ...], **attributes: Any) -> Operation:
    return Operation(
        name="one",
        kind=kind,
        device="CPU:0",
        inputs=(),
        after=(),
        shapes=(output,),
        sizes=(4,),
        attributes=attributes,
    )


@pytest.mark.parametrize(
    ("one", "inputs", "expected"),
    [
        (operation("MatMul", (2, 5)), [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        (operation("MatMul", (3, 5), transpose_a=True), [(2, 3), (2, 5)], 2 * 3 * 2 * 5),
        (operation("BatchMatMulV2", (7, 2, 5)), [(7, 2, 3), (7, 3, 5)], 2 * 7 * 2 * 3 * 5),
        (
            operation("BatchMatMulV2", (7, 3, 5), adj_x=True),
            [(7, 2, 3), (7, 2, 5)],
            2 * 7 * 3 * 2 * 5,
        ),
        (
            operation("Einsum", (2, 6, 4, 5), equation=b"abc,cde->abde"),
            [(2, 6, 3), (3, 4, 5)],
            2 * (2 * 6) * 3 * (4 * 5),
        ),
        (
            operation("Einsum", (2, 6, 5), equation=b"...c,cd->...d"),
            [(2, 6, 3), (3, 5)],
            2 * (2 * 6) * 3 * 5,
        ),
        (operation("Einsum", (3, 2), equation=b"ab->ba"), [(2, 3)], 0),
        (operation("Conv2D", (2, 6, 6, 8)), [(2, 8, 8, 4), (3, 3, 4, 8)], 2 * 576 * 36),
        (
            operation("DepthwiseConv2dNative", (2, 6, 6, 8)),
            [(2, 8, 8, 4), (3, 3, 4, 2)],
            2 * 576 * 9,
        ),
        (
            operation("Conv2DBackpropInput", (2, 8, 8, 4)),
            [(4,), (3, 3, 4, 8), (2, 6, 6, 8)],
            2 * 576 * 36,
        ),
        (
            operation("Conv2DBackpropFilter", (3, 3, 4, 8)),
            [(2, 8, 8, 4), (4,), (2, 6, 6, 8)],
            2 * 576 * 36,
        ),
        (operation("Add", (2, 5)), [(2, 5), (2, 5)], 0),
    ],
)
def test_a_product_counts_its_multiplications_and_additions(one, inputs, expected):
    assert flops_of(one, inputs) == expected
