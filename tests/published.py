"""NVIDIA's figures for Moonlight, as the tests compare with them."""

from labkit.drivers.recorded import Published
from labkit.workload.files import data_directory

PEAKS_GB = {
    tuple(sorted(cell.recompute.modules)): cell.peak_gb
    for cell in Published.load(data_directory() / "published" / "moonlight-16b.yaml").cells
    if cell.peak_gb is not None
}
"""Largest allocated GB (1e9 bytes) of a rank, by sorted recompute labels; the control is `()`."""
