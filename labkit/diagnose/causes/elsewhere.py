"""Runs that ended otherwise than for want of GPU memory, and runs that did not end."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, size
from labkit.diagnose.causes.common import SHOWN
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Evidence, Facts, MemoryReport, MemorySummary
from labkit.workload.gpu import GPUS


def host(case: Case) -> Iterator[Finding]:
    """The machine's own memory, or a process that something ended."""
    failures = case.facts.failures
    evidence = [each.evidence for each in failures if each.kind == "host memory"]
    if evidence:
        yield Finding(
            cause="host memory",
            weight="cause" if case.first is None else "note",
            happened="The host's memory ran out (the kernel's or the container's OOM killer, or an allocation on the "
            "CPU): "
            "this is not the GPU's memory, and no recompute choice changes it.",
            evidence=tuple(evidence[:SHOWN]),
            confirm=("dmesg -T | grep -i oom on that node; sacct --format=MaxRSS,State; memory.max of the container.",),
            remedies=(
                "Ask for more host memory (--mem, the container's limit), or a larger /dev/shm for data loaders.",
                "Fewer --num-workers, no whole copies of a checkpoint on every rank, no asynchronous save on small "
                "hosts; "
                "with --optimizer-cpu-offload the optimizer's state is there.",
            ),
        )
        return
    killed = [each.evidence for each in failures if each.kind == "killed"]
    if killed and case.first is None and not any(each.kind == "device memory" for each in failures):
        yield Finding(
            cause="host memory",
            weight="cause",
            happened="A process was ended by SIGKILL, and the log does not say by whom: most often the host's memory "
            "ran out, "
            "else a scheduler or a person ended it. PyTorch raises an error when a GPU's memory runs out; it is not "
            "killed.",
            evidence=tuple(killed[:SHOWN]),
            confirm=("dmesg -T | grep -i -E 'oom|killed process' on that node; sacct --format=MaxRSS,State,ExitCode.",),
            remedies=("If it was memory: more host memory, fewer --num-workers; else look at who ended the job.",),
        )


_ELSE = {
    "collective timeout": (
        "Ranks waited for each other longer than they may: one was slower, stuck, or had died.",
        "The rank that did not reach the collective: NCCL flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE), py-spy on "
        "the "
        "ranks that hang; a rank that died first has its own error further up or in its own log.",
        "Find the first rank that failed; a longer --distributed-timeout-minutes only where it was merely slow.",
    ),
    "device error": (
        "The GPU or a kernel failed: not for want of memory.",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; dmesg and nvidia-smi -q name Xid and ECC errors.",
        "Illegal accesses and assertions are bugs or bad indices (a vocabulary smaller than the tokens); ECC errors "
        "are "
        "hardware: drain the node.",
    ),
    "not finite": (
        "The loss or a gradient was not finite.",
        "The iteration and rank that the line names; --check-for-nan-in-loss-and-grad.",
        "Learning rate, data and precision; recompute choices do not change values.",
    ),
    "time limit": (
        "The scheduler ended the job: its time was up, or it was preempted or cancelled.",
        "sacct -j JOB --format=State,Elapsed,Timelimit.",
        "More time, or checkpoints often enough.",
    ),
    "disk": (
        "A disk was full.",
        "df -h and the quota of the path that the error names.",
        "Make room, or save elsewhere.",
    ),
    "crash": (
        "A process crashed.",
        "The first rank whose log ends; a core file or faulthandler's traceback.",
        "Versions of driver, CUDA and extensions that do not fit together are the usual reason.",
    ),
    "collective error": (
        "Communication between ranks failed.",
        "NCCL_DEBUG=INFO, and the first rank whose log ends; the others only lost it.",
        "Check the network and the rank that went first.",
    ),
    "error": (
        "The program raised an error that has nothing to do with memory.",
        "Its traceback, above.",
        "Mend what it says.",
    ),
    "rank lost": (
        "A launcher says that a rank failed; what failed is in that rank's own output, which is not here.",
        "The logs of the ranks (torchrun --log-dir DIR --redirects 3, srun --label), the root cause's first.",
        "Give that rank's log.",
    ),
}
"""The kind that says most first: what happened, how to confirm it, what to do."""


