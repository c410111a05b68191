"""Rules of the `lora` runtime (see `labkit.workload.rules`)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.runtime import Lora
    from labkit.workload.workload import Workload

MOST_SEQUENCES, MOST_CHUNKS = 2**14, 2**12
"""Each sequence's loss and each chunk's results are tensors of their own, listed one by one."""


def lora_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    training, packed = workload.training, workload.batch.packed
    if training.runtime == "megatron":
        if training.lora is not None:
            remedy = "set training.runtime: lora or leave it out"
            yield Finding("error", "training.lora", "the megatron runtime has no adapters", remedy, Authority.LABKIT)
        return
    if workload.batch.create_attention_mask_in_dataloader:
        remedy = "leave it out"
        yield Finding(
            "error",
            "batch.create_attention_mask_in_dataloader",
            "the lora runtime reads no mask",
            remedy,
            Authority.LABKIT,
        )
    if training.precision != "bf16":
        yield Finding("error", "training.precision", "the lora runtime works in bf16", "leave it out", Authority.LABKIT)
    if training.lora is None:
        yield Finding(
            "error", "training.lora", "the lora runtime needs it", "give training.lora.rank", Authority.LABKIT
        )
    else:
        yield from _passes(training.lora)
    yield from _not_priced(workload)
    sequences = workload.batch.micro_batch_size if packed is None else len(packed.lengths)
    if sequences > MOST_SEQUENCES:
        field = "batch.micro_batch_size" if packed is None else "batch.packed.lengths"
        reason = f"{sequences} sequences in a pass of the lora runtime are more than are listed one by one"
        yield Finding(
            "error", field, reason, f"use at most {MOST_SEQUENCES}, in several micro-batches", Authority.LABKIT
        )
        return
    if training.lora is not None:
        yield from _of_vocabulary(workload, training.lora)


def _passes(lora: "Lora") -> Iterator[Finding]:
    at = "training.lora."
    if lora.no_grad and lora.optimizer_step:
        reason = "a pass without gradients leaves the optimizer nothing to step with"
        yield Finding("error", f"{at}optimizer_step", reason, "set it to false", Authority.LABKIT)
    if lora.outputs != "hidden_states" and not lora.no_grad:
        reason = f"{lora.outputs} are priced for passes without gradients"
        yield Finding(
            "error", f"{at}outputs", reason, "set training.lora.no_grad: true or use hidden_states", Authority.LABKIT
        )
    if (lora.outputs == "top_k") != (lora.top_k is not None):
        reason = "outputs: top_k and the number of candidates go together"
        yield Finding("error", f"{at}top_k", reason, "give both or neither", Authority.LABKIT)


def _of_vocabulary(workload: "Workload", lora: "Lora") -> Iterator[Finding]:
    vocabulary, rows = workload.model.vocab_size, workload.batch.sequences.logical_rows
    if lora.top_k is not None and lora.top_k > vocabulary:
        reason = f"{lora.top_k} candidates are more than the vocabulary has tokens ({vocabulary})"
        yield Finding("error", "training.lora.top_k", reason, f"use at most {vocabulary}", Authority.LABKIT)
    chunks = -(-rows // lora.output_chunk_rows)
    if lora.outputs in ("log_probs", "top_k") and chunks > MOST_CHUNKS:
        reason = f"{rows} tokens make {chunks} chunks, more than the {MOST_CHUNKS} that are listed one by one"
        yield Finding(
            "error",
            "training.lora.output_chunk_rows",
            reason,
            f"use at least {-(-rows // MOST_CHUNKS)}",
            Authority.LABKIT,
        )


def _not_priced(workload: "Workload") -> Iterator[Finding]:
    """What the layers of this runtime have no rows for."""
    model, layout = workload.model, workload.parallelism
    mixers = {layer.mixer for layer in model.layers}
    refused = {
        "model.multi_latent_attention": "mla" in mixers,
        "model.hybrid_layer_pattern": model.hybrid_layer_pattern is not None,
        "model.mtp_num_layers": model.mtp_num_layers is not None,
        "training.kernels.moe_grouped_gemm": model.mixture_of_experts is not None
        and not workload.training.kernels.moe_grouped_gemm,
        "model.normalization": model.normalization != "RMSNorm",
        "model.gated_linear_unit": not model.gated_linear_unit,
        "model.activation_func": model.activation_func != "silu",
        "model.add_bias_linear": model.add_bias_linear,
        "model.add_qkv_bias": model.add_qkv_bias,
        "model.qk_layernorm": not model.qk_layernorm,
        "model.position_embedding_type": model.position_embedding_type != "rope",
        "parallelism.pipeline_model_parallel_size": layout.pp != 1,
        "parallelism.virtual_pipeline_model_parallel_size": layout.vpp != 1,
    }
    for field, broken in refused.items():
        if broken:
            reason = "the lora runtime is priced for transformer layers of normed gated attention or gated delta nets"
            yield Finding("error", field, reason, "use training.runtime: megatron", Authority.LABKIT)
