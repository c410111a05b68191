"""PyTorch's allocator settings: rounding and rules."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from labkit.allocator import simulate_training
from labkit.errors import InputError
from labkit.workload.caching import AllocatorSettings, allocator_findings
from labkit.workload.gpu import GIB, GPUS, MIB
from labkit.workload.training import Training
from tests.small import small


def found(**settings: Any) -> list[tuple[str, str]]:
    """Severity and field of what the settings break."""
    workload = small()
    training = workload.training.model_copy(update={"allocator": AllocatorSettings(**settings)})
    findings = allocator_findings(workload.model_copy(update={"training": training}))
    return [(finding.severity, finding.field.removeprefix("training.allocator.")) for finding in findings]


@pytest.mark.parametrize(
    ("settings", "severity", "field"),
    [
        ({"max_split_size_mb": 19}, "error", "max_split_size_mb"),
        ({"large_segment_size_mb": 21}, "error", "max_non_split_rounding_mb"),
        ({"roundup_power2_divisions": 3}, "error", "roundup_power2_divisions"),
        ({"roundup_power2_divisions": "[3:8]"}, "error", "roundup_power2_divisions"),
        ({"roundup_power2_divisions": "[64:3]"}, "error", "roundup_power2_divisions"),
        ({"garbage_collection_threshold": 0.8}, "warning", "garbage_collection_threshold"),
    ],
)
def test_what_pytorch_refuses_is_an_error_and_what_it_ignores_a_warning(
    settings: dict[str, Any], severity: str, field: str
) -> None:
    assert found(**settings) == [(severity, field)]


def test_what_pytorch_takes_is_no_finding() -> None:
    assert not found(roundup_power2_divisions="[64:0,256:8,>:1]", max_split_size_mb=20)
    assert not found(garbage_collection_threshold=0.8, per_process_memory_fraction=0.9)


@pytest.mark.parametrize(
    "settings",
    [
        {"large_segment_size_mb": 10},
        {"garbage_collection_threshold": 1.0},
        {"per_process_memory_fraction": 1.5},
        {"roundup_power2_divisions": "64:8"},
        {"roundup_power2_divisions": "[256:1512:2]"},
        {"roundup_power2_divisions": "[256:2,,512:2]"},
        {"roundup_power2_divisions": True},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AllocatorSettings(**settings)


def test_divisions_that_are_none_are_named_in_one_sentence() -> None:
    with pytest.raises(InputError) as refused:
        small(training__allocator={"roundup_power2_divisions": True})
    assert str(refused.value) == (
        "workload: training.allocator.roundup_power2_divisions: should be a power of two, or a text such as "
        "'[256:2,512:4,>:8]' (got True)"
    )


ACCEPTED = {
    "": "default settings",
    "expandable_segments:True, max_split_size_mb:64,": "expandable_segments:True,max_split_size_mb:64",
    "max_split_size_mb:64MB": "max_split_size_mb:64",
    "max_split_size_mb:+64:garbage_collection_threshold:.5": "max_split_size_mb:64,garbage_collection_threshold:0.5",
    "roundup_power2_divisions:[256 :2, >: 8 ]": "roundup_power2_divisions:[256:2,>:8]",
    "roundup_power2_divisions:[256:2,]": "roundup_power2_divisions:[256:2,]",
    "roundup_power2_divisions:[]": "roundup_power2_divisions:[]",
    "backend:native,pinned_free_catch_all:True,per_process_memory_fraction:0.5": "per_process_memory_fraction:0.5",
}
REFUSED = {
    "garbage": "no value follows garbage",
    "expandable_segments": "no value follows expandable_segments",
    "max_split_size_mb=64": "no value follows max_split_size_mb=64",
    "max_split_size_mb:\u06630": "max_split_size_mb:\u06630 is no number",
    "max_split_size_mb:64 garbage_collection_threshold:0.6": "no value follows 0.6",
    "max_split_size_mb:64;expandable_segments:True": "no value follows True",
    "max_split_size_mb:64,,": "no value follows ,",
    "max_split_size_mb:[64]": r"max_split_size_mb:[64] is no number",
    "expandable_segments:true": "PyTorch has no setting expandable_segments:true",
    "nonsense:3": "PyTorch has no setting nonsense:3",
    "roundup_power2_divisions:[256:1512:2]": "should be a power of two, or a text such as",
    "roundup_power2_divisions:[256:2": "no value follows roundup_power2_divisions",
    "roundup_power2_divisions:[256:2,,512:4]": "should be a power of two, or a text such as",
    "garbage_collection_threshold:1.0": "less than 1",
}


def test_pytorch_takes_and_refuses_the_same_texts() -> None:
    code = (
        "import json, sys, torch\n"
        "def taken(text):\n"
        "    try: torch._C._accelerator_setAllocatorSettings(text)\n"
        "    except (ValueError, RuntimeError): return False\n"
        "    return True\n"
        "print(json.dumps([taken(text) for text in json.load(sys.stdin)]))\n"
    )
    texts = json.dumps([*ACCEPTED, *REFUSED])
    ended = subprocess.run([sys.executable, "-c", code], input=texts, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [True] * len(ACCEPTED) + [False] * len(REFUSED)


@pytest.mark.parametrize(("text", "label"), ACCEPTED.items())
def test_a_text_that_pytorch_takes_is_read(text: str, label: str) -> None:
    settings = AllocatorSettings.read(text)
    assert settings.label == label
    assert settings.rounded(513) == 1024


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_a_text_that_pytorch_refuses_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        AllocatorSettings.read(text)


def test_sizes_are_rounded_to_divisions_of_a_power_of_two() -> None:
    """The example of PyTorch's documentation: 1200 in 4 divisions is 1280; here in the allocator's units."""
    fourths = AllocatorSettings(roundup_power2_divisions=4)
    assert fourths.rounded(1200 * MIB) == 1280 * MIB
    assert fourths.rounded(1280 * MIB) == 1280 * MIB
    assert fourths.rounded(600) == 1024
    assert AllocatorSettings().rounded(1200 * MIB + 1) == 1200 * MIB + 512


def test_intervals_have_their_own_divisions() -> None:
    settings = AllocatorSettings(roundup_power2_divisions="[64:2,256:4,>:1]")
    found = {size: settings.rounded(size * MIB + 1) / MIB for size in (33, 70, 260)}
    assert found[33] == 48
    assert found[70] == 96
    assert found[260] == 320
    assert settings.rounded(600 * MIB + 1) == 600 * MIB + 512


def test_a_full_gpu_is_told_with_what_it_would_need() -> None:
    """Freed segments of 30 GiB serve no request of 31 GiB until they go back; three live ones do not fit."""
    events = [(1, 30 * GIB), (-1, 0), (2, 31 * GIB), (3, 31 * GIB), (4, 31 * GIB)]
    simulated = simulate_training(events, [0] * 4, Training())
    assert simulated.reserved[-1] == (4, 123 * GIB)
    assert simulated.retries == [3, 4]
    assert simulated.out_of_memory is not None
    place, failed = simulated.out_of_memory
    assert (place, failed.requested_bytes, failed.allocated_bytes) == (4, 31 * GIB, 62 * GIB)
    assert failed.reserved_bytes <= GPUS["h100-80gb"].total_memory_bytes
