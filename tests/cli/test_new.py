"""`labkit new`: what it writes is valid as it stands, and with each of its options by itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.starters import study_starter, workload_starter
from labkit.starters.text import MARK, comment, documented, inline
from labkit.study.matrix import Matrix, StudyFile
from labkit.study.slurm import Slurm
from labkit.workload import Workload
from labkit.workload.files import data_directory

WORKLOADS = sorted(path.stem for path in (data_directory() / "workloads").glob("*.yaml"))
MODELS = (
    "deepseek-v2-lite",
    "gpt-oss-120b",
    "kimi-k2",
    "llama-3.1-8b",
    "nemotron-3-nano-30b-a3b",
    "nemotron-h-8b",
    "qwen3-235b-a22b",
    "qwen3.5-2b",
)
"""One of each kind of layers, from 1 to 1024 ranks."""


@pytest.fixture(scope="module")
def studies() -> dict[str, str]:
    path = Path("study.yaml")
    return {name: study_starter(Workload.load(name), name, path) for name in WORKLOADS}


def switched_on(text: str) -> Iterator[str]:
    """The file with each of its options by itself, and the plain one."""
    lines = text.splitlines()
    yield text
    for position, line in enumerate(lines):
        if line.lstrip().startswith(MARK):
            yield "\n".join([*lines[:position], line.replace(MARK, "", 1), *lines[position + 1 :]])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_study_of_every_shipped_workload_is_valid_with_each_of_its_options(
    name: str, studies: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "study.yaml"
    read: list[dict[str, Any]] = []
    for text in switched_on(studies[name]):
        path.write_text(text)
        matrix = Matrix.load(path)
        assert matrix.refused == ()
        assert not any(each.workload.findings for each in matrix.candidates), text
        assert not any(each.differs_in for each in matrix.candidates), "every candidate is matched"
        read.append(yaml.safe_load(text))
    assert len(read) > 15
    assert all(each != read[0] for each in read[1:]), "an option changes what the file says"


def test_candidates_are_those_that_plan_proposes_for_the_architecture(studies: dict[str, str]) -> None:
    of_moonlight, of_qwen = (yaml.safe_load(studies[name]) for name in ("moonlight-16b", "qwen3.8-27b-lora"))
    modules = [each["recompute"].get("recompute_modules") for each in of_moonlight["candidates"]]
    assert ["moe_act"] in modules
    modules = [each["recompute"].get("recompute_modules") for each in of_qwen["candidates"]]
    assert ["gdn_norm_out"] in modules
    assert "it would try [moe_act] first" in " ".join(studies["moonlight-16b"].replace("# ", "").split())
    assert f"{MARK}published: moonlight-16b" in studies["moonlight-16b"]
    assert "published: moonlight-16b" not in studies["gpt-local"]


def test_every_key_of_a_study_and_of_slurm_is_in_it_with_what_its_model_says(studies: dict[str, str]) -> None:
    text = studies["moonlight-16b"]
    said = " ".join(text.replace("#:", "").replace("# ", " ").split())
    for part in (StudyFile, Slurm):
        for name, sentence in documented(part).items():
            assert f"{name}:" in text
            assert sentence in said


@pytest.mark.parametrize("name", MODELS)
def test_a_workload_of_a_shipped_model_is_valid_and_fits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(workload_starter(name, name, path))
    workload = Workload.load(path)
    assert workload.findings == []
    assert workload.model.name == name


@pytest.mark.parametrize("name", ["qwen3-0.6b", "moonlight-16b-a3b", "nemotron-h-8b", "gpt-oss-20b"])
def test_a_workload_is_valid_with_each_of_its_options(name: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    texts = list(switched_on(workload_starter(name, name, path)))
    for text in texts:
        path.write_text(text)
        assert Workload.load(path).findings == [], text
    assert len(texts) > 4


def test_files_are_named_after_what_they_are_of_and_never_overwritten(labkit: Callable, tmp_path: Path) -> None:
    made = labkit("new", "study")
    assert (made.returncode, made.stdout) == (0, "moonlight-16b-study.yaml\n")
    assert "labkit check moonlight-16b-study.yaml; labkit study run moonlight-16b-study.yaml" in made.stderr
    file = tmp_path / "moonlight-16b-study.yaml"
    file.write_text("mine")
    again = labkit("new", "study")
    assert (again.returncode, again.stdout) == (2, "")
    assert "is there already; name another file with -o, or - for standard output" in again.stderr
    assert file.read_text() == "mine"


def test_a_study_of_ones_own_workload_refers_to_it_from_where_it_lies(labkit: Callable, tmp_path: Path) -> None:
    assert labkit("new", "workload", "qwen3-0.6b", "-o", "mine/w.yaml").returncode == 0
    assert labkit("new", "study", "mine/w.yaml", "-o", "studies/s.yaml").stdout == "studies/s.yaml\n"
    assert yaml.safe_load((tmp_path / "studies/s.yaml").read_text())["base"] == "../mine/w.yaml"
    assert labkit("check", "studies/s.yaml").returncode == 0
    own = labkit("new", "study", "mine/w.yaml", "-o", "mine/w.yaml")
    assert own.returncode == 2
    printed = labkit("new", "study", "mine/w.yaml", "-o", "-")
    assert yaml.safe_load(printed.stdout)["base"] == "./mine/w.yaml"
    assert len(list(tmp_path.rglob("*.yaml"))) == 2


def test_a_model_file_will_do(labkit: Callable, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text((data_directory() / "models/qwen3-0.6b.yaml").read_text())
    assert labkit("new", "workload", "tiny.yaml", "-o", "w/w.yaml").returncode == 0
    assert yaml.safe_load((tmp_path / "w/w.yaml").read_text())["model"] == "../tiny.yaml"
    assert labkit("check", "w/w.yaml").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("study", "moonlite-16b"), "did you mean 'moonlight-16b'?"),
        (("study", "qwen3-8b"), "this is a model; `labkit new workload qwen3-8b` writes a workload of it"),
        (("workload", "qwen3-8c"), "unknown model 'qwen3-8c'; did you mean"),
        (("study", "-o", "/dev/null"), "/dev/null: is no regular file"),
        (("study", "-o", ""), "it is empty"),
    ],
)
def test_mistakes_are_one_sentence(labkit: Callable, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    answer = labkit("new", *arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_hostile_text_stays_in_its_comment_and_its_value() -> None:
    hostile = "a\nbase: b\r\x85\u2028x: 1 \x1b[31m"
    assert all(line.startswith("# ") for line in comment(hostile))
    assert yaml.safe_load("\n".join(comment(hostile))) is None
    assert "\x1b" not in "".join(comment(hostile))
    assert len(inline({"title": hostile}).splitlines()) == 1
    assert yaml.safe_load(inline({"title": hostile})) == {"title": hostile}


def test_hostile_names_and_a_workload_with_warnings_make_a_study_that_is_read(tmp_path: Path) -> None:
    mapping = yaml.safe_load((data_directory() / "workloads/gpt-local.yaml").read_text())
    mapping["model"]["name"] = "<script>alert(1)</script> \u202e \"'\nbase: x " + "z" * 100
    mapping["recompute"] = {"recompute_granularity": None, "recompute_modules": ["core_attn"]}
    workload_path, path = tmp_path / "$(touch x).yaml", tmp_path / "a 'study.yaml"
    workload_path.write_text(yaml.safe_dump(mapping))
    workload = Workload.load(workload_path)
    assert [each.severity for each in workload.findings] == ["warning"]
    path.write_text(study_starter(workload, f"./{workload_path.name}", path))
    text = path.read_text()
    assert Matrix.load(path).control.workload.model.name == mapping["model"]["name"]
    assert text.count(MARK) > 12, "what the workload breaks already is no reason to leave an option out"
    assert text.replace("\n", "").isprintable()
    assert """- labkit check 'a '"'"'study.yaml':""" in text, "as a shell takes it"
