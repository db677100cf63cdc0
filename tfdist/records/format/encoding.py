"""The bytes of a TFRecord file of tf.train.Examples, written by blocks and without TensorFlow.

A tf.train.Example is ``features { feature { key value } ... }``, every level length-delimited, so
a value of known size always ends its entry: records of one schema differ only in the bytes of
their values. A block of records is one byte matrix: the template in every row, then the values.

TFRecord framing (tensorflow/core/lib/io/record_writer.h): uint64 length, masked crc32c of the
length, the record, masked crc32c of the record, all little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c

from tfdist.records.format.examples import floats, int64_in, list_in, values_in
from tfdist.records.format.manifest import Layout, Slot
from tfdist.records.format.schema import Feature, Schema

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_VARINT_BYTES = 10
_MASK_DELTA = 0xA282EAD8
# A block that stays in the processor's cache while it is filled, summed and written.
_BLOCK_BYTES = 1 << 19

# Field number of bytes_list, float_list and int64_list in tf.train.Feature.
_LIST_FIELD = {"raw": 1, "bytes": 1, "jpeg": 1, "png": 1, "image": 1, "float": 2, "int64": 3}

_Bytes = TypeVar("_Bytes", bytes, memoryview)

# For each feature its values in some records: an array; where they vary, a value for each record.
Block = Mapping[str, "np.ndarray | Sequence[Any]"]


def mask(checksum: int) -> int:
    """Returns a crc32c as TFRecord stores it, so that checksums of checksums stay strong."""
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def length_in(header: bytes) -> int | None:
    """Returns the bytes of a record from the header of its frame; None when its sum is wrong."""
    length, stored = struct.unpack_from("<QI", header)
    return length if stored == mask(crc32c(header[:8])) else None


def is_summed(record: bytes | memoryview, footer: bytes | memoryview) -> bool:
    """Whether the footer of a frame is that of the record."""
    return footer == struct.pack("<I", mask(crc32c(record)))


def varint(number: int) -> bytes:
    """Returns an unsigned number in base 128, lowest digits first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def varint_width(values: np.ndarray) -> int:
    """Returns the bytes of the longest varint among int64 ``values``; negative ones need 10."""
    if values.min() < 0:
        return MAX_VARINT_BYTES
    return max(1, -(-int(values.max()).bit_length() // 7))


def padded_varints(values: np.ndarray, width: int) -> np.ndarray:
    """Returns int64 ``values`` [n, k] as uint8 [n, k * width].

    Every varint gets the same width by leading zero digits, which every protobuf parser accepts:
    so labels above 127 keep the fixed layout.
    """
    digits = np.empty((*values.shape, width), np.uint8)
    unsigned = values.astype(np.int64, copy=False).view(np.uint64)
    for place in range(width):
        digits[..., place] = (unsigned >> np.uint64(7 * place)) & np.uint64(127)
    digits[..., :-1] |= 128
    return digits.reshape(len(values), -1)


def value_bytes(feature: Feature, width: int | None) -> int:
    """Returns the bytes of the values of a feature that does not vary."""
    if feature.encoding == "int64":
        assert width is not None
        return feature.num_values * width
    return feature.num_bytes


def make_layout(schema: Schema, widths: Mapping[str, int]) -> Layout | None:
    """Returns where the values lie in each record, or None when a feature varies in length.

    Args:
        widths: for each feature of encoding "int64", the bytes of each of its varints.
    """
    if _varying(schema):
        return None
    template, slots = _example_template(schema.features, widths)
    return Layout(record_bytes=len(template), slots=slots)


def make_framer(schema: Schema, widths: Mapping[str, int]) -> FixedFramer | VariableFramer:
    """Returns what turns blocks of this schema into framed records. Not for use by two threads."""
    return VariableFramer(schema, widths) if _varying(schema) else FixedFramer(schema, widths)


class FixedFramer:
    """Frames records that all have the same length."""

    def __init__(self, schema: Schema, widths: Mapping[str, int]):
        template, self._slots = _example_template(schema.features, widths)
        frame = np.frombuffer(b"".join(frame_record(template)), np.uint8)
        self.block_records = max(1, _BLOCK_BYTES // len(frame))
        self._schema = schema
        self._widths = widths
        self._record_bytes = len(template)
        self._block = np.empty((self.block_records, len(frame)), np.uint8)
        self._block[:] = frame

    def frame(self, block: Block) -> memoryview:
        """Returns the framed bytes of at most ``block_records`` records, valid until the next call.

        Args:
            block: for each feature an array [n, *shape] of its dtype (int64 for varints).
        """
        num_records = len(block[self._schema.features[0].name])
        frames = self._block[:num_records]
        for feature in self._schema.features:
            slot = self._slots[feature.name]
            start = HEADER_BYTES + slot.offset
            width = self._widths.get(feature.name)
            frames[:, start : start + slot.bytes] = _to_bytes(feature, block[feature.name], width)
        flat = memoryview(frames).cast("B")
        size, frame_bytes = self._record_bytes, frames.shape[1]
        checksums = np.fromiter(
            (
                crc32c(flat[start : start + size])
                for start in range(HEADER_BYTES, num_records * frame_bytes, frame_bytes)
            ),
            np.uint32,
            num_records,
        )
        # mask() for the whole column; uint32 arithmetic wraps as it should.
        masked = ((checksums >> np.uint32(15)) | (checksums << np.uint32(17))) + np.uint32(
            _MASK_DELTA
        )
        frames[:, -FOOTER_BYTES:] = masked.astype("<u4").view(np.uint8).reshape(-1, FOOTER_BYTES)
        return flat


class VariableFramer:
    """Frames records that differ in length: first the features that vary, then the others."""

    block_records = 256

    def __init__(self, schema: Schema, widths: Mapping[str, int]):
        self._varying = _varying(schema)
        self._fixed = [item for item in schema.features if item not in self._varying]
        self._widths = widths
        self._tail, self._slots = _entries(self._fixed, widths)

    def frame(self, block: Block) -> bytes:
        """Returns the framed bytes of a block.

        Args:
            block: for each feature that does not vary an array, see FixedFramer; else a value for
                each record: the bytes of an image or a string, the strings of a feature with more
                than one, or an array [n, *shape[1:]] of its dtype.
        """
        num_records = len(block[self._varying[0].name])
        tails = np.empty((num_records, len(self._tail)), np.uint8)
        tails[:] = np.frombuffer(self._tail, np.uint8)
        for feature in self._fixed:
            slot = self._slots[feature.name]
            tails[:, slot.offset : slot.offset + slot.bytes] = _to_bytes(
                feature, block[feature.name], self._widths.get(feature.name)
            )
        parts: list[bytes] = []
        for row in range(num_records):
            entries = [_entry(item, _values(item, block[item.name][row])) for item in self._varying]
            entries.append(tails[row].tobytes())
            parts.extend(frame_record(_field(1, b"".join(entries))))
        return b"".join(parts)


def frame_record(record: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the header, the record and the footer of one record."""
    length = struct.pack("<Q", len(record))
    header = length + struct.pack("<I", mask(crc32c(length)))
    return header, record, struct.pack("<I", mask(crc32c(record)))


def cut_frames(framed: _Bytes) -> tuple[list[_Bytes], int]:
    """Returns the framed records that are whole, and where the last of them ends."""
    frames, at = [], 0
    while len(framed) - at >= HEADER_BYTES:
        (length,) = struct.unpack_from("<Q", framed, at)
        end = at + HEADER_BYTES + length + FOOTER_BYTES
        if end > len(framed):
            break
        frames.append(framed[at:end])
        at = end
    return frames, at


def example_of(values: Mapping[Feature, Any]) -> bytes:
    """Returns the Example of one record.

    Args:
        values: of each feature, as ``VariableFramer.frame`` takes those that vary.
    """
    return _field(1, b"".join(_entry(item, _values(item, own)) for item, own in values.items()))


def value_of(record: bytes, feature: Feature) -> Any:
    """Returns what ``example_of`` was given for a feature: bytes, several of them, or an array.

    Raises:
        ValueError: the bytes are no Example.
    """
    if feature.encoding == "int64":
        flat = np.array(int64_in(record, feature.name), np.int64)
    elif feature.encoding == "float":
        found = list_in(record, feature.name, "float")
        flat = np.array([] if found is None else floats(record, found), feature.dtype)
    else:
        values = values_in(record, feature.name)
        if feature.encoding != "raw":
            return values if feature.encoding == "bytes" and feature.shape else values[0]
        flat = np.frombuffer(b"".join(values), feature.dtype)
    shape = (-1, *feature.shape[1:]) if feature.is_ragged else feature.shape
    return flat.reshape(shape).astype(feature.dtype)


def _varying(schema: Schema) -> list[Feature]:
    return [feature for feature in schema.features if feature.varies]


def _values(feature: Feature, value: Any) -> bytes:
    """Returns the fields of the list that holds one record's values of a feature that varies."""
    if feature.is_image or (feature.encoding == "bytes" and feature.shape == ()):
        return _field(1, value)
    if feature.encoding == "bytes":
        return b"".join(_field(1, text) for text in value)
    assert value.dtype == feature.dtype, (feature, value.dtype)
    if feature.encoding == "int64":
        value = value.astype(np.int64, copy=False)
        packed = padded_varints(value.reshape(1, -1), varint_width(value)) if value.size else value
        return _field(1, packed.tobytes())
    return _field(1, np.ascontiguousarray(value).tobytes())


def _to_bytes(feature: Feature, values: np.ndarray, width: int | None) -> np.ndarray:
    """Returns the values of n records as uint8 [n, bytes]."""
    if feature.encoding == "int64":
        assert width is not None
        return padded_varints(values.reshape(len(values), -1), width)
    assert values.dtype == feature.dtype, (feature, values.dtype)
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _field(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited protobuf field."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def _entry(feature: Feature, values: bytes) -> bytes:
    """Returns one entry of the map Features.feature; ``values``, fields of a list, end it."""
    value_list = _field(_LIST_FIELD[feature.encoding], values)
    return _field(1, _field(1, feature.name.encode()) + _field(2, value_list))


def _entries(
    features: Sequence[Feature], widths: Mapping[str, int]
) -> tuple[bytes, dict[str, Slot]]:
    """Returns the entries with zeros for values, and where the values go."""
    entries, slots = b"", {}
    for feature in features:
        num_bytes = value_bytes(feature, widths.get(feature.name))
        entries += _entry(feature, _field(1, bytes(num_bytes)))
        kind = "varint" if feature.encoding == "int64" else feature.encoding
        slots[feature.name] = Slot(offset=len(entries) - num_bytes, bytes=num_bytes, kind=kind)
    return entries, slots


def _example_template(
    features: Sequence[Feature], widths: Mapping[str, int]
) -> tuple[bytes, dict[str, Slot]]:
    entries, slots = _entries(features, widths)
    template = _field(1, entries)
    shift = len(template) - len(entries)
    return template, {
        name: replace(slot, offset=slot.offset + shift) for name, slot in slots.items()
    }
