"""Frames made fit for a chart: only the columns it shows, only values that JSON and CSV can carry."""

from collections.abc import Iterable, Mapping
from typing import Final

import polars as pl

LONGEST_LABEL: Final = 78
"""Three lines beside a chart."""

OUTCOMES = {
    "ok": "ok",
    "oom": "out of memory",
    "cuda_error": "CUDA error",
    "collective_timeout": "ranks waited too long",
    "rank_died": "a rank died",
    "non_finite": "not finite",
    "wrong_world_size": "wrong number of ranks",
    "failed": "failed",
    "killed": "killed",
    "timed_out": "took too long",
    "out_of_host_memory": "needs more host memory",
    "unsupported": "not supported",
    "refused": "refused by a rule",
    "missing": "not run yet",
}
"""How a cell ended (`labkit.drivers.contract.Outcome`), for people."""


def display_labels(candidates: Iterable[str]) -> dict[str, str]:
    """A short, distinct, one-line name for each candidate, in the order given.

    >>> len(display_labels(["[moe_act]", "x" * 100])["x" * 100])
    78
    """
    labels: dict[str, str] = {}
    for candidate in candidates:
        if candidate in labels:
            continue
        line = " ".join(candidate.split())
        label = line if len(line) <= LONGEST_LABEL else line[: LONGEST_LABEL - 1] + "…"
        taken, number, base = set(labels.values()), 2, label
        while label in taken:
            label, number = f"{base} ({number})", number + 1
        labels[candidate] = label
    return labels


def relabelled(frame: pl.DataFrame, labels: Mapping[str, str]) -> pl.DataFrame:
    """The frame with its `candidate` column shown by `labels`."""
    return frame.with_columns(pl.col("candidate").replace_strict(labels, return_dtype=pl.String))


def clean(frame: pl.DataFrame, columns: Iterable[str]) -> pl.DataFrame:
    """Only `columns`, with every number finite: NaN and infinities become null, as does nothing else.

    Raises:
        ValueError: a column is neither text, number nor boolean (a chart cannot say what it means).
    """
    chosen = frame.select(columns)
    for name, kind in chosen.schema.items():
        if not (kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Null) or isinstance(kind, pl.Enum)):
            raise ValueError(f"column {name!r} of type {kind} cannot be charted")
    floats = [
        pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name)
        for name, kind in chosen.schema.items()
        if kind.is_float()
    ]
    decimals = [pl.col(name).cast(pl.Float64) for name, kind in chosen.schema.items() if kind.is_decimal()]
    return chosen.with_columns(*floats, *decimals)
