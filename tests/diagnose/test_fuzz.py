"""Whatever a file holds: a diagnosis or one sentence, soon, with nothing executed."""

import io
import json
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.diagnose import logs, oom
from labkit.diagnose.case import Case
from labkit.diagnose.causes import findings
from labkit.diagnose.facts import Evidence
from labkit.diagnose.reading import HEAD, Source
from labkit.errors import InputError
from tests.diagnose.test_causes import CASES
from tests.diagnose.test_logs import FAILURES
from tests.diagnose.test_oom import MESSAGES

EXAMPLES = Path(__file__).with_name("examples")
BITS = [
    *(text for text, _ in CASES.values()),
    *FAILURES,
    *(text for text, _ in MESSAGES.values()),
    (EXAMPLES / "summary.txt").read_text(encoding="utf-8"),
    "\n".join((EXAMPLES / "moonlight.log").read_text(encoding="utf-8").splitlines()[:60]),
    "\n".join((EXAMPLES / "moonlight.log").read_text(encoding="utf-8").splitlines()[-20:]),
]
JUNK = [
    "\0",
    "\r",
    "\x1b[31m",
    "\\n",
    "[rank7]: ",
    "9" * 400,
    "1e999",
    "-1",
    "nan",
    "\u0663",
    " GiB",
    "{",
    "|",
    "\udcff",
]


def read(raw: bytes) -> None:
    """A file, as far as a diagnosis without its workload; its JSON is text."""
    try:
        facts = logs.read(Source("x", raw[:HEAD], io.BytesIO(raw), None)).facts
    except InputError:
        return
    for finding in findings(Case(facts)):
        json.loads(finding.model_dump_json())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Pieces of real files, cut and put together, with junk in between."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(BITS))
        start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        whole = draw(st.booleans())
        parts += [text if whole else text[start:end], draw(st.sampled_from(["", "\n", *JUNK]))]
    raw = bytearray("".join(parts).encode("utf-8", errors="surrogatepass"))
    for _ in range(draw(st.integers(0, 6))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@settings(max_examples=80, deadline=None, database=None)
@given(mutated())
def test_no_damage_crashes_a_reading(raw: bytes) -> None:
    read(raw)


@settings(max_examples=60, deadline=None, database=None)
@given(st.one_of(st.text(max_size=400).map(str.encode), st.binary(max_size=400)))
def test_no_text_crashes_a_reading(raw: bytes) -> None:
    read(raw)


def test_amounts_of_any_length_are_numbers_that_fit() -> None:
    text = f"CUDA out of memory. Tried to allocate {'9' * 20}.99 GiB. GPU 0 has a total capacity of {'9' * 500} GiB of"
    assert oom.parse(text, Evidence(source="x", text="")).requested == 2**63 - 1


def test_repeated_beginnings_take_time_in_proportion() -> None:
    began = time.process_time()
    for bit in (
        "iteration ", "memory (MB) | a", "| Allocated memory ", 'File "', "Process 1 has ", "  exitcode  : ",
        "DataLoader worker (pid ", "\x1b[", "[rank1]: ", "Error", "Theoretical memory footprints: w", "1 allowed; ",
    ):  # fmt: skip
        read((bit * (50_000 // len(bit)) + "\n" + "Error\n").encode())
    assert time.process_time() - began < 10  # seconds; one that goes back over itself takes hours
