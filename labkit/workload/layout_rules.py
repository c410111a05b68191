"""Rules of how ranks are laid out, and of what has to divide among them (see `labkit.workload.rules`).

Sources: `parallel_state.initialize_model_parallel`, `tensor_parallel/layers.py`, `megatron.training.arguments`,
`TransformerConfig.__post_init__`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding, divides, refuse

if TYPE_CHECKING:
    from labkit.workload.workload import Workload


def layout_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    model, layout, batch = workload.model, workload.parallelism, workload.batch
    tp = layout.tp
    at = "parallelism.tensor_model_parallel_size"
    yield from divides(tp, model.num_attention_heads, at, "num_attention_heads", Authority.CONFIG)
    if any(layer.mlp == "dense" for layer in model.kinds):
        yield from divides(tp, model.ffn_hidden_size, at, "ffn_hidden_size")
    grouped = tp * layout.pp * layout.cp
    if layout.world_size % grouped:
        yield Finding(
            "error",
            "parallelism.world_size",
            f"{layout.world_size} ranks do not factor into tensor x pipeline x context parallel = {grouped}",
            f"use a multiple of {grouped}",
            Authority.PARALLEL_STATE,
        )
        return
    if layout.cp > 1:
        # Megatron gives each rank two parts of a sequence, one early and one late (`get_batch_on_this_cp_rank`).
        parts = 2 * layout.cp
        if batch.seq_length % parts:
            reason = f"{batch.seq_length} cannot be cut into two equal parts for each of {layout.cp} ranks"
            yield Finding(
                "error",
                "parallelism.context_parallel_size",
                reason,
                f"use a multiple of {parts} tokens",
                Authority.ARGUMENTS,
            )
            return
    if layout.sequence_parallel:
        tokens = batch.seq_length // layout.cp
        yield from divides(tp, tokens, at, "a rank's tokens under sequence_parallel")
        if tp == 1:
            yield Finding(
                "error",
                "parallelism.sequence_parallel",
                "there is nothing to split at tensor_model_parallel_size 1",
                "leave it off or raise tensor_model_parallel_size",
                Authority.CONFIG,
            )
    yield from _expert_layout(workload, grouped)
    yield from _optimizer_instances(workload)
    rows = batch.micro_batch_size * layout.dp
    yield from _divides_batch(rows, batch.global_batch_size)


def _expert_layout(workload: "Workload", grouped: int) -> Iterator[Finding]:
    """How experts are spread; `grouped` is the number of ranks the dense parameters are spread over."""
    model, layout = workload.model, workload.parallelism
    moe, tp, ep, at = model.mixture_of_experts, layout.tp, layout.ep, "parallelism.tensor_model_parallel_size"
    if moe is None:
        for name, spread, authority in (
            ("expert_model_parallel_size", ep, Authority.CONFIG),
            ("expert_tensor_parallel_size", layout.expert_tensor_parallel_size or 1, Authority.LABKIT),
        ):
            yield from refuse(
                spread > 1, f"parallelism.{name}", "the model has no experts to spread", "use 1", authority
            )
    else:
        field = "parallelism.expert_model_parallel_size"
        yield from divides(ep, moe.num_moe_experts, field, "num_moe_experts", Authority.ARGUMENTS)
        yield from divides(
            layout.etp,
            moe.moe_ffn_hidden_size,
            "parallelism.expert_tensor_parallel_size",
            "moe_ffn_hidden_size",
        )
        if moe.moe_shared_expert_intermediate_size is not None:
            yield from divides(tp, moe.moe_shared_expert_intermediate_size, at, "moe_shared_expert_intermediate_size")
        expert_group = layout.etp * ep * layout.pp
        # Of a size that cannot be anyway nothing follows.
        if layout.world_size % expert_group and moe.num_moe_experts % ep == 0:
            yield Finding(
                "error",
                "parallelism.world_size",
                f"{layout.world_size} ranks do not factor into expert tensor x expert x pipeline parallel "
                f"= {expert_group}",
                f"use a multiple of {expert_group} and of {grouped}",
                Authority.PARALLEL_STATE,
            )
        if tp > 1 and not layout.sequence_parallel:
            yield Finding(
                "error",
                "parallelism.sequence_parallel",
                "Megatron Core trains experts under tensor parallelism only with sequence parallelism",
                "set sequence_parallel: true",
                Authority.MOE,
            )


def _optimizer_instances(workload: "Workload") -> Iterator[Finding]:
    """`initialize_model_parallel`; `DistributedDataParallel.__init__`."""
    layout, data_parallel = workload.parallelism, workload.training.data_parallel
    instances = data_parallel.num_distributed_optimizer_instances
    field = "training.data_parallel.num_distributed_optimizer_instances"
    yield from refuse(
        instances > 1 and not data_parallel.use_distributed_optimizer,
        field,
        "only a distributed optimizer has instances",
        "use 1 or set training.data_parallel.use_distributed_optimizer: true",
        Authority.DATA_PARALLEL,
    )
    yield from divides(
        instances, layout.dp * layout.cp, field, "data-parallel x context-parallel ranks", Authority.PARALLEL_STATE
    )
    if layout.world_size % (layout.etp * layout.ep * layout.pp) == 0:
        yield from divides(instances, layout.edp, field, "expert data-parallel ranks", Authority.PARALLEL_STATE)


def _divides_batch(rows: int, global_batch_size: int) -> Iterator[Finding]:
    if global_batch_size % rows:
        yield Finding(
            "error",
            "batch.global_batch_size",
            f"{global_batch_size} is not a multiple of micro_batch_size x data-parallel ranks = {rows}",
            f"use a multiple of {rows}",
            Authority.MICROBATCHES,
        )
