"""What a TensorFlow Serving container runs around each request; no TensorFlow is needed for it.

Requests: ``application/json`` as TensorFlow Serving takes it, ``application/jsonlines`` with an
instance a line, or ``application/x-tfrecord``: framed tf.train.Examples as ``tfdist shard`` writes
them, whose checksums are verified. Answers: JSON, or a line for each record (batch transform with
``assemble_with="Line"``).
"""

import base64
import json
import struct

try:
    from crc32c import crc32c
except ImportError:  # Without a network nothing is installed.

    def crc32c(data):
        checksum = 0xFFFFFFFF
        for byte in data:
            checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
        return checksum ^ 0xFFFFFFFF


RECORDS_SIGNATURE = "serving_records"
_MASK_DELTA = 0xA282EAD8
_TABLE = range(256)
for _ in range(8):
    _TABLE = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE]


def input_handler(data, context):
    """Returns the body of the request to TensorFlow Serving.

    Args:
        data: the body of the request, a stream of bytes.
        context: has ``request_content_type``.

    Raises:
        ValueError: another content type, or records that are not as they were written.
    """
    kind = (context.request_content_type or "").split(";")[0].strip()
    body = data.read()
    if kind == "application/json":
        return body.decode()
    if kind in ("application/jsonlines", "application/x-jsonlines"):
        # Not splitlines: what Unicode calls a line's end may stand within a string.
        lines = body.decode().split("\n")
        return json.dumps({"instances": [json.loads(line) for line in lines if line.strip()]})
    if kind == "application/x-tfrecord":
        examples = [{"b64": base64.b64encode(record).decode()} for record in _records(body)]
        return json.dumps({"signature_name": RECORDS_SIGNATURE, "inputs": {"examples": examples}})
    raise ValueError(
        "the content type must be application/json, application/jsonlines or "
        f"application/x-tfrecord, but found {kind or 'none'}."
    )


def output_handler(response, context):
    """Returns (body, content type) of the answer: TensorFlow Serving's own, or a line a record.

    Args:
        response: TensorFlow Serving's, with ``status_code`` and ``content``.
        context: has ``accept_header``.

    Raises:
        ValueError: TensorFlow Serving did not answer with 200.
    """
    if response.status_code != 200:
        raise ValueError(response.content.decode("utf-8", "replace"))
    accepted = context.accept_header or "application/json"
    if "jsonlines" not in accepted:
        return response.content, "application/json"
    answer = json.loads(response.content)
    rows = answer.get("predictions", answer.get("outputs"))
    if isinstance(rows, dict):  # Several outputs: columns to rows.
        columns = zip(*rows.values(), strict=True)
        rows = [dict(zip(rows, row, strict=True)) for row in columns]
    return "".join(json.dumps(row) + "\n" for row in rows), "application/jsonlines"


def _records(body):
    """Yields the records of TFRecord frames: length, its checksum, data, its checksum."""
    offset = 0
    while offset < len(body):
        header = body[offset : offset + 12]
        if len(header) < 12:
            raise ValueError(
                f"records must be whole, but found an end in the middle of one, at byte {offset}"
            )
        length, length_sum = struct.unpack("<QI", header)
        record = body[offset + 12 : offset + 12 + length]
        footer = body[offset + 12 + length : offset + 16 + length]
        if length_sum != _masked(header[:8]):
            raise ValueError(
                f"the length at byte {offset} must match its checksum, but found another one"
            )
        if len(footer) < 4:
            raise ValueError(
                f"records must be whole, but found an end in the middle of one, at byte {offset}"
            )
        if struct.unpack("<I", footer)[0] != _masked(record):
            raise ValueError(
                f"the record at byte {offset} must match its checksum, but found another one"
            )
        yield record
        offset += 16 + length


def _masked(data):
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF
