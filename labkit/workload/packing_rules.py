"""Rules of packed batches (see `labkit.workload.rules`): those of both runtimes, and of Megatron's own packing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.attention_backends import attention_backend
from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

MOST_TURNED = 2**10
"""Without a kernel for it, each sequence's rotary positions are operations of their own, listed one by one."""


def packing_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    packed = workload.batch.packed
    if packed is None:
        return
    yield from _of_any(workload)
    if workload.training.runtime == "megatron":
        yield from _of_megatron(workload)
        yield from _not_priced(workload)


def _of_any(workload: "Workload") -> Iterator[Finding]:
    batch, packed, cp = workload.batch, workload.batch.sequences, workload.parallelism.cp
    if batch.micro_batch_size != 1:
        reason = "packed sequences lie in one row of the batch"
        yield Finding("error", "batch.micro_batch_size", reason, "set it to 1", Authority.LABKIT)
    if packed.shared_prefix >= min(packed.lengths):
        reason = f"the shortest sequence has {min(packed.lengths)} tokens, and some must follow the prefix"
        yield Finding(
            "error", "batch.packed.shared_prefix", reason, f"use at most {min(packed.lengths) - 1}", Authority.LABKIT
        )
    elif batch.seq_length < packed.rows:
        reason = f"the packed sequences have {packed.rows} tokens"
        tp = workload.parallelism.tp
        yield Finding("error", "batch.seq_length", reason, f"set it to {-(-packed.rows // tp) * tp}", Authority.LABKIT)
    busiest = packed.busiest_rank_rows
    if busiest is not None and not batch.seq_length <= busiest * cp <= batch.seq_length * cp:
        reason = f"{busiest} rows are no share that the busiest of {cp} ranks can have of {batch.seq_length}"
        even = -(-batch.seq_length // cp)
        yield Finding(
            "error", "batch.packed.busiest_rank_rows", reason, f"use {even} to {batch.seq_length}", Authority.LABKIT
        )


def _of_megatron(workload: "Workload") -> Iterator[Finding]:
    """Sources: `SFTDataset`, `thd_get_partitioned_indices`, `TransformerLayer._should_call_local_cudagraph`."""
    batch, packed, cp = workload.batch, workload.batch.sequences, workload.parallelism.cp
    lora = "leave it out or set training.runtime: lora"
    if packed.shared_prefix:
        yield Finding(
            "error", "batch.packed.shared_prefix", "Megatron computes every sequence whole", lora, Authority.DATA
        )
    if packed.busiest_rank_rows is not None:
        reason = "every context-parallel rank gets an even share of each sequence"
        yield Finding("error", "batch.packed.busiest_rank_rows", reason, lora, Authority.DATA)
    if batch.create_attention_mask_in_dataloader:
        reason = "packed sequences come without a mask"
        yield Finding("error", "batch.create_attention_mask_in_dataloader", reason, "leave it out", Authority.DATA)
    chunks = 2 * cp
    odd = next((length for length in workload.packed_lengths if length % chunks), None) if cp > 1 else None
    if odd is not None:
        reason = f"each of {cp} context-parallel ranks gets two equal parts of a sequence, of {odd} tokens too"
        remedy = f"pad every sequence, and seq_length, to a multiple of {chunks}"
        yield Finding("error", "batch.packed.lengths", reason, remedy, Authority.DATA)


def _not_priced(workload: "Workload") -> Iterator[Finding]:
    """What packed sequences have no rows for yet."""
    layout, kernels = workload.parallelism, workload.training.kernels
    attends = any(layer.mixer in ("attention", "mla") for layer in workload.model.kinds)
    if attends and attention_backend(workload) == "unfused":
        reason = "unfused attention of packed sequences is not supported by this version of labkit"
        yield Finding(
            "error", "training.kernels.attention_backend", reason, "use fused or flash, in bf16", Authority.LABKIT
        )
    if attends and layout.cp > 1 and layout.cp_comm_type == "all_gather":
        reason = "gathered keys of packed sequences are not supported by this version of labkit"
        yield Finding("error", "parallelism.cp_comm_type", reason, "use p2p or a2a", Authority.LABKIT)
    model = workload.model
    turns = attends and (model.turns_positions or model.multi_latent_attention is not None)
    if turns and not kernels.apply_rope_fusion and len(workload.packed_lengths) > MOST_TURNED:
        count = len(workload.packed_lengths)
        reason = f"{count} sequences, turned one by one without apply_rope_fusion, are more than are listed"
        yield Finding(
            "error", "batch.packed.lengths", reason, f"use at most {MOST_TURNED} or apply_rope_fusion", Authority.LABKIT
        )
