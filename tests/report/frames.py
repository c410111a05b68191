"""Frames as a study hands them to the report: Moonlight's published figures, with invented estimates and traces."""

from collections.abc import Mapping

import polars as pl

from labkit.study import frames as study_frames
from labkit.study.frames import BREAKDOWN, CELLS, CONTRACT, PEAKS, TIMELINE
from labkit.workload.gpu import MIB

PUBLISHED = {
    "[]": (36_618_000_000, 457.18),
    "[core_attn]": (36_614_000_000, 474.80),
    "[mla_up_proj]": (35_902_000_000, 480.89),
    "[mla_up_proj, mlp]": (35_917_000_000, 496.73),
    "[moe_act]": (35_941_000_000, 466.26),
    "[layernorm, moe_act]": (35_949_000_000, 506.53),
}
"""Peak in bytes and step time in ms."""
_STATE = {"parameters": 6_200 * MIB, "gradient buffers": 6_200 * MIB, "optimizer state": 9_100 * MIB}
_PHASES = (("forward", 120), ("backward", 200), ("grad_sync", 2), ("optimizer", 40))


def cells(failures: Mapping[str, tuple[str, str | None]] | None = None) -> pl.DataFrame:
    """The `cells` frame; `failures` maps a candidate to its traced (outcome, failure)."""
    failures = failures or {}
    rows = []
    control: dict[str, int | None] = {}
    names = [*PUBLISHED, *(name for name in failures if name not in PUBLISHED)]
    for candidate in names:
        published, step_time = PUBLISHED.get(candidate, (None, None))
        for source, factor in (("estimated", 0.9984), ("traced", 1.0021), ("published", 1.0)):
            outcome, failure = failures.get(candidate, ("ok", None)) if source == "traced" else ("ok", None)
            if source == "published" and published is None:
                continue
            peak = round((published or 36e9) * factor) if outcome == "ok" else None
            base = control.setdefault(source, peak)
            rows.append(
                {
                    "candidate": candidate,
                    "setting": "",
                    "is_control": candidate == "[]",
                    "source": source,
                    "repetitions": None,
                    "outcome": outcome,
                    "failure": failure,
                    "peak_allocated_bytes": peak,
                    "peak_tensor_bytes": None if peak is None or source == "published" else peak - 40 * MIB,
                    "peak_phase": "optimizer" if source != "published" else None,
                    "between_steps_bytes": None if source == "published" or peak is None else sum(_STATE.values()),
                    "retained_bytes": None if source == "published" or peak is None else 9_000_000_000,
                    "peak_reserved_bytes": None if source != "traced" or peak is None else peak + 2**30,
                    "step_time_ms": step_time if source == "published" else None,
                    "step_time_low_ms": None,
                    "step_time_high_ms": None,
                    "tflops_per_gpu": None,
                    "replay_flops": 10**12 if source == "estimated" else None,
                    "replay_hbm_bytes": 10**10 if source == "estimated" else None,
                    "replay_seconds": 0.0051 if source == "estimated" else None,
                    "replay_checkpoints": None,
                    "step_seconds": None,
                    "changes": None,
                    "differs_in": None,
                    "warnings": None,
                    "saved_bytes": None if peak is None or base is None else base - peak,
                    "error_vs_published": None
                    if source == "published" or peak is None or published is None
                    else peak / published - 1,
                }
            )
    return pl.DataFrame(rows, schema=CELLS)


