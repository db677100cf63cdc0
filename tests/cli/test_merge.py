"""``tfdist merge`` as a user calls it."""

from __future__ import annotations

import json

from tfdist.records.parts import Part
from tfdist.runs.prediction_parts import Share, write_note


def test_parts_become_the_file_and_a_missing_one_is_one_line(tfdist, tmp_path):
    output = tmp_path / "all.csv"
    code, out, err = tfdist("merge", str(output))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "tfdist predict ... --part 1/8" in err
    for part in Part(1, 2).others:
        share = Share(part, 2)
        rows = share.among(5)
        lines = "".join(f"{row}\r\n" for row in rows)
        part.path_of(output).write_bytes(f"row\r\n{lines}".encode())
        told = {"predictions": ((len(rows), 1), "float32")}
        digests = {"model": "m", "function": "f", "trained_on": "t", "data": "d"}
        write_note(part.path_of(output), share, told, digests, {"data": "a b"})
        if part.number == 1:
            code, out, err = tfdist("merge", str(output))
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert "`tfdist predict --data 'a b' --part 2/2 --resume`" in err
    code, out, _ = tfdist("merge", str(output), "--json")
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (result["parts"], result["records"]) == (2, 5)
    assert output.read_bytes() == b"row\r\n" + b"".join(b"%d\r\n" % row for row in range(5))
