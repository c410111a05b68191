"""Published figures answer only for the workload they were measured on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.drivers.recorded import Published
from labkit.errors import InputError
from labkit.workload import Workload
from labkit.workload.files import data_directory

PUBLISHED = data_directory() / "published" / "moonlight-16b.yaml"
MOONLIGHT = Workload.load(data_directory() / "workloads" / "moonlight-16b.yaml")


def selective(*labels: str) -> Workload:
    return MOONLIGHT.with_recompute(recompute_granularity="selective", recompute_modules=list(labels))


def test_figures_are_exact_bytes_with_their_source() -> None:
    measurement = Published.load(PUBLISHED).measurement(selective("moe_act"))
    assert measurement is not None
    assert measurement.peak_allocated_bytes == 35_941_000_000
    assert (measurement.step_time_ms, measurement.tflops_per_gpu) == (466.26, 75.50)
    assert measurement.driver == "published"
    assert measurement.source.startswith("NVIDIA, H100 80GB, August 2026")


def test_order_of_modules_does_not_matter() -> None:
    published = Published.load(PUBLISHED)
    one, other = selective("moe_act", "layernorm"), selective("layernorm", "moe_act")
    peaks = [published.measurement(workload) for workload in (one, other)]
    assert [peak.peak_allocated_bytes for peak in peaks if peak] == [35_949_000_000] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism": {"tensor_model_parallel_size": 4}},
        {"batch": {"seq_length": 8192}},
        {"training": {"gpu": "h200-141gb"}},
    ],
)
def test_another_workload_has_no_published_figures(changes: dict[str, dict[str, Any]]) -> None:
    stated = MOONLIGHT.model_dump()
    for part, fields in changes.items():
        stated[part] |= fields
    other = Workload.from_mapping(stated)
    assert Published.load(PUBLISHED).measurement(other) is None


def test_choice_that_was_not_measured_has_none() -> None:
    assert Published.load(PUBLISHED).measurement(selective("layernorm")) is None


def test_statement_about_a_field_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    stated = yaml.safe_load(PUBLISHED.read_text())
    stated["workload"]["parallelism"]["tensor_parallel_size"] = 2
    path = tmp_path / "published.yaml"
    path.write_text(yaml.safe_dump(stated))
    with pytest.raises(InputError, match=r"published.yaml: unknown key 'workload.parallelism.tensor_parallel_size'"):
        Published.load(path).measurement(MOONLIGHT)


def test_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    stated = yaml.safe_load(PUBLISHED.read_text())
    stated["cells"][0]["peak_gib"] = 1.0
    path = tmp_path / "published.yaml"
    path.write_text(yaml.safe_dump(stated))
    with pytest.raises(InputError, match=r"unknown key 'cells.0.peak_gib'"):
        Published.load(path)


def rewritten(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    stated = yaml.safe_load(PUBLISHED.read_text())
    change(stated)
    path = tmp_path / "published.yaml"
    path.write_text(yaml.safe_dump(stated))
    return path


@pytest.mark.parametrize("figure", [math.inf, 1e300, 0.0, -1.0, math.nan])
@pytest.mark.parametrize("field", ["peak_gb", "step_time_ms"])
def test_a_figure_that_nobody_can_have_measured_is_refused(field: str, figure: float, tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda stated: stated["cells"][0].__setitem__(field, figure))
    with pytest.raises(InputError, match=rf"published.yaml: cells.0.{field}"):
        Published.load(path)


def test_the_same_choice_twice_is_refused_in_whatever_order(tmp_path: Path) -> None:
    def twice(stated: dict[str, Any]) -> None:
        again = {**stated["cells"][5], "peak_gb": 1.0}
        again["recompute"] = {
            **again["recompute"],
            "recompute_modules": again["recompute"]["recompute_modules"][::-1],
        }
        stated["cells"].append(again)

    with pytest.raises(InputError, match=r"cells.6 \[layernorm, moe_act\] repeats cells.5"):
        Published.load(rewritten(tmp_path, twice))


def test_unknown_label_is_refused(tmp_path: Path) -> None:
    def misspelt(stated: dict[str, Any]) -> None:
        stated["cells"][4]["recompute"]["recompute_modules"] = ["moe_akt"]

    with pytest.raises(InputError, match="'moe_akt' is not allowed; did you mean 'moe_act'"):
        Published.load(rewritten(tmp_path, misspelt))


def test_figures_that_could_not_appear_are_said_before_a_study_runs(tmp_path: Path) -> None:
    workloads = [selective(), selective("moe_act")]
    Published.load(PUBLISHED).check(workloads)

    def of_another(stated: dict[str, Any]) -> None:
        stated["workload"]["batch"]["seq_length"] = 8192

    with pytest.raises(InputError, match=r"of another workload \(workload.batch.seq_length is 8192, not 4096\)"):
        Published.load(rewritten(tmp_path, of_another)).check(workloads)

    def without_granularity(stated: dict[str, Any]) -> None:
        del stated["cells"][4]["recompute"]["recompute_granularity"]

    with pytest.raises(
        InputError, match=r"published.yaml: cells.4: recompute_modules does nothing without recompute_gran"
    ):
        Published.load(rewritten(tmp_path, without_granularity)).check(workloads)
