"""`labkit admit`: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest
import yaml

from labkit.admission.decision import Decided
from labkit.cli import main
from tests.memory.test_lora import tuned


def admit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["admit", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_admits_refuses_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, requests = tmp_path / "w.yaml", tmp_path / "r.json"
    workload.write_text(yaml.safe_dump(tuned().model_dump(mode="json", exclude_unset=True)))
    requests.write_text(json.dumps({"requests": [256, {"length": 300, "group": "g"}]}))
    assert admit(str(workload), str(requests), "--budget", "2GiB", "--json") == 0
    decided = json.loads(capsys.readouterr().out)
    assert (decided["outcome"], decided["micro_batches"][0]["requests"]) == ("admit", [0, 1])
    assert Decided.model_validate(decided, strict=False).budget_bytes == 2**31
    assert admit(str(workload), str(requests), "--budget", "300MiB") == 1
    assert capsys.readouterr().out.startswith("Refuse: ")
    requests.write_bytes(b"\xff[1]")
    assert admit(str(workload), str(requests)) == 2
    assert capsys.readouterr() == ("", f"labkit: {requests}: not text in UTF-8\n")
