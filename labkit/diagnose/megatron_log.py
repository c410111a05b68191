"""What Megatron-LM, Megatron Bridge and NeMo print about a run's memory and steps.

Sources: `megatron.training` of Megatron Core 0.19 (`training.training_log`, `utils.report_memory`,
`theoretical_memory_usage.report_theoretical_memory`, `arguments._print_args`), whose "MB" is 2**20 bytes; Megatron
Bridge (`training/utils/train_utils.py`, not installed here), whose "GB" is 10**9 with five digits; NeMo 2
(`MegatronStrategy.training_step`: `peak_memory_usage` is `max_memory_reserved`, in bytes).
"""

import re
from collections.abc import Mapping
from itertools import pairwise

from labkit.diagnose.facts import MOST, Evidence, Facts, Footprint, Iteration, MemoryReport, Printed
from labkit.diagnose.lines import Line

_MB = 2**20
_GB = 10**9
_NUMBER = r"([-+]?\d{1,20}(?:\.\d{1,12})?(?:[eE][-+]?\d{1,3})?)"

_MEMORY = re.compile(
    r"(?:\[Rank (\d{1,7})\] )?(?:\(after (\d{1,12}) iterations?\) )?memory \((MB|GB)\)"
    r"((?: \| [\w -]{1,60}: ?[\d.e+-]{1,30})+)"
)
_FIGURE = re.compile(rf" \| ([\w -]{{1,60}}): ?{_NUMBER}")
_FIGURES = {
    "allocated": "allocated",
    "max allocated": "max_allocated",
    "reserved": "reserved",
    "max reserved": "max_reserved",
    "mem-allocated-gigabytes": "allocated",
    "mem-max-allocated-gigabytes": "max_allocated",
    "mem-reserved-gigabytes": "reserved",
    "mem-max-reserved-gigabytes": "max_reserved",
}
_FOOTPRINT = re.compile(rf"Theoretical memory footprints: weight and optimizer={_NUMBER} MB, activation={_NUMBER} MB")
_ITERATION = re.compile(r"\biteration +(\d{1,12})/ *(\d{1,12}) *\|")
_STEP = {
    "milliseconds": re.compile(rf"elapsed time per iteration \(ms\): {{0,4}}{_NUMBER}"),
    "seconds": re.compile(rf"train_step_timing in s ?[:=] {{0,4}}{_NUMBER}"),
    "tflops": re.compile(rf"throughput per GPU \(TFLOP/s/GPU\): {{0,4}}{_NUMBER}"),
    "loss": re.compile(rf"(?:lm loss|reduced_train_loss)[:=] {{0,4}}{_NUMBER}"),
    "skipped": re.compile(rf"number of skipped iterations: {{0,8}}{_NUMBER}"),
    "nan": re.compile(rf"number of nan iterations: {{0,8}}{_NUMBER}"),
}
_NEMO_MEMORY = {
    "max_reserved": re.compile(rf"\bpeak_memory_usage[:=] {{0,4}}{_NUMBER}"),
    "allocated": re.compile(rf"\bmemory_allocated[:=] {{0,4}}{_NUMBER}"),
}
_PARAMETERS = re.compile(
    r"number of parameters on \([\w, ]{1,80}\) {0,2}model parallel rank \([\d, ]{1,60}\): {0,4}(\d{1,18})"
)
_PADDED = re.compile(r"padded vocab \(size: (\d{1,12})\) with \d{1,12} dummy tokens \(new size: (\d{1,12})\)")

ARGUMENTS = re.compile(r"-{8,64} ?(?:updated )?arguments ?-{8,64}")
_END = re.compile(r"-{8,64} ?end of .{0,40}arguments ?-{8,64}")
_ARGUMENT = re.compile(r" {0,4}([A-Za-z_]\w{0,99}) \.* ?(.*)")
_TELLING = ("recompute_granularity", "recompute_modules")
"""Whose line stands for the block, the last of them."""
LONGEST_ARGUMENTS = 4000
"""Lines of the block; Megatron Core 0.19 has some 700 arguments."""


PROGRESS = (
    "elapsed time per iteration",
    "memory (MB)",
    "memory (GB)",
    "train_step_timing",
    "Theoretical memory",
    "number of parameters on",
)


def is_progress(text: str) -> bool:
    """Whether a line is one of those that a run prints again and again while it goes well."""
    return any(each in text for each in PROGRESS)


