"""More than the GPU has, by phase."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, size
from labkit.diagnose.causes.common import PLAN, messages
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import MemorySummary, OutOfMemory

_HOLDS = {
    "setup": "parameters, gradient buffers and optimizer state do not fit, with no activation yet",
    "forward": "activations are kept for backward, most of them near its end",
    "backward": "activations that are not yet freed lie beside gradients and what backward needs for a moment",
    "grad_sync": "gradients are reduced, some of them in copies",
    "optimizer": "parameters, gradients and the optimizer's state leave no room for what its step needs",
    "evaluation": "it runs without gradients, nothing is kept for backward: what a layer or the loss needs does not "
    "fit beside the state",
    "saving": "a checkpoint was being saved, whose gathered or copied state does not fit beside what training holds",
    "": "neither the message nor a traceback says in which phase",
}
_MOST_ADVICE = 4
_NAMES = {
    "setup": "before the first step",
    "grad_sync": "while gradients are reduced",
    "optimizer": "in the optimizer",
    "saving": "while a checkpoint was saved",
}
_BESIDE_STEPS: dict[str, tuple[str, ...]] = {
    "evaluation": (
        "No recompute label helps: without gradients nothing is kept for backward.",
        "A smaller micro-batch of evaluation (--eval-micro-batch-size), or shorter rows there.",
        "--empty-unused-memory-level 1 before it, where what training's shapes left is in pieces.",
        "Logits and loss are the largest of it: a fused cross entropy (--cross-entropy-loss-fusion).",
    ),
    "saving": (
        "No recompute label helps: no activation is alive then.",
        "Save what each rank holds instead of gathering it: --ckpt-format torch_dist without "
        "--dist-ckpt-optim-fully-reshardable, or with --distrib-optim-fully-reshardable-mem-efficient, which gathers "
        "on the host.",
        "torch.cuda.empty_cache() before save_checkpoint, so that the step's cached blocks can serve it.",
        "--no-save-optim shows whether it is the optimizer's state.",
    ),
}
"""Remedies of what is no part of a training step."""


def capacity(case: Case) -> Iterator[Finding]:
    """More than the GPU has: nothing else would have left room."""
    first = case.first
    if first is None:
        yield from _failed_summary(case)
        return
    state = first.phase in ("optimizer", "setup")
    who = "It" if first.rank is None else f"Rank {first.rank}"
    asked = "memory" if first.requested is None else size(first.requested)
    phase = _NAMES.get(first.phase, f"in {first.phase}") if first.phase else ""
    replaying = ", running a forward again" if first.replays else ""
    when = f"of iteration {first.iteration}" if first.iteration and phase else ""
    if first.phase in _BESIDE_STEPS:
        when = f"after iteration {first.iteration - 1}" if first.iteration else ""
    place = f", at {first.place}" if first.place else ""
    words = " ".join(word for word in (who, "asked for", asked, phase, when) if word)
    held = "" if first.allocated is None else f" {size(first.allocated)} was allocated"
    of = f" of the GPU's {size(first.capacity)}" if held and first.capacity is not None else ""
    held = f"{held}{of}." if held else ""
    happened = f"{words}{replaying}{place}: {_HOLDS[first.phase]}.{held}{_more(first)}{_others(case, first)}"
    yield Finding(
        cause="optimizer capacity" if state else "capacity",
        weight="cause",
        happened=happened,
        evidence=messages(case),
        confirm=tuple(_confirm_capacity(case, first)),
        remedies=_BESIDE_STEPS.get(first.phase) or tuple(_advised(case)) or tuple(_remedies(first)),
    )


def _more(first: OutOfMemory) -> str:
    """What the iteration and the amount say."""
    said = ""
    if first.iteration == 2 and first.phase not in ("optimizer", "setup", *_BESIDE_STEPS):
        said += " The first step had room: the optimizer's moments are made at its end."
    if first.requested and first.capacity and first.requested > first.capacity:
        said += " That is more than the whole GPU has: look at the shape of what is made there."
    return said


def _others(case: Case, first: OutOfMemory) -> str:
    """How many other ranks ran out too."""
    ranks = {each.rank for each in case.facts.out_of_memory if each.rank is not None} - {first.rank}
    return f" {len(ranks)} other {'rank' if len(ranks) == 1 else 'ranks'} ran out as well." if ranks else ""


def _failed_summary(case: Case) -> Iterator[Finding]:
    for report in case.facts.memory:
        if isinstance(report, MemorySummary) and report.failures and report.allocated is not None:
            yield Finding(
                cause="capacity",
                weight="cause",
                happened=f"The allocator ran out of memory ({report.failures} times); {size(report.peak)} was the most "
                "that was "
                f"allocated, {size(report.max_reserved or 0)} reserved.",
                evidence=(report.evidence,),
                confirm=("The message of the failure says what was asked for, and its traceback in which phase.",),
                remedies=(f"{PLAN}.",),
            )
            return


def _confirm_capacity(case: Case, first: OutOfMemory) -> Iterator[str]:
    if not first.phase and not first.recorded:
        yield "The traceback above the message says in which phase and layer: give the whole log of that rank."
    if case.stated is None:
        yield (
            "Give the launch script or arguments as a further file: the estimate then stands beside the log's figures."
        )
    elif case.estimate is not None:
        summary = case.estimate.summary
        yield (
            f"labkit's estimate of this workload peaks at {size(summary.peak_allocated_bytes)} in {summary.peak_phase} "
            f"of iteration {summary.peak_iteration}, {size(summary.margin_bytes)} of margin on top."
        )
        yield from _beside_estimate(case, first)
    if not first.recorded:
        yield (
            "A memory snapshot at the failure (torch.cuda.memory._record_memory_history) shows what was live, by "
            "source line."
        )


def _beside_estimate(case: Case, first: OutOfMemory) -> Iterator[str]:
    """What the failure says of the estimate, and the estimate of the workload as it is."""
    if case.too_low:
        yield (
            f"The failure needed {size(case.needed or 0)}, so that the estimate is too low by {size(case.too_low)} at "
            "least: what is proposed takes so much off the memory there is, and may still not be enough. Look whether "
            "the workload is what was run."
        )
    if case.advice is not None and first.phase not in _BESIDE_STEPS:
        yield from (each for each in case.advice.sentences[:1] if each not in case.advice.remedies)


def _advised(case: Case) -> Iterator[str]:
    """What `labkit plan` proposes; to leave all as it is, which died, is no proposal."""
    advice = case.advice
    if advice is not None and (advice.first is None or advice.first.label != advice.control.label):
        yield from advice.remedies[:_MOST_ADVICE]


def _remedies(first: OutOfMemory) -> Iterator[str]:
    if first.phase in ("optimizer", "setup"):
        yield "No recompute label helps: no activation is alive then."
        yield (
            "--use-distributed-optimizer (needs data parallelism), --use-precision-aware-optimizer with smaller dtypes."
        )
        yield (
            "More tensor, pipeline or expert parallelism: fewer parameters a rank; --optimizer-cpu-offload as a last "
            "resort."
        )
        return
    if first.phase == "grad_sync":
        yield "Smaller buckets (--ddp-bucket-size), --grad-reduce-in-bf16."
    yield f"Recompute more, the cheapest first: {PLAN}."
    yield "Where nothing fits: a smaller micro-batch, shorter rows, more tensor or context parallelism."


def footprints(case: Case) -> Iterator[Finding]:
    """Megatron's own theoretical figure, which is neither a peak nor an upper bound."""
    if not case.facts.footprints or case.first is None:
        return
    last = case.facts.footprints[-1]
    yield Finding(
        cause="capacity",
        weight="note",
        happened=f"Megatron's theoretical footprint was {size(last.weights)} of weights and optimizer state and "
        f"{size(last.activations)} of activations: a formula that knows neither the recompute labels nor the moment "
        "of the "
        "peak.",
        evidence=(last.evidence,),
    )
