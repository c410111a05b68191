"""What a later out-of-memory error means, by the figures of the decision that let it run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from labkit.admission.decision import Figures, held
from labkit.diagnose.facts import LONGEST_QUOTE, Evidence
from labkit.diagnose.oom import parse
from labkit.errors import InputError
from labkit.workload.base import Many, Part
from labkit.workload.gpu import gib

if TYPE_CHECKING:
    from labkit.admission.decision import Decision


class Numbers(Part):
    """What an error says; None where it does not."""

    requested_bytes: int | None = None
    total_bytes: int | None = None
    """Of the device."""
    free_bytes: int | None = None
    """Of the device."""
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    """Reserved and not handed out."""

    @classmethod
    def read(cls, error: Any) -> "Numbers":
        """Of an error's text, an exception with such a text, or a mapping of these fields.

        Raises:
            InputError: it is no out-of-memory error of PyTorch's allocator.
        """
        if isinstance(error, Numbers):
            return error
        if isinstance(error, Mapping):
            wrong = [str(name)[:80] for name in error if name not in cls.model_fields]
            if wrong or not all(
                isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in error.values()
            ):
                raise InputError(f"the error: give whole bytes of {', '.join(cls.model_fields)}")
            return cls(**dict(error))
        text = str(error)
        found = parse(text, Evidence.quote("error", None, text[:LONGEST_QUOTE]))
        if found.requested is None:
            raise InputError("the error: it does not say what was asked for; give the text of a torch.OutOfMemoryError")
        return cls(
            requested_bytes=found.requested,
            total_bytes=found.capacity,
            free_bytes=found.free,
            allocated_bytes=found.allocated,
            unallocated_bytes=found.unallocated,
        )


class Explanation(Part):
    """Why it ran out, and what would work."""

    schema_name: Literal["labkit.admission-oom/1"] = "labkit.admission-oom/1"
    cause: Literal["refused", "fragmentation", "above the price", "device smaller than the budget", "unknown"]
    numbers: Numbers
    figures: Figures
    sentences: Many[str]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def explain(error: Any, decision: "Decision", micro_batch: int | None = None) -> Explanation:
    """What an out-of-memory error means for what was decided.

    >>> from labkit import Workload
    >>> from labkit.admission import Admission
    >>> decision = Admission(Workload.load("data/workloads/qwen3.8-27b-lora.yaml"), "80GB").decide([2048, 4096])
    >>> numbers = {"requested_bytes": 2 * 2**30, "allocated_bytes": 30 * 2**30, "unallocated_bytes": 9 * 2**30}
    >>> decision.explain(numbers).cause
    'fragmentation'

    Args:
        error: The `torch.OutOfMemoryError`, its text, or a mapping of the fields of `Numbers`.
        decision: What was decided.
        micro_batch: Which of its micro-batches ran out; the fullest by default.

    Raises:
        InputError: it is no such error, or there is no such micro-batch.
    """
    numbers = Numbers.read(error)
    batches = decision.micro_batches or decision.refused
    if micro_batch is None:
        chosen = max(batches, key=lambda each: each.needed_bytes or 2**62)
    elif 0 <= micro_batch < len(batches):
        chosen = batches[micro_batch]
    else:
        raise InputError(f"micro-batch {micro_batch}: there is none; use 0 to {len(batches) - 1}")
    figures = chosen.figures
    cause, why = _cause(numbers, figures, decision)
    said = [f"Out of memory{_of(numbers)}. It was priced at: {held(figures, decision.budget)}.", *why]
    return Explanation(cause=cause, numbers=numbers, figures=figures, sentences=tuple(said))


def _of(numbers: Numbers) -> str:
    parts = {
        "asking for": numbers.requested_bytes,
        "with allocated": numbers.allocated_bytes,
        "reserved and not handed out": numbers.unallocated_bytes,
        "free on the device": numbers.free_bytes,
    }
    said = [f"{what} {gib(nbytes)}" for what, nbytes in parts.items() if nbytes is not None]
    return f", {', '.join(said)}" if said else ""


def _cause(numbers: Numbers, figures: Figures, decision: "Decision") -> tuple[Any, list[str]]:
    if decision.outcome == "refuse":
        return "refused", [f"It had been refused. {decision.record.sentences[-1]}"]
    requested, allocated = numbers.requested_bytes or 0, numbers.allocated_bytes
    unallocated = numbers.unallocated_bytes or 0
    if allocated is not None and allocated + requested > figures.covered_bytes:
        over = allocated + requested - figures.covered_bytes
        beside = "something beside this micro-batch is on the device, or the price is too low"
        return "above the price", [
            f"With the request {gib(allocated + requested)} would be allocated, {gib(over)} above the price with its "
            f"margin: {beside}. Lower the budget by what else the process keeps; if it keeps nothing else, keep the "
            "peak as a profile (labkit profile add), which raises the price of all that is as large.",
            *([_fragmented(unallocated)] if unallocated >= requested > 0 else []),
        ]
    if unallocated >= requested > 0:
        return "fragmentation", [_fragmented(unallocated)]
    if numbers.total_bytes is not None and allocated is not None:
        had = allocated + unallocated + (numbers.free_bytes or 0)
        if had < decision.budget.bytes:
            return "device smaller than the budget", [
                f"The process could have {gib(had)} in all, {gib(decision.budget.bytes - had)} less than the budget: "
                "others (CUDA's context, NCCL, other processes) have the rest. Lower the budget to it and decide again."
            ]
    return "unknown", [
        "By these figures it should have fitted; a memory snapshot shows what else was alive (labkit diagnose)."
    ]


def _fragmented(unallocated: int) -> str:
    return (
        f"Fragmentation: {gib(unallocated)} are reserved and not handed out, more than was asked for, in pieces that "
        "are too small. PYTORCH_ALLOC_CONF=expandable_segments:True joins them; with "
        "training.allocator.expandable_segments: true in the template the decision counts on it."
    )