def see(line: Line, source: str, facts: Facts) -> int | None:
    """Add what a line says; returns the iteration it ends, if it does."""
    if "memory (" in line.text:
        for found in _MEMORY.finditer(line.text):
            _memory(found, line, source, facts)
    for found in _FOOTPRINT.finditer(line.text) if "Theoretical" in line.text else ():
        weights, activations = (bytes_of(each, _MB) for each in found.groups())
        quoted = Evidence.quote(source, line.number, line.text, found.start())
        facts.footprints[:] = [Footprint(evidence=quoted, weights=weights, activations=activations)]
    if "parameters on" in line.text and len(facts.parameters) < MOST:
        facts.parameters += [int(found[1]) for found in _PARAMETERS.finditer(line.text)]
    return _iteration(line, source, facts)


def _memory(found: re.Match[str], line: Line, source: str, facts: Facts) -> None:
    rank, iteration, unit, figures = found.groups()
    scale = _MB if unit == "MB" else _GB
    values = {_FIGURES[name]: bytes_of(number, scale) for name, number in _FIGURE.findall(figures) if name in _FIGURES}
    if values:
        facts.memory.append(
            MemoryReport(
                evidence=Evidence.quote(source, line.number, line.text, found.start()),
                rank=line.rank if rank is None else int(rank),
                iteration=None if iteration is None else int(iteration),
                **values,
            )
        )


def _iteration(line: Line, source: str, facts: Facts) -> int | None:
    last = None
    cuts = [found.start() for found in _ITERATION.finditer(line.text)]
    for start, end in pairwise([*cuts, len(line.text)]):
        text = line.text[start:end]
        found = _ITERATION.match(text)
        assert found is not None
        said = {name: _figure(pattern, text) for name, pattern in _STEP.items()}
        if said["milliseconds"] is None and said["seconds"] is None:
            continue
        nemo = said["milliseconds"] is None  # which counts from 0
        last = int(found[1]) + nemo
        facts.iterations.append(
            Iteration(
                number=last,
                of=int(found[2]) + nemo,
                milliseconds=said["milliseconds"] or 1000 * (said["seconds"] or 0.0),
                tflops=said["tflops"],
                loss=said["loss"],
                skipped=int(said["skipped"] or 0),
                nan=int(said["nan"] or 0),
            )
        )
        memory = {name: _figure(pattern, text) for name, pattern in _NEMO_MEMORY.items()}
        if any(value is not None for value in memory.values()):
            known = {
                name: min(round(value), 2**63 - 1) for name, value in memory.items() if value is not None and value >= 0
            }
            quoted = Evidence.quote(source, line.number, line.text, start)
            facts.memory.append(MemoryReport(evidence=quoted, rank=line.rank, iteration=last, **known))
    return last


def _figure(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    value = float(found[1]) if found else 0.0
    return value if found and abs(value) < 2**63 else None


def bytes_of(number: str, scale: int) -> int:
    """Bytes of a printed number."""
    return max(0, min(round(min(float(number), 1e18) * scale), 2**63 - 1))


class ArgumentsBlock:
    """The block of arguments, as it is read."""

    def __init__(self, line: Line, source: str) -> None:
        self._source = source
        self._evidence = Evidence.quote(source, line.number, line.text)
        self._values: dict[str, str] = {}
        self.left = LONGEST_ARGUMENTS
        """Lines that may still belong to it."""

    def see(self, line: Line) -> bool:
        """Take a line in; whether it is of the block."""
        self.left -= 1
        if _END.search(line.text):
            self.left = 0
            return True
        found = _ARGUMENT.fullmatch(line.text)
        if found is not None:
            self._values[found[1]] = found[2].strip()
            if found[1] in _TELLING and found[2].strip() != "None":
                self._evidence = Evidence.quote(self._source, line.number, line.text)
        return found is not None

    def finished(self) -> Printed | None:
        """What it said; None if it has no argument that a model needs."""
        return Printed(self._evidence, self._values) if "num_layers" in self._values else None


def padded_vocabulary(line: Line) -> Mapping[str, str]:
    """The vocabulary that a tokenizer brought, where a line says it."""
    found = _PADDED.search(line.text)
    return {"vocab_size": found[1], "padded_vocab_size": found[2]} if found else {}
