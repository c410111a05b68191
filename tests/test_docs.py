"""What the documents show works: their YAML describes workloads and studies, the README's Python runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit import Workload
from labkit.study.matrix import Matrix

ROOT = Path(__file__).parents[1]


def blocks(document: str, language: str) -> list[str]:
    """The code of a language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def launches() -> list[dict[str, Any]]:
    """The `launch` sections that documents show."""
    loaded = [yaml.safe_load(text) for name in ("docs/workload.md", "docs/fp8.md") for text in blocks(name, "yaml")]
    return [each["launch"] for each in loaded if each.keys() == {"launch"}]


def test_workload_and_study_of_the_documents_load(tmp_path: Path) -> None:
    workload, *_ = blocks("docs/workload.md", "yaml")
    study, *_ = blocks("docs/study.md", "yaml")
    (tmp_path / "workload.yaml").write_text(workload)
    (tmp_path / "study.yaml").write_text(study)
    assert not Workload.load(tmp_path / "workload.yaml").findings
    matrix = Matrix.load(tmp_path / "study.yaml")
    assert len(matrix.settings) + len(matrix.refused) >= 3 * 2 * 2, (
        "every setting of the sweep is there or says why not"
    )


def test_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    slow = ("trace(", "Study.load(")
    for text in blocks("README.md", "python"):
        exec("".join(line for line in text.splitlines(keepends=True) if not line.startswith(slow)), names)  # noqa: S102
    assert names["lean"].recompute.label == "[moe_act]"
