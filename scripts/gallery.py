"""Draws the pictures of README.md from kept results: `python scripts/gallery.py` after `make report`."""

from pathlib import Path

import vl_convert

from labkit import Study
from labkit.report.charts import study as charts

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Write `docs/moonlight-peaks.png`."""
    results = Study.load(ROOT / "data" / "studies" / "moonlight-16b.yaml").results()
    spec = {**charts.peaks(results.cells).spec, "width": 640, "background": "white", "padding": 16}
    (ROOT / "docs" / "moonlight-peaks.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=1.5))


if __name__ == "__main__":
    main()
