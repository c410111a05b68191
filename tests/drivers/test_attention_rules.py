"""Rules of attention against Megatron Core and Transformer Engine: both refuse the same, both run the rest."""

from typing import Any

import pytest

from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError, LabkitError
from labkit.workload import Workload
from tests.memory.grid import attention

LATENT = {
    "model.multi_latent_attention": {
        "kv_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 32,
    },
    "model.kv_channels": None,
    "model.num_query_groups": None,
}
WIDE = {"parallelism.tensor_model_parallel_size": 4, "parallelism.sequence_parallel": False}
CONTEXT = {"parallelism.context_parallel_size": 2}
ALL_TO_ALL = CONTEXT | {"parallelism.cp_comm_type": "a2a"}
YARN = {"model.position_embedding_type": "yarn"}
YARN_LATENT = LATENT | {"model.multi_latent_attention.rope_type": "yarn"}
FUSED_ROTARY = {"training.kernels.apply_rope_fusion": True}
LOCAL = {
    "training.kernels.transformer_impl": "local",
    "training.kernels.persist_layer_norm": False,
    "parallelism.sequence_parallel": False,
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model.num_query_groups": 6}, "6 key-value heads cannot be shared evenly by 8 query heads"),
    (
        WIDE | {"model.num_attention_heads": 12, "model.num_query_groups": 6},
        "6 key-value heads are neither a multiple nor a divisor of tensor_model_parallel_size (4)",
    ),
    (WIDE | {"model.num_attention_heads": 6, "model.num_query_groups": 2}, "4 does not divide num_attention_heads (6)"),
    ({"model.kv_channels": 95, "training.kernels.attention_backend": "unfused"}, "turn pairs, and 95 is odd"),
    (LATENT | {"model.multi_latent_attention.qk_pos_emb_head_dim": 15}, "turn pairs, and 15 is odd"),
    (LATENT | {"model.attention_output_gate": True}, "multi-latent attention has no output gate"),
    (LATENT | {"training.kernels.apply_rope_fusion": True}, "turns YaRN positions alone"),
    (LATENT | {"model.position_embedding_type": "yarn"}, "multi-latent attention has its own positions"),
    (CONTEXT | YARN | {"model.original_max_position_embeddings": 1022}, "tables of 1022 rows into 4 chunks"),
    ({"training.kernels.attention_backend": "flash", "model.kv_channels": 100}, "a multiple of 8 elements up to 256"),
    (CONTEXT | {"training.kernels.attention_backend": "unfused"}, "unfused attention has no context parallelism"),
    ({"training.precision": "fp32", "training.kernels.attention_backend": "flash"}, "the flash kernel takes no fp32"),
    (CONTEXT | {"batch.seq_length": 254}, "254 cannot be cut into two equal parts for each of 2 ranks"),
    (ALL_TO_ALL | {"model.num_query_groups": 2}, "2 ranks cannot share the 1 of a tensor-parallel rank"),
    (
        ALL_TO_ALL | LATENT | {"model.num_attention_heads": 6, "model.hidden_size": 384},
        "2 ranks cannot share the 3 of a tensor-parallel rank",
    ),
    ({"training.gpu": "a100-80gb", "model.kv_channels": 192}, "a multiple of 8 elements up to 128, not 192"),
    ({"training.gpu": "gb200-186gb", "model.kv_channels": 192}, "a multiple of 8 elements up to 128, not 192"),
    (
        {"training.gpu": "a100-80gb", "training.kernels.deterministic_attention": True},
        "backward is deterministic from Hopper on",
    ),
    (
        {
            "training.gpu": "b200-180gb",
            "training.kernels.deterministic_attention": True,
            "model.attention_dropout": 0.1,
        },
        "deterministic backward has no attention_dropout",
    ),
    (
        {"training.kernels.deterministic_mode": True, "training.kernels.cross_entropy_fusion_impl": "native"},
        "the fused cross entropy is not deterministic",
    ),
    ({"batch.seq_length": 255}, "2 does not divide a rank's tokens under sequence_parallel (255)"),
    (
        {
            "batch.seq_length": 1,
            "batch.micro_batch_size": 1,
            "model.num_query_groups": 1,
            "parallelism.tensor_model_parallel_size": 1,
            "parallelism.sequence_parallel": False,
        },
        "no layout of a single token",
    ),
]
REFUSED += [
    (LOCAL | CONTEXT, "Megatron Core's own attention has no context parallelism"),
    (LOCAL | LATENT, "Megatron Core's own attention cannot be multi-latent"),
    (LOCAL | {"training.kernels.persist_layer_norm": True}, "RMSNorm is PyTorch's, which has no such kernel"),
    (LOCAL | {"parallelism.sequence_parallel": True}, "whose gradients are not reduced under sequence parallelism"),
    ({"training.software.apex": False}, "linears add up weight gradients with a kernel of APEX, and there is none"),
]
NOT_RUN: list[tuple[dict[str, Any], str]] = [
    (
        LOCAL | {"training.software.apex": False, "training.kernels.gradient_accumulation_fusion": False},
        "the kernel for mask and softmax is APEX's",
    ),
    ({"model.kv_channels": 100}, "the fused kernel takes heads of a multiple of 8 elements up to 256, not 100"),
    (YARN | FUSED_ROTARY, "turns YaRN's positions without a fused kernel"),
    (
        YARN_LATENT | FUSED_ROTARY | {"model.position_embedding_type": "none"},
        "only where position_embedding_type is rope",
    ),
    (YARN_LATENT | FUSED_ROTARY | {"model.multi_latent_attention.qk_head_dim": 48}, "powers of two, from 4 on, not 48"),
    ({"model.rotary_percent": 0.001}, "0.001 of a head of 64 elements is none"),
    (
        CONTEXT | {"training.kernels.attention_backend": "flash", "parallelism.cp_comm_type": "all_gather"},
        "flash with all_gather is not supported",
    ),
]
"""What compiled code refuses, or labkit alone."""
ACCEPTED: list[dict[str, Any]] = [
    LOCAL | {"training.kernels.attention_backend": "flash"},
    WIDE | {"model.num_query_groups": 2},
    WIDE | {"model.num_query_groups": 1, "model.attention_output_gate": True},
    {"model.rotary_percent": 0.4},
    {"model.kv_channels": 100, "training.kernels.attention_backend": "unfused"},
    {"model.kv_channels": 95, "model.position_embedding_type": "none", "training.kernels.attention_backend": "unfused"},
    {"batch.seq_length": 250, "training.kernels.attention_backend": "unfused"},
    LATENT | {"training.kernels.attention_backend": "flash"},
    ALL_TO_ALL,
    ALL_TO_ALL | LATENT,
    LATENT | {"model.position_embedding_type": "none"},
    YARN_LATENT | FUSED_ROTARY,
    CONTEXT | WIDE | {"parallelism.world_size": 8, "model.num_query_groups": 2},
]


def mapping(changes: dict[str, Any]) -> dict[str, Any]:
    """A one-layer relative of the grid's attention models."""
    data: dict[str, Any] = {section: dict(fields) for section, fields in attention.BASE.items()}
    data["model"] |= {"num_layers": 1, "kv_channels": 64}
    data["batch"] |= {"seq_length": 256}
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = data
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        target[last] = value
    return data


@pytest.mark.parametrize("changes", [changes for changes, _ in REFUSED])
def test_what_labkit_refuses_megatron_refuses(server: TraceServer, changes: dict[str, Any]) -> None:
    with pytest.raises(LabkitError):
        server.run(Workload.unchecked(mapping(changes)))


@pytest.mark.parametrize("changes", ACCEPTED)
def test_what_labkit_accepts_megatron_runs(server: TraceServer, changes: dict[str, Any]) -> None:
    server.run(Workload.from_mapping(mapping(changes)))


@pytest.mark.parametrize(("changes", "sentence"), [*REFUSED, *NOT_RUN])
def test_refusals_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        Workload.from_mapping(mapping(changes), source="w.yaml")
    message = str(raised.value)
    assert sentence in message
    assert message.startswith("w.yaml: ")
    assert "\n" not in message
