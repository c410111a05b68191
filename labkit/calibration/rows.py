"""Rows of an H200 file (`data/published/README.md`), checked: whatever a row says wrongly is one sentence."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.errors import InputError
from labkit.files import read_regular
from labkit.workload.files import text_of
from labkit.workload.lora_rules import MOST_SEQUENCES

COLUMNS = (
    "case model layers tp cp ep etp sequence_parallel compiled concentrated_routing recompute recompute_modules "
    "lengths shared_prefix packed_tokens retained_tokens forward_peak_bytes repeat_forward_peak_bytes "
    "retained_bytes forward_backward_peak_bytes "
    "baseline_min_bytes baseline_max_bytes reference_estimate_bytes"
).split()
OPTIONAL = frozenset(
    "retained_bytes repeat_forward_peak_bytes forward_backward_peak_bytes baseline_min_bytes baseline_max_bytes "
    "reference_estimate_bytes".split()
)
"""Columns that may be empty: not measured."""
AT_LEAST_ONE = (
    "layers tp cp ep etp packed_tokens retained_tokens forward_peak_bytes repeat_forward_peak_bytes retained_bytes "
    "forward_backward_peak_bytes".split()
)
"""Numbers of a measured cell that cannot be zero."""
NUMBERS = [*AT_LEAST_ONE, "shared_prefix", "baseline_min_bytes", "baseline_max_bytes", "reference_estimate_bytes"]
FLAGS = ("sequence_parallel", "compiled", "concentrated_routing")
STATUSES = ("measured", "refused")
RECOMPUTE = ("none", "selective", "full")

_MAXIMUM_BYTES = 16 * 2**20
_NUMBER = re.compile(r"[0-9]{1,18}")
_SEQUENCES = re.compile(r"([0-9]{1,18})(?:x([0-9]{1,6}))?")
_WIDEST_PADDING = 128
"""Rows that each rank's share may be padded by: the largest tile of a kernel (FlexAttention's blocks)."""

type TextRow = dict[str, str]


def measured_rows(path: Path) -> list[TextRow]:
    """The rows of a file that were measured, by column; runs that were refused have no figures and are left out.

    Args:
        path: CSV in UTF-8 with `COLUMNS` in any order, and perhaps others; blanks around values mean nothing.

    Raises:
        InputError: it cannot be read, a column is missing or there twice, a row is wrong, or nothing was measured.
    """
    rows = _rows(path)
    for row in rows:
        problem = _problem(row)
        if problem is not None:
            raise InputError(f"{path}, case {row['case'][:80]}: {problem}")
    case, times = Counter(row["case"] for row in rows).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path}, case {case[:80]}: it is there {times} times; keep one row of it")
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        raise InputError(f"{path}: no row has the status measured; there is nothing to compare")
    return measured


def _rows(path: Path) -> list[TextRow]:
    # With or without the mark that spreadsheets begin a file with.
    text = text_of(lambda: read_regular(path, _MAXIMUM_BYTES), str(path), encoding="utf-8-sig")
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = [(reader.line_num, fields) for fields in reader if any(field.strip() for field in fields)]
    except csv.Error as error:
        raise InputError(f"{path}: not CSV (line {reader.line_num}: {error})") from None
    if not lines:
        raise InputError(f"{path}: empty; expected a line of column names, then a row for each cell")
    header = [name.strip() for name in lines[0][1]]
    _check_header(path, header)
    if len(lines) == 1:
        raise InputError(f"{path}: no rows below the column names")
    rows = []
    for number, fields in lines[1:]:
        if len(fields) != len(header):
            raise InputError(f"{path}, line {number}: {len(fields)} values for {len(header)} columns")
        row = {"status": "measured"} | dict(zip(header, (field.strip() for field in fields), strict=True))
        if not row["case"]:
            raise InputError(f"{path}, line {number}: case is empty; give the cell a name")
        rows.append(row | {name: row[name].capitalize() for name in FLAGS})
    return rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        other = next((name for sign, name in ((";", "semicolons"), ("\t", "tabs")) if sign in header[0]), None)
        separated = f"; its values are separated by {other}, and should be by commas" if other else ""
        raise InputError(f"{path}: no column {missing[0]!r}{separated}")
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path}: column {name[:80]!r} is there {times} times; keep one")


def _problem(row: Mapping[str, str]) -> str | None:
    """What is wrong with a row; only a measured one needs its figures."""
    if row["status"] not in STATUSES:
        return _not_one_of("status", row, STATUSES)
    if row["status"] != "measured":
        return None
    return _wrong_value(row) or _wrong_lengths(row["lengths"]) or _contradiction(row)


def _wrong_value(row: Mapping[str, str]) -> str | None:
    for name in NUMBERS:
        if not row[name] and name in OPTIONAL:
            continue
        if not _NUMBER.fullmatch(row[name]):
            return f"{name} should be a whole number, not {row[name][:80]!r}"
        if name in AT_LEAST_ONE and not int(row[name]):
            return f"{name} should be at least 1"
    for name in FLAGS:
        if row[name] not in ("True", "False"):
            return _not_one_of(name, row, ("True", "False"))
    if row["recompute"] not in RECOMPUTE:
        return _not_one_of("recompute", row, RECOMPUTE)
    if row["model"].endswith((".yaml", ".yml")):
        return f"model should be the name of a model, not a file ({row['model'][:80]!r})"
    return None


def _not_one_of(name: str, row: Mapping[str, str], valid: Sequence[str]) -> str:
    return f"{name} should be {', '.join(valid[:-1])} or {valid[-1]}, not {row[name][:80]!r}"


def _wrong_lengths(text: str) -> str | None:
    found = [_SEQUENCES.fullmatch(part.strip()) for part in text.split("+")]
    stated = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(stated) < len(found) or any(not length or not times for length, times in stated):
        return f"lengths should be like 4096+2048 or 256x8, not {text[:80]!r}"
    if sum(times for _, times in stated) > MOST_SEQUENCES:
        return f"lengths names more than {MOST_SEQUENCES} sequences"
    return None


def sequence_lengths(text: str) -> list[int]:
    """`4096+4096` or `256x8`, of a checked row."""
    found: list[int] = []
    for part in text.split("+"):
        length, _, times = part.strip().partition("x")
        found += [int(length)] * int(times or 1)
    return found


def _contradiction(row: Mapping[str, str]) -> str | None:
    """Values that cannot be true together."""
    lengths, prefix, packed = sequence_lengths(row["lengths"]), int(row["shared_prefix"]), int(row["packed_tokens"])
    if prefix > min(lengths):
        return f"shared_prefix ({prefix}) is longer than the shortest of lengths ({min(lengths)})"
    logical = sum(lengths)
    stored = logical - (len(lengths) - 1) * prefix
    if packed < stored:
        return f"packed_tokens ({packed}) is less than lengths and shared_prefix make: {stored}"
    rows = stored if packed < logical else logical
    if packed - rows > _WIDEST_PADDING * int(row["tp"]) * int(row["cp"]):
        return f"packed_tokens ({packed}) is more than lengths and shared_prefix make ({rows}), padded to the ranks"
    if bool(row["baseline_min_bytes"]) != bool(row["baseline_max_bytes"]):
        return "baseline_min_bytes and baseline_max_bytes go together: give both or neither"
    if row["baseline_min_bytes"] and int(row["baseline_max_bytes"]) < int(row["baseline_min_bytes"]):
        return "baseline_max_bytes is less than baseline_min_bytes"
    if row["recompute"] == "none" and row["recompute_modules"]:
        return "recompute_modules needs recompute: selective"
    return None
