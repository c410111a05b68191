"""Training in fp32: parameters are their own main parameters, activations have four bytes, attention has no kernel."""

from typing import Any

from tests.memory.grid import ends, gdn, hybrid, inputs, mamba, moe, pipeline, state

PRECISION: dict[str, Any] = {"training.precision": "fp32", "training.kernels.attention_backend": "unfused"}
BASE: dict[str, Any] = {
    **moe.BASE,
    "training": {"precision": "fp32", "kernels": {"attention_backend": "unfused"}},
}


def of(family: Any, case: str) -> dict[str, Any]:
    """A case of another family in fp32."""
    whole: dict[str, Any] = {section: family.BASE[section] for section in ("model", "parallelism", "batch")}
    return {**whole, **family.CHANGES[case], **PRECISION}


CHANGES: dict[str, dict[str, Any]] = {
    "experts": {},
    "experts, moe_act": {"labels": ["moe_act", "layernorm", "mla_up_proj"]},
    "experts, full uniform 1": {"full": ("uniform", 1)},
    "experts gathered": moe.GATHER,
    "experts of HybridEP": moe.FLEX,
    "experts without fused permutation": moe.UNFUSED,
    "router in the training precision": moe.BF16_ROUTER,
    "biases of experts, moe_act": of(moe, "bias, router in bf16, moe_act"),
    "eager activation, overlapped shared experts": of(moe, "eager activation, overlap"),
    "distributed optimizer": of(state, "as megatron has it"),
    "one rank": of(state, "one rank"),
    "whole optimizer": of(state, "no distributed optimizer"),
    "momentum": of(state, "momentum"),
    "weight gradients not fused": of(state, "weight gradients not fused"),
    "gpt": of(ends, "gpt"),
    "gpt, eager loss, one rank": of(ends, "gpt, eager, one rank"),
    "native loss": of(ends, "native loss"),
    "learned positions, whole rows": of(ends, "learned positions, whole rows"),
    "prediction": of(ends, "prediction"),
    "delta nets": of(gdn, "gdn"),
    "mamba": of(mamba, "mamba"),
    "hybrid, full uniform 1": of(hybrid, "full uniform 1"),
    "a mask": of(inputs, "a mask"),
    "interleaved": of(pipeline, "interleaved"),
}
