"""labkit refuses what Megatron Core's own validator refuses, and nothing else in its name (`make differential`)."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = 200


def test_a_sample_of_workloads_is_judged_as_megatron_judges_them() -> None:
    command = [sys.executable, "-m", "benchmarks.differential", "--cases", str(CASES), "--seed", "2", "--brief"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = re.search(
        r"(\d+) workloads: TransformerConfig accepts (\d+) and refuses (\d+); 0 disagreements", ended.stdout
    )
    assert said is not None, ended.stdout + ended.stderr[-2000:]
    assert ended.returncode == 0
    assert min(map(int, said.groups())) > CASES // 5
