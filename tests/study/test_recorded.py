"""Published figures answer only for the workload they were measured on."""

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
