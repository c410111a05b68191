"""The charts of admission, from the frames of `labkit.workbench.admission`; bytes become GiB (2**30) here."""

import altair as alt
import polars as pl

from labkit.report.data import clean
from labkit.report.encodings import guides, layered, menu, named_colour, named_shape, room_for
from labkit.report.figure import Figure
from labkit.report.theme import FITTING
from labkit.workload.gpu import GIB

_BAND = 84


def micro_batches(frame: pl.DataFrame, budget_bytes: int) -> Figure:
    """What each micro-batch of each policy needs, beside the budget.

    Args:
        frame: `labkit.workbench.admission.MICRO_BATCHES`.
        budget_bytes: what a rank may allocate.
    """
    shown = ["policy", "number", "requests", "packed_tokens", "logical_tokens", "peak_bytes", "verdict"]
    rows = clean(frame, [*shown, "reserved_bytes", "certainty"]).with_columns(
        (pl.col("reserved_bytes") / GIB).alias("needed_gib"),
        (pl.col("peak_bytes") / GIB).alias("peak_gib"),
        ((pl.col("number") + 0.5) / pl.len().over("policy")).alias("place"),
    )
    policies = rows["policy"].unique(maintain_order=True).to_list()
    found = rows["verdict"].unique().to_list()
    looks = {verdict: look for verdict, look in FITTING.items() if verdict in found}
    tooltip = [
        alt.Tooltip("policy:N", title="policy"),
        alt.Tooltip("number:Q", title="micro-batch"),
        alt.Tooltip("requests:Q", title="requests"),
        alt.Tooltip("packed_tokens:Q", title="packed tokens", format=","),
        alt.Tooltip("logical_tokens:Q", title="logical tokens", format=","),
        alt.Tooltip("peak_gib:Q", title="estimated peak (GiB)", format=".2f"),
        alt.Tooltip("needed_gib:Q", title="needed, with margin and segments (GiB)", format=".2f"),
        alt.Tooltip("certainty:N", title="figures are the estimate's own or a bound"),
        alt.Tooltip("verdict:N", title="within the budget"),
    ]
    x = alt.X(
        "needed_gib:Q",
        title="needed, estimated (GiB)",
        scale=alt.Scale(zero=True, nice=False, range=room_for(30)),
        axis=alt.Axis(tickCount=6),
    )
    points = (
        alt.Chart()
        .mark_point(filled=True, size=70, opacity=0.9)
        .encode(
            x=x,
            y=alt.Y("policy:N", title=None, sort=policies, axis=alt.Axis(ticks=False, domain=False)),
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[0, 1])),
            color=named_colour("verdict", looks),
            shape=named_shape("verdict", looks),
            tooltip=tooltip,
        )
    )
    budget = pl.DataFrame({"label": ["the budget"], "needed_gib": [budget_bytes / GIB]})
    return Figure(
        "admission-micro-batches",
        "What every micro-batch of each policy needs, in GiB: the estimated peak, its margin and what is set aside for "
        "the allocator's segments. Dashed: the budget. What is right of it was admitted and does not fit.",
        layered(
            [*guides(budget, "needed_gib", "label"), points],
            rows,
            "Micro-batches within the budget",
            max(1, len(policies)) * _BAND,
        ),
    )


def boundary(frame: pl.DataFrame) -> Figure:
    """How many tokens of sequences of a length each policy admits together.

    Args:
        frame: `labkit.workbench.admission.BOUNDARY`.
    """
    columns = ["sharing", "policy", "length", "sequences", "logical_tokens", "packed_tokens", "needed_bytes", "fits"]
    rows = clean(frame, columns).with_columns((pl.col("needed_bytes") / GIB).round(2).alias("needed_gib"))
    policies = rows["policy"].unique(maintain_order=True).to_list()
    sharings = rows["sharing"].unique(maintain_order=True).to_list()
    chosen = menu("boundary_sharing", sharings, "Sequences")
    tooltip = [
        alt.Tooltip("policy:N", title="policy"),
        alt.Tooltip("length:Q", title="tokens of each sequence", format=","),
        alt.Tooltip("sharing:N", title="of that"),
        alt.Tooltip("sequences:Q", title="admitted together", format=","),
        alt.Tooltip("logical_tokens:Q", title="logical tokens", format=","),
        alt.Tooltip("packed_tokens:Q", title="packed tokens", format=","),
        alt.Tooltip("needed_gib:Q", title="needed, at most (GiB)", format=".1f"),
        alt.Tooltip("fits:N", title="fits"),
    ]
    base = (
        alt.Chart()
        .transform_filter("datum.sharing === boundary_sharing")
        .encode(
            x=alt.X(
                "length:Q",
                title="tokens of each sequence",
                scale=alt.Scale(type="log", base=2, nice=False, padding=14),
                axis=alt.Axis(format=",.0f", tickCount=8),
            ),
            y=alt.Y(
                "logical_tokens:Q",
                title="logical tokens of one micro-batch",
                scale=alt.Scale(type="log", nice=True),
                axis=alt.Axis(format="~s", tickCount=5),
            ),
        )
    )
    lines = base.mark_line(strokeWidth=1.6).encode(color=named_colour("policy", policies))
    points = base.mark_point(filled=True, size=44, opacity=1).encode(
        color=named_colour("policy", policies),
        shape=named_shape("policy", policies),
        tooltip=tooltip,
    )
    rings = (
        base.transform_filter("!datum.fits")
        .mark_point(style="marker", filled=False, shape="circle", size=190, strokeWidth=1.3)
        .encode(tooltip=tooltip)
    )
    return Figure(
        "admission-boundary",
        "As many sequences of one length as each policy admits into one micro-batch, by their logical tokens; both "
        "axes are logarithmic. What is ringed would not fit the budget, by estimate.",
        layered([lines, points, rings], rows, "What is admitted together", 320).add_params(chosen),
    )
