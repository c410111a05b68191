"""A chart that shows itself wherever a notebook is read: JupyterLab, an executed notebook, a labkit report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from labkit.report.theme import vega_config

VEGALITE = "application/vnd.vegalite.v5+json"
"""JupyterLab renders this type with its own Vega-Lite 5, so charts keep to what version 5 knows."""
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"


@dataclass(frozen=True)
class Figure:
    """An Altair chart with the words a reader needs beside it.

    Attributes:
        name: stable identifier; names the files exported from a report.
        caption: what is drawn, in which unit, from which source; also read out by screen readers.
        chart: the Altair chart; its first data set is what a report's reader downloads.
        lists: columns of that data set which hold a list of lists, with the names of the inner values: a reader
            gets a line for each.
    """

    name: str
    caption: str
    chart: alt.LayerChart
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification, data included."""
        spec: dict[str, Any] = self.chart.properties(description=self.caption).to_dict()
        usermeta = {
            "labkit": {
                "name": self.name,
                "caption": self.caption,
                "lists": {name: list(names) for name, names in self.lists.items()},
            }
        }
        return {**spec, "$schema": _SCHEMA, "config": vega_config("light"), "usermeta": usermeta}

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = {VEGALITE: self.spec, "text/plain": f"{self.caption} (a chart)"}
        return bundle, {VEGALITE: {"embed_options": {"actions": False, "renderer": "svg"}}}
