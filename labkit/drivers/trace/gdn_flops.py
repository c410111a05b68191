"""FLOPs of flash-linear-attention's Triton kernels for the gated delta rule: their `tl.dot` products.

Sources: `fla/ops/common/{chunk_delta_h,chunk_o,chunk_scaled_dot_kkt}.py` and `fla/ops/gated_delta_rule/{wy_fast,
chunk_fwd}.py` of fla-core 0.6.0. A chunk has BT tokens; K and V are the widths of a head's keys and values. Inverting a
chunk's triangular matrix is not counted; nor are other Triton kernels, which multiply no matrices.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Products(NamedTuple):
    """Products of a token and value head, of each shape."""

    state: int = 0
    """K x V, with a chunk's state."""
    keys: int = 0
    """BT x K, with a chunk's keys."""
    values: int = 0
    """BT x V, with a chunk's values."""
    square: int = 0
    """BT x BT."""


_PRODUCTS = {
    "chunk_scaled_dot_kkt_fwd_kernel": _Products(keys=1),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": _Products(keys=1),
    "recompute_w_u_fwd_kernel": _Products(keys=1, values=1),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": _Products(state=2),
    "chunk_fwd_kernel_o": _Products(state=1, keys=1, values=1),
    "chunk_bwd_kernel_dv_local": _Products(keys=1, values=1),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": _Products(state=3),
    "chunk_bwd_kernel_dqkwg": _Products(state=3, keys=3, values=1),
    "prepare_wy_repr_bwd_kernel": _Products(keys=5, values=2, square=2),
}


def of(kernel: str, arguments: Mapping[str, Any]) -> int:
    """FLOPs of a launch with keyword `arguments`; 0 for a kernel that multiplies no matrices."""
    products = _PRODUCTS.get(kernel)
    if products is None:
        return 0
    batch, sequence = arguments["k"].shape[:2]
    keys, values, chunk = arguments["K"], arguments.get("V", 0), arguments["BT"]
    each = products.state * keys * values
    each += chunk * (products.keys * keys + products.values * values + products.square * chunk)
    return int(2 * batch * sequence * arguments["HV"] * each)
