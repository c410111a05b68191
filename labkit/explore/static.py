"""What stands where no kernel is: the picture as plain HTML, for reports and executed notebooks."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from labkit.report.theme import PALETTES, category_colour, category_number, text_on
from labkit.workload.gpu import gib

VERDICTS = {
    "fits": "fits with the margin",
    "tight": "fits, but not with the margin",
    "no": "does not fit",
}
_NARROWEST = 3.5
"""Per cent of the bar that a category's number needs."""

_PAGE = Markup(
    '<div class="lk-explorer-static" style="font: 14px/1.5 system-ui, sans-serif; color: {ink}; max-width: 46rem">'
    '<p style="margin: 0 0 0.2rem"><strong dir="auto">{name}</strong>. {layout}. {batch}. Recompute: {recompute}.</p>'
    '<p style="margin: 0 0 0.5rem; color: {muted}">Peak '
    '<strong style="color: {ink}; font-size: 1.25em">{peak}</strong> '
    "allocated (estimated), in {phase} of step {iteration}, on rank {rank}{stage}. A margin of {margin} is set aside "
    "above it.</p>"
    '<p style="margin: 0 0 0.5rem; color: {muted}">As the explorer stood when it was shown: what is picked later is '
    "not kept here. Show it again for that.</p>"
    '<div role="img" aria-label="{described}" style="display: flex; height: 1.7rem; border-radius: 4px; '
    'overflow: hidden; background: {raised}">{segments}</div>'
    '<table style="margin-top: 0.6rem"><thead><tr><th scope="col">held by</th><th scope="col" style="{right}">GiB</th>'
    '<th scope="col" style="{right}">share</th></tr></thead><tbody>{rows}</tbody></table>'
    '<table style="margin-top: 0.6rem"><thead><tr><th scope="col">GPU</th><th scope="col">with a margin</th>'
    '<th scope="col" style="{right}">room left</th></tr></thead><tbody>{fits}</tbody></table>{warnings}</div>'
)
_SEGMENT = Markup(
    '<span title="{title}" style="width: {width:.3f}%; background: {colour}; color: {text}; text-align: center; '
    'font-size: 0.75rem; line-height: 1.7rem; overflow: hidden">{number}</span>'
)
_ROW = Markup(
    '<tr><td><span style="display: inline-block; width: 1.5em; text-align: center; border-radius: 3px; '
    'background: {colour}; color: {text}; font-size: 0.8em">{number}</span> {category}</td>'
    '<td style="{right}">{gib:.3f}</td><td style="{right}">{share:.1%}</td></tr>'
)
_FIT = Markup('<tr><td>{name} ({memory})</td><td>{verdict}</td><td style="{right}">{room}</td></tr>')
_RIGHT = "text-align: right; font-variant-numeric: tabular-nums"


def static_html(picture: Mapping[str, Any]) -> str:
    """The picture of `labkit.explore.view`, settled, without scripts; every text in it is escaped.

    Colours are those of the report's theme where there is one (`--lk-...`).
    """
    peak, light = picture["peak"], PALETTES["light"]
    held = picture["held"]
    page = _PAGE.format(
        ink="var(--lk-ink, inherit)",
        muted=f"var(--lk-muted, {light.muted})",
        raised=f"var(--lk-raised, {light.raised})",
        right=_RIGHT,
        name=picture["name"],
        layout=picture["layout"],
        batch=picture["batch"],
        recompute=picture["recompute"],
        peak=gib(peak),
        phase=picture["phase"],
        iteration=picture["iteration"],
        rank=picture["rank"],
        stage=f" of pipeline stage {picture['stage']}, which holds most" if picture["stages"] else "",
        margin=gib(picture["margin"]),
        described="; ".join(f"{name} {gib(nbytes)}" for name, nbytes in held),
        segments=Markup("").join(_segment(name, nbytes, peak) for name, nbytes in held),
        rows=Markup("").join(_row(name, nbytes, peak) for name, nbytes in held),
        fits=Markup("").join(_fit(each) for each in picture["fits"]),
        warnings=Markup("").join(Markup("<p>Warning: {}</p>").format(each) for each in picture.get("warnings", ())),
    )
    return str(page)


def _segment(name: str, nbytes: int, peak: int) -> Markup:
    width, colour = 100 * nbytes / peak, category_colour(name)
    return _SEGMENT.format(
        title=f"{name}: {gib(nbytes)}",
        width=width,
        colour=colour,
        text=text_on(colour),
        number=category_number(name) if width > _NARROWEST else "",
    )


def _row(name: str, nbytes: int, peak: int) -> Markup:
    colour = category_colour(name)
    return _ROW.format(
        category=name,
        colour=colour,
        text=text_on(colour),
        number=category_number(name),
        gib=nbytes / 2**30,
        share=nbytes / peak,
        right=_RIGHT,
    )


def _fit(fit: Mapping[str, Any]) -> Markup:
    room = gib(fit["room"]) if fit["room"] >= 0 else f"{gib(-fit['room'])} short"
    return _FIT.format(
        name=fit["name"], memory=gib(fit["memory"]), verdict=VERDICTS[fit["verdict"]], room=room, right=_RIGHT
    )


def static_text(picture: Mapping[str, Any]) -> str:
    """The same in a line or two."""
    fits = ", ".join(f"{VERDICTS[each['verdict']]} on {each['name']}" for each in picture["fits"])
    return (
        f"{picture['name']}, {picture['layout']}; {picture['batch']}; recompute {picture['recompute']}: "
        f"peak {gib(picture['peak'])} (estimated) in {picture['phase']}; {fits}"
    )
