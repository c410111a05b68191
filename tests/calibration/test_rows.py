"""Files of measured cells as people have them: what is clear is read, what is wrong is one sentence."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.calibration.cells import DEFAULT_CELLS, read
from labkit.errors import InputError

ROOT = Path(__file__).parents[2]
HEADER, FIRST, SECOND = DEFAULT_CELLS.read_text(encoding="utf-8").splitlines()[:3]


def altered(**columns: str) -> str:
    """A file of the first published cell, some columns changed."""
    row = dict(zip(HEADER.split(","), FIRST.split(","), strict=True)) | columns
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([row, row.values()])
    return text.getvalue()


def problem(tmp_path: Path, content: str | bytes) -> str:
    """The sentence that a file gets."""
    path = tmp_path / "cells.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as raised:
        read(path, DEFAULT_CELLS)
    sentence = str(raised.value)
    assert sentence.startswith(str(path))
    assert "\n" not in sentence
    return sentence.removeprefix(str(path))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("\ufeff" + altered(), id="byte order mark"),
        pytest.param(altered().replace("\n", "\r\n"), id="CRLF"),
        pytest.param(altered().replace(",", ", "), id="blanks around values"),
        pytest.param(altered() + "\n" + "," * HEADER.count(",") + "\n", id="blank rows at the end"),
        pytest.param(altered(compiled="true", sequence_parallel="TRUE"), id="flags in other letters"),
        pytest.param(altered(lengths="12288x2"), id="equal sequences"),
        pytest.param(altered(remark='"quoted, with a comma"'), id="another column"),
    ],
)
def test_what_is_clear_is_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cells.csv"
    path.write_text(content, encoding="utf-8", newline="")
    assert read(path, DEFAULT_CELLS) == read(DEFAULT_CELLS)[:1]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"lengths": "x"}, "lengths should be like 4096+2048 or 256x8, not 'x'"),
        ({"lengths": "2048x0"}, "not '2048x0'"),
        ({"lengths": ""}, "lengths should be like"),
        ({"lengths": "0+24576"}, "lengths should be like"),
        ({"lengths": "1_0+2"}, "lengths should be like"),
        ({"lengths": "1x999999"}, "lengths names more than 16384 sequences"),
        ({"packed_tokens": "many"}, "packed_tokens should be a whole number, not 'many'"),
        ({"packed_tokens": "1e4"}, "packed_tokens should be a whole number"),
        ({"packed_tokens": "0"}, "packed_tokens should be at least 1"),
        ({"packed_tokens": "10000"}, "packed_tokens (10000) is less than lengths and shared_prefix make: 20890"),
        ({"packed_tokens": "30000"}, "packed_tokens (30000) is more than lengths and shared_prefix make (24576)"),
        ({"shared_prefix": "99999"}, "shared_prefix (99999) is longer than the shortest of lengths (12288)"),
        ({"shared_prefix": "0"}, "packed_tokens (20892) is less than lengths and shared_prefix make: 24576"),
        ({"baseline_max_bytes": ""}, "baseline_min_bytes and baseline_max_bytes go together"),
        ({"baseline_max_bytes": "5"}, "baseline_max_bytes is less than baseline_min_bytes"),
        ({"model": "Qwen/Qwen9-27B"}, "unknown model 'qwen9-27b'; did you mean"),
        ({"model": "../else.yaml"}, "model should be the name of a model, not a file"),
        ({"recompute": "some"}, "recompute should be none, selective or full, not 'some'"),
        ({"recompute_modules": "mlp"}, "recompute_modules needs recompute: selective"),
        ({"compiled": "yes"}, "compiled should be True or False, not 'Yes'"),
        ({"status": "done"}, "status should be measured or refused, not 'done'"),
    ],
)
def test_a_wrong_value_is_one_sentence(tmp_path: Path, columns: dict[str, str], text: str) -> None:
    sentence = problem(tmp_path, altered(**columns))
    assert sentence.startswith(", case h200-01: ")
    assert text in sentence


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ": empty"),
        ("\n\n", ": empty"),
        (HEADER + "\n", ": no rows below the column names"),
        ("case,model\nx,y\n", ": no column 'layers'"),
        (altered().replace(",", ";"), ": no column 'case'; its values are separated by semicolons"),
        (altered().replace(",", "\t"), "separated by tabs"),
        (f"{HEADER},model\n{FIRST},other\n", ": column 'model' is there 2 times"),
        (f"{HEADER}\n{FIRST}\n{SECOND}\n{FIRST}\n", ", case h200-01: it is there 2 times"),
        (f"{HEADER}\n{FIRST},1\n", ", line 2: 29 values for 28 columns"),
        (f"{HEADER}\nh200-01,Qwen\n", ", line 2: 2 values for 28 columns"),
        (f'{HEADER}\n"h200-01\n', ": not CSV (line 2"),
        (altered(case=""), ", line 2: case is empty"),
        (altered(status="refused"), ": no row has the status measured"),
        (altered().encode("utf-16"), ": not text in UTF-8"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, content: str | bytes, text: str) -> None:
    assert text in problem(tmp_path, content)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cells.csv")
    with pytest.raises(InputError, match="no regular file"):
        read(tmp_path / "cells.csv")


def test_the_command_ends_with_exit_code_2_and_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text(altered(case="\x1b[31m", lengths="x"), encoding="utf-8")
    command = (sys.executable, "benchmarks/accuracy_h200.py", "--cells", str(path))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"error: {path}, case \\x1b[31m: lengths should be like 4096+2048 or 256x8, not 'x'\n"
