"""NVIDIA's functional-test jobs of Megatron-LM: a file's rows, checked, and each traced and compared.

A row has the job's launch arguments (`megatron_args`), its variables (`env_vars`), `gpu`, `n_gpus` (8 where it is
null), and what its last rank logged: `peak_allocated_bytes`, `peak_first_step_bytes`, `allocated_bytes`.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError, LabkitError
from labkit.files import read_regular
from labkit.importers.imported import Imported
from labkit.importers.megatron import MegatronReader, import_text
from labkit.memory.estimate import estimate
from labkit.workload import Workload
from labkit.workload.base import Part
from labkit.workload.files import data_directory, text_of
from labkit.workload.workload import content_hash, first_problem

type Bytes = Annotated[int, Field(gt=0, lt=2**50)]
type Status = Literal["traced", "unsupported", "failed"]

DEFAULT_JOBS = data_directory() / "published" / "megatron_ci_peaks.jsonl"
"""The jobs of Megatron-LM's repository."""
DEFAULT_GPUS = 8
TORCH = "2.11.0"
"""The rows do not say. It decides one thing: of nine jobs on GB200 that leave cuBLAS's workspaces to PyTorch five hold
what 2.11 and older take, four what 2.12 and later do (`docs/megatron_ci.md`)."""
TRANSFORMER_ENGINE = "2.18.0"
"""What was out when the golden values of August 2026 were made. It decides one thing: the first step of
`..._fine_grained_offloading` peaks where softmax's gradient has memory from 2.19 on, and measured it has none."""
_SHARDED = "use-megatron-fsdp"
_RECIPES_OF_SHARDED = {"load": "checkpoints", "log-params-norm": True}
"""What Megatron-LM's recipes have and the rows leave out (paths and logging): it matters to Megatron-FSDP."""
MEGATRON_OF_SHARDED = "0.18.0rc0"
"""What the jobs with Megatron-FSDP ran, between 0.17 and 0.18: their bytes say so (`docs/megatron_ci.md`)."""
CURRENT = "2026-07"
"""Golden values of this month and later come from a Megatron close to 0.19."""
_SIZES = {
    "tp": "tensor-model-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "ep": "expert-model-parallel-size",
}
_OFFLOADED = "fine-grained-activation-offloading"
FAMILIES = {"moe": "moe, mixtral, hybrid", "mixtral": "moe, mixtral, hybrid", "hybrid": "moe, mixtral, hybrid"}
"""Families that are judged together."""
_MAXIMUM_BYTES = 16 * 2**20


