"""The notebooks' sources: what they take, and that they are kept plain."""

import shutil
from pathlib import Path

import nbformat
import pytest
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class

from labkit.errors import InputError
from labkit.report.execute import convert
from labkit.report.notebooks import notebook_folder, notebook_source
from labkit.report.parameters import MODELS, Estimate, RecomputeStudy, input_path

ROOT = Path(__file__).parents[2]


def test_every_notebook_has_a_model() -> None:
    assert sorted(MODELS) == sorted(path.stem for path in notebook_folder().glob("*.py"))


@pytest.mark.parametrize("name", MODELS)
def test_its_parameters_are_those_it_checks_with_the_same_defaults(name: str) -> None:
    (cell,) = [cell for cell in convert(notebook_source(name)).cells if "parameters" in cell.metadata.get("tags", ())]
    stated: dict[str, object] = {}
    exec(cell.source, stated)  # noqa: S102 (our own source)
    stated.pop("__builtins__")
    model = MODELS[name]
    assert stated.keys() == model.model_fields.keys()
    defaults = {each: field.default for each, field in model.model_fields.items() if not field.is_required()}
    assert model.checked(**stated).model_dump(include=set(defaults)) == defaults


@pytest.mark.parametrize("name", MODELS)
def test_it_is_a_valid_notebook(name: str) -> None:
    nbformat.validate(convert(notebook_source(name)))


@pytest.mark.parametrize("name", MODELS)
def test_saving_it_from_jupyterlab_changes_nothing(name: str, tmp_path: Path) -> None:
    source = notebook_source(name)
    for original in (source, ROOT / "jupytext.toml"):
        shutil.copy(original, tmp_path)
    # What JupyterLab's server reads and writes files with when jupytext is installed.
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path))
    opened = manager.get(source.name, type="notebook", content=True)
    opened["content"]["metadata"]["language_info"] = {"name": "python", "version": "3.12.1"}
    manager.save(opened, source.name)
    assert (tmp_path / source.name).read_text() == source.read_text()
    assert opened["content"]["metadata"]["kernelspec"]["name"] == "python3"


def test_its_study_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert input_path("data/studies/moonlight-16b.yaml").is_file()
    own = tmp_path / "data" / "studies" / "moonlight-16b.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert input_path("data/studies/moonlight-16b.yaml").resolve() == own


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"study": "nowhere.yaml"}, "recompute_study parameters: study: there is no such file (got 'nowhere.yaml')"),
        ({}, "'study' is missing"),
        ({"study": "~no-such-user/x"}, "can be no file's name"),
        ({"study": "x" * 10_000}, "can be no file's name"),
        ({"study": "x", "worker": 2}, "unknown key 'worker'; did you mean 'workers'?"),
        ({"study": "data/studies/moonlight-16b.yaml", "workers": 0}, "workers: input should be greater than 0 (got 0)"),
        (
            {"study": "data/studies/moonlight-16b.yaml", "workers": "2"},
            "workers: input should be a valid integer (got '2')",
        ),
        (
            {"study": "data/studies/moonlight-16b.yaml", "run": "false"},
            "run: input should be a valid boolean (got 'false')",
        ),
    ],
)
def test_wrong_parameters_are_named(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        RecomputeStudy.checked(**values)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"workload": "moonlit-16b"}, "no such workload in data/workloads; did you mean 'moonlight-16b'?"),
        ({"workload": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
        ({"workload": "data/studies/moonlight-16b.yaml"}, "is a study, not a workload"),
        ({"gpus": ["h100"]}, "estimate parameters: gpus.0: no such GPU"),
        ({"gpus": []}, "estimate parameters: gpus: value should have at least 1 item"),
        ({"stage": -1}, "estimate parameters: stage: input should be greater than or equal to 0 (got -1)"),
    ],
)
def test_wrong_workloads_gpus_and_stages_are_named(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        Estimate.checked(**values)
    assert sentence in str(raised.value)
