"""What the GPU check is held against belongs to the cells it measures."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_each_cell_has_been_traced_and_estimated() -> None:
    check = runpy.run_path(str(SCRIPT))
    expected = json.loads(check["EXPECTED"].read_text(encoding="utf-8"))
    cells = {check["named"](workload): workload.content_hash for workload in check["cells"]()}
    assert {name: each["workload"] for name, each in expected.items()} == cells, "run scripts/gpu_check.py --expect"
    assert len(cells) == 8
    for each in expected.values():
        assert max(each["traced"].values()) > each["traced_between_steps"] > 10**9