class Row(Part):
    """One job, as far as it is read here."""

    model_config = ConfigDict(extra="ignore")

    case: str
    family: str
    gpu: str
    golden_date: str
    environment: str
    n_gpus: Annotated[int, Field(gt=0, le=2**20)] | None = None
    peak_allocated_bytes: Bytes
    peak_first_step_bytes: Bytes | None = None
    allocated_bytes: Bytes | None = None
    megatron_args: dict[str, Any]
    env_vars: dict[str, Any] | None = None
    text: str
    """The row itself: what the importer reads."""

    @property
    def world_size(self) -> int | None:
        """The job's GPUs; None where a machine's eight do not fit its layout and batch: then as many as those need."""
        needed = math.prod(size for name, size in self.sizes.items() if name != "ep")
        batch, micro_batch = (_size(self.megatron_args.get(f"{name}-batch-size")) for name in ("global", "micro"))
        fits = DEFAULT_GPUS % needed == 0 and batch % (micro_batch * (DEFAULT_GPUS // needed)) == 0
        return self.n_gpus or (DEFAULT_GPUS if fits else None)

    @property
    def sizes(self) -> dict[str, int]:
        """Of its tensor, context, pipeline and expert parallelism: tp, cp, pp, ep."""
        return {name: _size(self.megatron_args.get(argument)) for name, argument in _SIZES.items()}

    @property
    def group(self) -> str:
        """current, older, or resumed: a run that began with a checkpoint, which is not traced."""
        if self.environment.endswith("_2nd"):
            return "resumed"
        return "current" if self.golden_date >= CURRENT else "older"

    @property
    def together(self) -> str:
        """The families that it is judged with."""
        return FAMILIES.get(self.family, self.family)

    @property
    def work_hash(self) -> str:
        """Of the job as it was published: its launch and its figures."""
        return content_hash(json.loads(self.text))[:16]

    @property
    def chosen_from(self) -> bool:
        """Whether a version that the rows do not name was chosen in view of its figures: all others are held out."""
        workspaces = self.gpu == "GB200" and "CUBLAS_WORKSPACE_CONFIG" not in (self.env_vars or {})
        return workspaces or _SHARDED in self.megatron_args or _OFFLOADED in self.megatron_args


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def read_rows(path: Path) -> Iterator[Row]:
    """The jobs of a JSON-lines file.

    Raises:
        InputError: the file cannot be read, or a line is no job.
    """
    text = text_of(lambda: read_regular(path, _MAXIMUM_BYTES), str(path), encoding="utf-8-sig")
    # Not `splitlines`: JSON may have other line ends within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield Row.model_validate({**json.loads(line), "text": line})
        except (ValueError, TypeError, RecursionError) as error:
            what = first_problem(Row, error) if isinstance(error, ValidationError) else error
            raise InputError(f"{path}, line {number}: no job of Megatron-LM's tests ({what})") from None


@dataclass(frozen=True)
class Job:
    """A job and what became of it; bytes are of PyTorch's allocator."""

    case: str
    family: str
    gpu: str
    date: str
    group: str
    status: Status
    measured_bytes: int
    traced_bytes: int | None = None
    measured_first_step_bytes: int | None = None
    traced_first_step_bytes: int | None = None
    measured_between_steps_bytes: int | None = None
    traced_between_steps_bytes: int | None = None
    seconds: float | None = None
    reason: str | None = None
    """Why it was not traced."""
    assumed: tuple[str, ...] = ()
    estimated_bytes: int | None = None
    """By formula, as the two below; null where the estimate refuses the job."""
    estimated_first_step_bytes: int | None = None
    estimated_between_steps_bytes: int | None = None
    margin_bytes: int | None = None
    """What the estimate sets aside above its peak."""
    workload_hash: str | None = None

    @property
    def error(self) -> float | None:
        """Relative, above zero where the trace is higher."""
        return relative(self.traced_bytes, self.measured_bytes)

    @property
    def measured_growth_bytes(self) -> int | None:
        """What the job's peak has more than that of its first step; None where either is not known."""
        return _difference(self.measured_bytes, self.measured_first_step_bytes)

    @property
    def traced_growth_bytes(self) -> int | None:
        """The same of the trace."""
        return _difference(self.traced_bytes, self.traced_first_step_bytes)


def _difference(peak: int | None, first_step: int | None) -> int | None:
    return None if peak is None or first_step is None else peak - first_step


def relative(traced: int | None, measured: int | None) -> float | None:
    """A traced figure against a measured one."""
    return None if traced is None or not measured else traced / measured - 1


def imported(row: Row, reader: MegatronReader) -> Imported:
    """The job as a workload.

    Raises:
        InputError: it is none that labkit has.
    """
    sharded = _SHARDED in row.megatron_args
    found = import_text(
        _with_recipe(row.text) if sharded else row.text, reader, source="the job", name="job", world_size=row.world_size
    )
    versions = {
        "torch": TORCH,
        "transformer_engine": TRANSFORMER_ENGINE,
        **({"megatron_core": MEGATRON_OF_SHARDED} if sharded else {}),
    }
    software = found.workload.training.software.model_copy(update=versions)
    training = found.workload.training.model_copy(update={"software": software})
    return found._replace(workload=found.workload.model_copy(update={"training": training}))


def _with_recipe(text: str) -> str:
    row = json.loads(text)
    return json.dumps({**row, "megatron_args": _RECIPES_OF_SHARDED | row["megatron_args"]})


def traced(row: Row, reader: MegatronReader, server: TraceServer) -> Job:
    """The job's last rank, traced and estimated."""
    began = time.monotonic()
    try:
        found = imported(row, reader)
    except LabkitError as error:
        return _job(row, "unsupported", reason=str(error))
    if found.not_expressed:
        return _job(row, "unsupported", reason="; ".join(found.not_expressed))
    try:
        trace = server.run(found.workload, rank=found.workload.parallelism.world_size - 1)
    except Unfinished as error:
        status: Status = "unsupported" if error.outcome == "unsupported" else "failed"
        return _job(row, status, reason=str(error), **_estimated(found.workload))
    except LabkitError as error:
        return _job(row, "failed", reason=str(error), **_estimated(found.workload))
    seconds = round(time.monotonic() - began, 2)
    return _job(
        row, "traced", seconds=seconds, assumed=tuple(found.assumed), **_seen(trace), **_estimated(found.workload)
    )


def _seen(trace: Trace) -> dict[str, object]:
    (rank,) = trace.measurement.ranks
    return {
        "traced_bytes": rank.peak.peak_allocated_bytes,
        "traced_first_step_bytes": rank.first_step_peak_bytes,
        "traced_between_steps_bytes": trace.ledger.between_steps().total(blocks=True),
    }


def _estimated(workload: Workload) -> dict[str, object]:
    """The same by formula, and what it answers for; no figures where the estimate refuses the job."""
    facts: dict[str, object] = {"workload_hash": workload.content_hash[:16]}
    try:
        result = estimate(workload, stage=workload.parallelism.pp - 1)
        peaks = result.ledger.phase_peaks()
    except LabkitError:
        return facts
    return facts | {
        "estimated_bytes": max(peak.bytes for peak in peaks),
        "estimated_first_step_bytes": max(peak.bytes for peak in peaks if peak.iteration <= 1),
        "estimated_between_steps_bytes": result.ledger.between_steps().total(blocks=True),
        "margin_bytes": result.margin_bytes(peaks),
    }


def _job(row: Row, status: Status, **fields: object) -> Job:
    return Job(
        case=row.case,
        family=row.family,
        gpu=row.gpu,
        date=row.golden_date,
        group=row.group,
        status=status,
        measured_bytes=row.peak_allocated_bytes,
        measured_first_step_bytes=row.peak_first_step_bytes,
        measured_between_steps_bytes=row.allocated_bytes,
        **fields,  # type: ignore[arg-type]
    )
