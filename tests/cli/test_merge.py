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


def test_parts_of_shards_become_the_folder_of_one_run(tfdist, tmp_path):
    code, out, err = tfdist("merge", "all")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "`tfdist shard SOURCE" in err
    for part in ("2/2", "1/2"):
        code, out, _ = tfdist("shard", "digits", "all", "--part", part, "--resume", "--json")
        assert code == 0
        assert json.loads(out.splitlines()[-1])["splits"]["train"]["shards"] == 2
        if part == "2/2":
            code, out, err = tfdist("merge", "all")
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert "1 of 2 missing or not whole yet: 1." in err
            assert "--part 1/2 --resume" in err
    again = tfdist("shard", "digits", "all", "--part", "1/2", "--resume")
    assert again[0] == 0
    assert "is there whole: nothing was written" in again[1]
    assert "next: tfdist merge all" in again[1]
    code, out, err = tfdist("merge", "all", "--overwrite")
    assert (code, err.count("\n")) == (2, 1)
    code, out, _ = tfdist("merge", "all", "--json")
    result = json.loads(out.splitlines()[-1])
    assert (code, result["parts"], result["splits"]["train"]["records"]) == (0, 2, 1498)
    code, _, err = tfdist("merge", "all")
    assert code == 2
    assert "/all, which is there, and no part beside it. See that" in err
    assert tfdist("shard", "digits", "one")[0] == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "all").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
