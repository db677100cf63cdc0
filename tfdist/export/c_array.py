"""A TFLite file as C source, for microcontrollers that have no file system."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist.export.flatbuffer import computed_tensors, operators
from tfdist.export.interpreter import TfliteModel
from tfdist.export.latency import arena_bytes

# Names of C and C++ that no array can have; linux and unix are macros of compilers.
_RESERVED = re.compile(
    r"alignas|alignof|and(_eq)?|asm|auto|bit(and|or)|bool|break|case|catch|char((8|16|32)_t)?|class|"
    r"co_(await|return|yield)|compl|concept|const(_cast|eval|expr|init)?|continue|decltype|default|"
    r"delete|do|double|dynamic_cast|else|enum|explicit|export|extern|false|float|for|friend|goto|if|"
    r"inline|int|linux|long|main|mutable|namespace|new|noexcept|not(_eq)?|nullptr|operator|or(_eq)?|"
    r"private|protected|public|register|reinterpret_cast|requires|restrict|return|short|signed|"
    r"sizeof|static(_assert|_cast)?|struct|switch|template|this|thread_local|throw|true|try|typedef|"
    r"typeid|typename|typeof(_unqual)?|union|unix|unsigned|using|virtual|void|volatile|wchar_t|"
    r"while|xor(_eq)?"
)
_PER_LINE = 12
_BEGIN = "// TensorFlow Lite model, "
# What TensorFlow Lite Micro keeps in the arena beside activations: on a 32-bit machine a node,
# its registration and its parameters, or a tensor with its quantization, stay below these.
_BYTES_PER_OPERATOR, _BYTES_PER_TENSOR, _BYTES_FIXED = 160, 64, 1024
_ROUND = 1024


def c_array(content: bytes, path: Path) -> str:
    """Returns a header that defines the file as an aligned array, its length and an arena size.

    Args:
        path: of the header; its name becomes that of the array.
    """
    name = re.sub(r"\W", "_", path.stem)
    name = f"_{name}" if name[:1].isdigit() or _RESERVED.fullmatch(name) else name
    file = TfliteModel(content)
    needed = sorted(set(operators(content)))
    lines = [
        f"{_BEGIN}{len(content)} bytes. Written by tfdist.",
        *(_described("input", n, details) for n, details in file.inputs.items()),
        *(_described("output", n, details) for n, details in file.outputs.items()),
        f"// operators: {', '.join(needed)}",
        "#pragma once",
        "",
        "#ifdef __cplusplus",
        f"alignas(16) static const unsigned char {name}[] = {{",
        "#else",
        f"_Alignas(16) static const unsigned char {name}[] = {{",
        "#endif",
    ]
    lines += [
        "    " + " ".join(f"0x{byte:02x}," for byte in content[start : start + _PER_LINE])
        for start in range(0, len(content), _PER_LINE)
    ]
    activations = arena_bytes(content)
    structures = len(operators(content)) * _BYTES_PER_OPERATOR + _BYTES_FIXED
    structures += len(computed_tensors(content)) * _BYTES_PER_TENSOR
    # To begin with, in whole kilobytes.
    arena = -(-(activations + structures) // _ROUND) * _ROUND
    lines += [
        "};",
        f"static const unsigned int {name}_len = {len(content)};",
        "",
        f"// {activations} bytes of activations and scratch were measured in TensorFlow Lite; the",
        "// rest is an estimate for TensorFlow Lite Micro's own structures. After AllocateTensors,",
        "// interpreter.arena_used_bytes() tells the size that is really needed.",
        f"static const unsigned int {name}_arena_size = {arena};",
        "",
    ]
    return "\n".join(lines)


def is_c_array(begin: bytes) -> bool:
    """Whether a file that begins so is a header that ``c_array`` wrote."""
    return begin.startswith(_BEGIN.encode())


def _described(side: str, name: str, details: dict) -> str:
    scale, zero_point = details["quantization"]
    shape = "x".join(str(int(size)) for size in details["shape"])
    text = f"// {side} {name}: {details['dtype'].__name__} {shape}"
    return text + (f", value = ({scale:.9g}) * (q - ({zero_point}))" if scale else "")
