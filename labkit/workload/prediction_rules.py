"""Rules of multi-token prediction.

Sources: `megatron.training.arguments.validate_args`; `transformer/multi_token_prediction.py` of Megatron Core.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload


_FIELD = "model.mtp_num_layers"


def prediction_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    model, choice, layout = workload.model, workload.recompute, workload.parallelism
    if model.mtp_num_layers is None:
        return
    if model.position_embedding_type not in ("rope", "none"):
        reason = "multi-token prediction takes rotary positions or none"
        yield Finding(
            "error",
            "model.position_embedding_type",
            reason,
            "use rope or leave mtp_num_layers out",
            Authority.ARGUMENTS,
        )
    if model.hybrid_layer_pattern is None and model.layers[-1].mixer == "gdn":
        reason = "layers of multi-token prediction are like the last one, and cannot be gated delta net"
        yield Finding("error", _FIELD, reason, "let the last layer be attention or leave it out", Authority.PREDICTION)
    places = model.num_layers + layout.account_for_embedding_in_pipeline_split + 1
    if layout.account_for_loss_in_pipeline_split and places == layout.pp * layout.vpp:
        reason = "multi-token prediction on a stage without a layer is not supported by this version of labkit"
        yield Finding("error", _FIELD, reason, "give the last stage a layer or leave it out", Authority.LABKIT)
    full = choice.recompute_granularity == "full"
    if full and choice.recompute_method == "block" and model.hybrid_layer_pattern is not None:
        reason = (
            "block recompute of a hybrid pattern's multi-token prediction is not supported by this version of labkit"
        )
        yield Finding(
            "error", "recompute.recompute_method", reason, "use uniform with recompute_num_layers 1", Authority.LABKIT
        )
    if full and choice.recompute_method == "uniform" and choice.recompute_num_layers != 1:
        reason = "layers of multi-token prediction are recomputed one by one"
        yield Finding(
            "error", "recompute.recompute_num_layers", reason, "use 1, or recompute_method: block", Authority.PREDICTION
        )
