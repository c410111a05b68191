"""Embedding, head and loss: learned positions, tied weights, dropout, every cross entropy; GPT-like models whole."""

from typing import Any

from tests.memory.grid import mlp

BASE: dict[str, Any] = {
    **mlp.BASE,
    "model": {**mlp.BASE["model"], "num_layers": 2, "vocab_size": 5000},
}
ONE_RANK, WHOLE_ROWS, ONE_SEQUENCE = mlp.ONE_RANK, mlp.WHOLE_ROWS, {"batch.micro_batch_size": 1}
LEARNED = {"model.position_embedding_type": "learned_absolute"}
TIED = {"model.untie_embeddings_and_output_weights": False}
NATIVE = {"training.kernels.cross_entropy_fusion_impl": "native"}
MTP = {"model.mtp_num_layers": 1}
NO_FUSION = {"training.kernels.gradient_accumulation_fusion": False}
EAGER = {"training.kernels.cross_entropy_loss_fusion": False}
GPT = (
    mlp.GELU
    | mlp.PLAIN
    | mlp.BIAS
    | mlp.LAYER_NORM
    | mlp.DROPOUT
    | LEARNED
    | TIED
    | {
        "model.multi_latent_attention": None,
        "model.qk_layernorm": False,
    }
)

CHANGES: dict[str, dict[str, Any]] = {
    "fused loss of Transformer Engine": {},
    "fused loss of Transformer Engine, one rank": ONE_RANK,
    "native loss": NATIVE,
    "native loss, one rank": NATIVE | ONE_RANK,
    "native loss, one sequence, full": NATIVE | ONE_SEQUENCE | {"full": ("uniform", 1)},
    "eager loss": EAGER,
    "eager loss, one rank": EAGER | ONE_RANK,
    "eager loss, whole rows, mlp": EAGER | WHOLE_ROWS | {"labels": ["mlp"]},
    "learned positions": LEARNED,
    "learned positions, one rank, one sequence": LEARNED | ONE_RANK | ONE_SEQUENCE,
    "learned positions, whole rows": LEARNED | WHOLE_ROWS,
    "learned positions, dropout": LEARNED | mlp.DROPOUT,
    "learned positions, dropout, one rank": LEARNED | mlp.DROPOUT | ONE_RANK,
    "dropout, whole rows, one sequence": mlp.DROPOUT | WHOLE_ROWS | ONE_SEQUENCE,
    "gpt": GPT,
    "gpt, native": GPT | NATIVE,
    "gpt, eager, one rank": GPT | EAGER | ONE_RANK,
    "gpt, whole rows": GPT | WHOLE_ROWS,
    "gpt, full": GPT | {"full": ("uniform", 1)},
    "gpt, block": GPT | {"full": ("block", 1)},
    "shared weight, no fusion": TIED | NO_FUSION,
    "prediction": MTP,
    "prediction, one rank": MTP | ONE_RANK,
    "prediction, whole rows": MTP | WHOLE_ROWS,
    "prediction of two tokens": MTP | {"model.mtp_num_layers": 2},
    "prediction, shared weight": MTP | TIED,
    "prediction, shared weight, no fusion": MTP | TIED | NO_FUSION,
    "prediction, no fusion": MTP | NO_FUSION,
    "prediction, native": MTP | NATIVE,
    "prediction, labels": MTP | {"labels": ["mlp", "mla_up_proj", "layernorm"]},
    "prediction, full": MTP | {"full": ("uniform", 1)},
    "prediction, block": MTP | {"full": ("block", 1)},
    "gpt, prediction": GPT | MTP | {"model.position_embedding_type": "rope"},
    "context parallel, eager loss": EAGER | {"parallelism.context_parallel_size": 2},
}
