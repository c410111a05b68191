"""Peaks that were measured, kept by what was run: they may raise an estimate, never lower it.

A profile is a folder of small files, one for each observation, named by the *signature* of its workload (everything
that decides memory but the lengths of the batch) and by its own content. Files are never changed, so any number of
processes and machines may learn into one folder at once, in any order, and the same observation twice is one file.

An observation holds for workloads of its signature whose sequences are at least as long and whose micro-batches are at
least as large (packed ones: in every count of rows and sequences): those hold no less. The largest such peak is the
estimate's floor. Where the estimate is below it, a row of its own with the missing bytes raises it.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from labkit.errors import InputError, WorkError
from labkit.files import read_regular, write_atomically
from labkit.ledger import Certainty, Ledger, Row
from labkit.memory.estimate import Estimate
from labkit.summary import PROFILE, Written
from labkit.workload import Batch, Workload
from labkit.workload.base import Part
from labkit.workload.gpu import GIB

_MAXIMUM_BYTES = 2**20


class Observation(Part):
    """A peak that some run of a workload reached."""

    schema_name: Literal["labkit.profile/1"] = "labkit.profile/1"
    workload: Workload
    peak_allocated_bytes: Annotated[int, Field(gt=0, le=2**62)]
    """The largest over ranks and phases: `torch.cuda.max_memory_allocated`."""
    certainty: Literal["measured", "traced"]
    """measured: on a GPU; traced: by `labkit trace`."""
    source: str = Field(min_length=1, max_length=1000)
    """Who measured it, on what, when."""

    def __str__(self) -> str:
        """Of what it is the peak, in words."""
        workload, peak = self.workload, self.peak_allocated_bytes / GIB
        return (
            f"{workload.model.name}, recompute {workload.recompute.label}, sequence {workload.batch.seq_length}, "
            f"micro-batch {workload.batch.micro_batch_size}: {peak:.3f} GiB {self.certainty}"
        )

    def holds_for(self, workload: Workload) -> bool:
        """Whether `workload`, of the same signature, holds at least as much by its lengths."""
        return self.holds_for_lengths(batch_lengths(workload.batch))

    def holds_for_lengths(self, lengths: tuple[int, ...]) -> bool:
        """The same of a workload with these `batch_lengths`."""
        return all(ours <= theirs for ours, theirs in zip(batch_lengths(self.workload.batch), lengths, strict=True))


def batch_lengths(batch: Batch) -> tuple[int, ...]:
    """What a batch's memory grows with: rows computed and answered for, sequences, the longest of them."""
    lengths = batch.seq_length, batch.micro_batch_size
    if batch.packed is None:
        return lengths
    packed = batch.packed
    counts = packed.rows, packed.logical_rows, len(packed.segments), max(packed.segments)
    return *lengths, *counts, packed.busiest_rank_rows or 0


def signature(workload: Workload) -> str:
    """SHA-256 (hex) of everything that decides a workload's memory but the lengths of its batch.

    The model's name decides nothing. The number of micro-batches counts as far as it changes what is under way at once.
    Defaults are left out, so that a field that a later labkit adds changes no signature; versions never are.
    """
    stated = workload.model_dump(mode="json", exclude_defaults=True)
    del stated["model"]["name"]
    del stated["batch"]
    stated["packed"] = workload.batch.packed is not None
    stated["distinct_microbatches"] = workload.distinct_microbatches
    stated["software"] = workload.training.software.model_dump()
    return _digest(stated)


class RaisedEstimate(Estimate):
    """An estimate with a row that lifts its peak to an observed one."""

    def __init__(self, estimate: Estimate, row: Row, peak_allocated_bytes: int) -> None:
        super().__init__(estimate.workload, estimate.stage)
        self._below, self._row, self._peak = estimate, row, peak_allocated_bytes

    @property
    def own_peak_bytes(self) -> int:
        """Its peak by formula alone."""
        return self._below.peak_allocated_bytes

    def _play(self) -> Written:
        ledger, reserved = self._below.ledger, self._below.peak_reserved_bytes
        return Written(
            Ledger([*ledger.rows, self._row], ledger.moments), None if reserved is None else max(reserved, self._peak)
        )


class Profiles:
    """A folder of observations. `damaged` names the files that the last look at it could not trust."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: tuple[str, ...] = ()

    def learn(self, observation: Observation) -> Path:
        """Keep an observation; returns its file.

        Raises:
            WorkError: the folder cannot be written.
        """
        path = self.directory / _name(observation)
        try:
            write_atomically(path, observation.model_dump_json())
        except OSError as error:
            raise WorkError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from None
        return path

    def floor(self, workload: Workload) -> Observation | None:
        """The largest peak observed that `workload` cannot stay below; None if there is none.

        Raises:
            InputError: there is no such folder.
        """
        found = [each for each in self.observations(workload) if each.holds_for(workload)]
        return max(found, key=lambda each: each.peak_allocated_bytes, default=None)

    def observations(self, workload: Workload) -> list[Observation]:
        """All of the workload's signature.

        Raises:
            InputError: there is no such folder.
        """
        if not self.directory.is_dir():
            raise InputError(f"{self.directory}: no folder of profiles; `labkit profile add` makes one")
        return list(self._read(signature(workload)))

    def raised(self, estimate: Estimate) -> Estimate:
        """The estimate, or one as high as the largest observation that holds for it.

        The missing bytes are a row of their own, alive in the phase of the estimate's peak alone: what is held between
        steps and what forward retains stay as they are.
        """
        observed = self.floor(estimate.workload)
        peak = estimate.ledger.peak()
        missing = 0 if observed is None else observed.peak_allocated_bytes - peak.bytes
        if observed is None or missing <= 0:
            return estimate
        return RaisedEstimate(estimate, _row(observed, missing, estimate), observed.peak_allocated_bytes)

    def _read(self, wanted: str) -> Iterator[Observation]:
        damaged = []
        for path in sorted(self.directory.glob(f"{wanted}.*.json")):
            try:
                yield _observation(path)
            except (OSError, ValueError) as error:
                damaged.append(f"{path}: left out, a damaged profile ({_reason(error)})")
        self.damaged = tuple(damaged)


def _observation(path: Path) -> Observation:
    """The observation in a file whose name and content agree.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what `Profiles.learn` wrote under that name.
    """
    content = read_regular(path, _MAXIMUM_BYTES)
    # Not strict: JSON has lists for tuples.
    observation = Observation.model_validate_json(content, strict=False)
    try:
        observation.workload.checked()
    except InputError as error:
        raise ValueError(str(error)) from None
    if path.name != _name(observation):
        raise ValueError("its content belongs to another name")
    return observation


def _name(observation: Observation) -> str:
    content = observation.model_dump(mode="json", exclude_defaults=True)
    return f"{signature(observation.workload)}.{_digest(content)[:32]}.json"


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
    return str(getattr(error, "strerror", None) or error)


def _row(observed: Observation, nbytes: int, estimate: Estimate) -> Row:
    peak, batch = estimate.ledger.peak(), observed.workload.batch
    certainty: Certainty = observed.certainty
    return Row(
        rank=estimate.rank,
        phase=peak.phase,
        layer=None,
        kind=PROFILE,
        module="",
        tensor=f"{certainty} at sequence {batch.seq_length}, micro-batch {batch.micro_batch_size}: {observed.source}",
        shape=(nbytes,),
        dtype="uint8",
        count=1,
        bytes=nbytes,
        block_bytes=nbytes,
        lifetime="margin",
        certainty=certainty,
        recompute=None,
        born=peak.clock,
        dies=peak.clock + 1,
    )


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
