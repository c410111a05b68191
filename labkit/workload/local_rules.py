"""Rules of Megatron Core's own layers, `transformer_impl: local`, and of APEX (see `labkit.workload.rules`).

Sources: `gpt_layer_specs.py`, `models/backends.py`, `dot_product_attention.py`, `fusions/fused_softmax.py`,
`transformer/torch_norm.py`, `tensor_parallel/layers.py`; `hybrid_layer_specs.py` has Transformer Engine's alone.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.kernels import length_choices

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_AT = "training.kernels."
_IMPL = f"{_AT}transformer_impl"
_OWN = ("masked_softmax_fusion", "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "persist_layer_norm")


def local_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    training = workload.training
    kernels, apex = training.kernels, training.software.apex
    if kernels.gradient_accumulation_fusion and not apex:
        reason = "Megatron Core's linears add up weight gradients with a kernel of APEX, and there is none"
        yield Finding("error", f"{_AT}gradient_accumulation_fusion", reason, "set it to false", Authority.LAYERS)
    if not kernels.local:
        default = type(kernels)()
        for name in _OWN:
            if getattr(kernels, name) != getattr(default, name):
                reason = "the layers of Transformer Engine do not read it"
                yield Finding("warning", f"{_AT}{name}", reason, f"leave it out or set {_IMPL}: local", Authority.SPECS)
        return
    yield from _layers(workload)
    yield from _attention(workload)
    yield from _norms(workload)
    yield from _not_priced(workload)


def _layers(workload: "Workload") -> Iterator[Finding]:
    model, remedy = workload.model, "use transformer_engine"
    of_transformer_engine = {
        "a hybrid pattern's layers are": model.hybrid_layer_pattern is not None,
        "layers of gated delta net are": model.gated_delta_net is not None,
        "the lora runtime's layers are": workload.training.runtime == "lora",
    }
    for what, broken in of_transformer_engine.items():
        yield from refuse(broken, _IMPL, f"{what} Transformer Engine's alone", remedy, Authority.SPECS)
    # `MultiLatentAttention` gives `DotProductAttention` widths that it does not take.
    latent = model.multi_latent_attention is not None
    yield from refuse(latent, _IMPL, "Megatron Core's own attention cannot be multi-latent", remedy, Authority.LATENT)


def _not_priced(workload: "Workload") -> Iterator[Finding]:
    model = workload.model
    remedy = "trace the workload, which runs it"
    if model.mtp_num_layers is not None:
        yield Finding(
            "warning",
            _IMPL,
            "layers of multi-token prediction are priced as Transformer Engine's",
            remedy,
            Authority.LABKIT,
        )


def _attention(workload: "Workload") -> Iterator[Finding]:
    model, layout = workload.model, workload.parallelism
    yield from refuse(
        layout.cp > 1,
        "parallelism.context_parallel_size",
        "Megatron Core's own attention has no context parallelism",
        f"use 1 or {_IMPL}: transformer_engine",
        Authority.OWN_ATTENTION,
    )
    yield from refuse(
        workload.batch.packed is not None,
        "batch.packed",
        "Megatron Core's own attention takes no packed sequences",
        f"leave it out or use {_IMPL}: transformer_engine",
        Authority.OWN_ATTENTION,
    )
    if layout.cp == 1 and model.num_attention_heads % layout.tp == 0 and not workload.training.software.apex:
        yield from refuse(
            length_choices(workload).softmax_kernel,
            f"{_AT}masked_softmax_fusion",
            "the kernel for mask and softmax is APEX's, and there is none",
            "set it to false",
            Authority.APEX,
        )


def _norms(workload: "Workload") -> Iterator[Finding]:
    model, kernels = workload.model, workload.training.kernels
    if workload.training.software.apex and model.normalization == "LayerNorm":
        return
    what = "Megatron Core's own RMSNorm is PyTorch's" if model.normalization == "RMSNorm" else "LayerNorm is PyTorch's"
    yield from refuse(
        kernels.persist_layer_norm,
        f"{_AT}persist_layer_norm",
        f"{what}, which has no such kernel",
        "set it to false",
        Authority.OWN_NORM,
    )
    yield from refuse(
        workload.parallelism.sequence_parallel,
        "parallelism.sequence_parallel",
        f"{what}, whose gradients are not reduced under sequence parallelism",
        f"set it to false or {_IMPL}: transformer_engine",
        Authority.OWN_NORM,
    )
    yield from refuse(
        model.normalization == "RMSNorm" and model.mixture_of_experts is not None and workload.training.software.apex,
        "model.normalization",
        "the last norm of a model of experts is APEX's, which has LayerNorm alone",
        "use LayerNorm or training.software.apex: false",
        Authority.APEX,
    )
