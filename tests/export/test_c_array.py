"""The C header compiles, and holds the very bytes of the file."""

from __future__ import annotations

import subprocess

import pytest
from tiers import long

import tfdist
from tfdist.export.c_array import c_array

pytestmark = pytest.mark.timeout(120)

_PROGRAM = """
#include <stdio.h>
#include "8-bit_digits.h"
int main(void) {
    fwrite(_8_bit_digits, 1, _8_bit_digits_len, stdout);
    fprintf(stderr, "%u %d", _8_bit_digits_arena_size, (int)((unsigned long)_8_bit_digits % 16));
    return 0;
}
"""


@pytest.mark.parametrize("compiler", [["gcc", "-x", "c", "-std=c11"], *long(["g++", "-std=c++11"])])
def test_it_compiles_and_holds_the_file(compiler, trained, tmp_path):
    whole = tfdist.export.tflite(trained, tmp_path / "digits.tflite", quantize="dynamic")
    header = tmp_path / "8-bit_digits.h"
    report = tfdist.export.tflite(trained, header, quantize="dynamic", format="c")
    assert report.path == header
    text = header.read_text()
    assert "// input" in text
    assert "float32 1x8x8x1" in text
    assert "CONV_2D" in text
    content = (tmp_path / "digits.tflite").read_bytes()
    assert "char _auto[]" in c_array(content, tmp_path / "auto.h")  # Which is a word of C's.
    (tmp_path / "main.cpp").write_text(_PROGRAM)
    program = tmp_path / "program"
    subprocess.run(
        [*compiler, "-Wall", "-Werror", str(tmp_path / "main.cpp"), "-o", str(program)],
        check=True,
        timeout=60,
    )
    done = subprocess.run([program], capture_output=True, check=True, timeout=10)
    assert len(done.stdout) == whole.best.bytes
    assert done.stdout[4:8] == b"TFL3"
    arena, misaligned = map(int, done.stderr.split())
    assert misaligned == 0
    # At least the two largest tensors that live at once: [8, 8, 32] of float32, twice.
    assert 2 * 8 * 8 * 32 * 4 <= arena <= 200_000