def not_memory(case: Case) -> Iterator[Finding]:
    """A run that ended otherwise, which people feed to this all the same."""
    failures = [each for each in case.facts.failures if each.kind in _ELSE]
    memory = case.first is not None or any(
        each.kind in ("device memory", "host memory", "killed") for each in case.facts.failures
    )
    kinds = sorted({each.kind for each in failures}, key=list(_ELSE).index)
    if not failures:
        return
    if memory:
        count = len(failures)
        lines = "1 other line says" if count == 1 else f"{count} other lines say"
        yield Finding(
            cause="not memory",
            weight="note",
            happened=f"{lines} that something failed ({', '.join(kinds)}): most often what a rank out of memory does "
            "to the "
            "others.",
            evidence=tuple(each.evidence for each in failures[:SHOWN]),
        )
        return
    kind = kinds[0]
    happened, confirm, remedy = _ELSE[kind]
    lines_of = [each.evidence for each in failures if each.kind == kind]
    yield Finding(
        cause="not memory",
        weight="cause",
        happened=f"{happened} Nothing in it says that memory ran out.",
        evidence=tuple(lines_of[:SHOWN]),
        confirm=(confirm,),
        remedies=(remedy,),
    )


def no_failure(case: Case) -> Iterator[Finding]:
    """What a log without any failure says of memory."""
    facts = case.facts
    failed = any(isinstance(each, MemorySummary) and each.failures for each in facts.memory)
    if case.first is not None or facts.failures or failed:
        return
    skipped = sum(each.skipped for each in facts.iterations)
    odd = sum(each.nan for each in facts.iterations)
    if facts.iterations:
        last = facts.iterations[-1]
        said = f"Nothing failed as far as it goes, which is iteration {last.number} of {last.of}."
        if skipped or odd:
            said += f" {skipped} iterations were skipped, {odd} were not finite."
    elif facts.memory or facts.footprints:
        said = "Nothing in it says that anything failed."
    elif case.estimate is not None:
        summary = case.estimate.summary
        said = (
            f"There is no log. By estimate the workload peaks at {size(summary.peak_allocated_bytes)} in "
            f"{summary.peak_phase} of iteration {summary.peak_iteration}, {size(summary.margin_bytes)} of margin."
        )
    else:
        return
    fullest = list(_fullest(facts))
    said += "".join(f" {sentence}" for sentence, _ in fullest)
    evidence = tuple(dict.fromkeys(each for _, each in fullest))
    if case.stated is not None and not evidence:
        evidence = (case.stated.evidence,)
    if case.stated is not None:
        gpu = GPUS[case.stated.workload.training.gpu]
        said += f" The workload's GPU has {size(gpu.total_memory_bytes)}."
    confirm = (
        ()
        if facts.out_of_memory
        else ("If it died all the same, give the logs of the other ranks, and the scheduler's.",)
    )
    yield Finding(cause="no failure", weight="note", happened=said, evidence=evidence, confirm=confirm)


_MOSTS = {"max_allocated": "The most that was allocated is", "max_reserved": "The most that was reserved is"}


def _fullest(facts: Facts) -> Iterator[tuple[str, Evidence]]:
    """The largest figures that reports have, each from where it is largest."""
    reports = list(facts.memory)
    known = {name: max(reports, key=lambda each: getattr(each, name) or 0) for name in _MOSTS} if reports else {}
    for name, report in known.items():
        nbytes = getattr(report, name)
        if nbytes:
            yield f"{_MOSTS[name]} {size(nbytes)}{_whose(report)}.", report.evidence
        elif name == "max_allocated" and report.peak:
            last = max(reports, key=lambda each: each.peak)
            yield f"Between steps {size(last.peak)} was allocated{_whose(last)}; no peak is said.", last.evidence


def _whose(report: MemoryReport) -> str:
    return "" if report.rank is None else f" (rank {report.rank})"
