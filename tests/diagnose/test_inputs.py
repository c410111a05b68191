"""Which reader a file is given to, and what cannot be read at all."""

import json
import os
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.diagnose import diagnose
from labkit.errors import InputError


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, said in ((pipe, "no regular file"), (tmp_path, "a folder; give its files")):
        with pytest.raises(InputError, match=said):
            diagnose([path])


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\0\0\0", b"\x1f\x8b\x08\0\0\0\0", "CUDA out of memory".encode("utf-16")]
)
def test_what_is_no_text_and_no_snapshot_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.log"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"file\.log"):
        diagnose([path])


def test_the_command_says_it_in_json_or_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB [red]\n", encoding="utf-8"
    )
    for arguments, code in (([str(log), "--json"], 0), ([str(log)], 0), (["-", "-"], 2), ([str(tmp_path / "none")], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["diagnose", *arguments])
        assert ended.value.code == code
        out, err = capsys.readouterr()
        if code:
            assert (out, err.count("\n")) == ("", 1)
        elif "--json" in arguments:
            said = json.loads(out)
            assert said["schema_name"] == "labkit.diagnosis/1"
            assert said["findings"][0]["evidence"] == [
                {
                    "source": str(log),
                    "line": 1,
                    "text": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB [red]",
                }
            ]
        else:
            assert "Rank 3 asked for 2.00 GiB" in out
            assert "run.log:1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB [red]" in out