def breakdown(of: pl.DataFrame) -> pl.DataFrame:
    """The `breakdown` frame of a `cells` frame."""
    rows = []
    for row in of.filter(pl.col("peak_allocated_bytes").is_not_null()).iter_rows(named=True):
        peak = row["peak_allocated_bytes"]
        if row["source"] == "published":
            parts = {"published total": peak}
        else:
            rest = peak - sum(_STATE.values())
            parts = _STATE | {"retained: attention": rest // 8, "retained: mlp": rest // 30, "retained: moe": rest // 2}
            parts |= {"optimizer step": rest // 5, "workspaces": 64 * MIB}
            parts["allocator remainders"] = peak - sum(parts.values())
        rows += [
            {"candidate": row["candidate"], "source": row["source"], "category": category, "bytes": nbytes}
            for category, nbytes in parts.items()
        ]
    return pl.DataFrame(rows, schema=BREAKDOWN)


def timeline(of: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The `timeline` and `peaks` frames of a `cells` frame."""
    rows, peaks = [], []
    passed = of.filter(pl.col("peak_allocated_bytes").is_not_null(), pl.col("source") != "published")
    for cell in passed.iter_rows(named=True):
        peak, clock = cell["peak_allocated_bytes"], 0
        phases = _PHASES if cell["source"] == "traced" else tuple((name, count // 2) for name, count in _PHASES)
        total = sum(count for _, count in phases)
        top = peak - sum(_STATE.values())
        for phase, count in phases:
            for step in range(count):
                share = step / count
                moe, step_bytes = 0, 0
                if phase == "forward":
                    moe = int(top * 0.9 * share)
                elif phase == "backward":
                    moe = int(top * 0.9 * (1 - share))
                elif phase == "optimizer":
                    step_bytes = top if step == count // 2 else int(top * 0.4 * share)
                held = _STATE | {"retained: moe": moe, "optimizer step": step_bytes}
                position = clock / total
                rows += [
                    {
                        "candidate": cell["candidate"],
                        "source": cell["source"],
                        "position": position,
                        "clock": clock,
                        "phase": phase,
                        "category": category,
                        "bytes": nbytes,
                    }
                    for category, nbytes in held.items()
                ]
                if sum(held.values()) == peak:
                    peaks.append(
                        {
                            "candidate": cell["candidate"],
                            "source": cell["source"],
                            "position": position,
                            "phase": phase,
                            "bytes": peak,
                        }
                    )
                clock += 1
    return pl.DataFrame(rows, schema=TIMELINE), pl.DataFrame(peaks, schema=PEAKS)


def decision(of: pl.DataFrame) -> pl.DataFrame:
    """The `decision` frame of a `cells` frame."""
    rows = []
    control = PUBLISHED["[]"][1]
    order = {"[moe_act]": 1, "[mla_up_proj]": 2}
    for candidate in of["candidate"].unique(maintain_order=True):
        own = {row["source"]: row for row in of.filter(pl.col("candidate") == candidate).iter_rows(named=True)}
        traced = own["traced"]
        published = own.get("published", {"peak_allocated_bytes": None, "step_time_ms": None})
        step_time = published["step_time_ms"]
        rows.append(
            {
                "candidate": candidate,
                "setting": "",
                "is_control": traced["is_control"],
                "evidence": "traced",
                "outcome": traced["outcome"],
                "traced_bytes": traced["peak_allocated_bytes"],
                "measured_bytes": None,
                "estimated_bytes": own["estimated"]["peak_allocated_bytes"],
                "recorded_bytes": None,
                "published_bytes": published["peak_allocated_bytes"],
                "saved_bytes": traced["saved_bytes"],
                "step_time_source": "published",
                "step_time_change": None if step_time is None else step_time / control - 1,
                "step_bound_change": None,
                "replay_source": "estimated",
                "replay_checkpoints": None,
                "replay_seconds": own["estimated"]["replay_seconds"],
                "replay_flops": own["estimated"]["replay_flops"],
                "fits": traced["outcome"] == "ok",
                "tight": False,
                "verdict": traced["failure"]
                or ("Try first: most saved per replayed second." if candidate in order else "No gain."),
                "rank": order.get(candidate),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def tradeoff(of: pl.DataFrame) -> pl.DataFrame:
    """The `tradeoff` frame of a `cells` frame."""
    return study_frames.tradeoff(decision(of))


def contract() -> pl.DataFrame:
    """The `contract` frame."""
    traced = {
        "source": "traced",
        "outcome": "ok",
        "origin": "labkit trace",
        "created_at": "2026-08-02T10:11:12+00:00",
        "wall_seconds": 11.5,
        "steady_iterations": 1,
        "versions": "labkit 0.1.0, megatron-core 0.19.2, transformer-engine 2.20.2, torch 2.14.1",
        "environment": "allocator default, routing balanced",
        "contract_recorded": 9,
        "contract_fields": 17,
        "contract_lacking": "step_time_ms, losses",
    }
    published = traced | {
        "source": "published",
        "origin": "NVIDIA, H100 80GB",
        "created_at": "",
        "wall_seconds": None,
        "steady_iterations": 10,
        "versions": "",
        "environment": "",
        "contract_recorded": 2,
        "contract_lacking": "step_times_ms",
    }
    return pl.DataFrame(
        [{"candidate": candidate, **figures} for figures in (traced, published) for candidate in PUBLISHED],
        schema=CONTRACT,
    )
