"""Dense layers: activations with and without gate, bias and fusion; norms; dropout; whole and sharded rows."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "dense",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1792,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "qk_layernorm": True,
        "multi_latent_attention": {
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 32,
            "v_head_dim": 64,
        },
    },
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 8},
    "training": {},
}
EAGER = {"training.kernels.bias_activation_fusion": False}
ONE_RANK = {
    "parallelism.world_size": 1,
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.sequence_parallel": False,
}
WHOLE_ROWS = {"parallelism.sequence_parallel": False}
GELU = {"model.activation_func": "gelu"}
BIAS = {"model.add_bias_linear": True}
PLAIN = {"model.gated_linear_unit": False}
SQUARED_RELU = PLAIN | EAGER | {"model.activation_func": "squared_relu"}
LAYER_NORM = {"model.normalization": "LayerNorm"}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
DROPOUT_EAGER = DROPOUT | {"training.kernels.bias_dropout_fusion": False}

CHANGES: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu, mlp": {"labels": ["mlp"]},
    "swiglu, full": {"full": ("uniform", 1)},
    "swiglu, one rank": ONE_RANK,
    "swiglu, whole rows": WHOLE_ROWS,
    "swiglu eager": EAGER,
    "swiglu eager, mlp": EAGER | {"labels": ["mlp"]},
    "swiglu eager, bias": EAGER | BIAS,
    "swiglu, bias": BIAS,
    "geglu": GELU,
    "geglu, bias, whole rows": GELU | BIAS | WHOLE_ROWS,
    "geglu eager, bias, full": GELU | BIAS | EAGER | {"full": ("block", 2)},
    "gelu, bias": GELU | PLAIN | BIAS,
    "gelu eager": GELU | PLAIN | EAGER,
    "gelu eager, bias, whole rows": GELU | PLAIN | EAGER | BIAS | WHOLE_ROWS,
    "silu eager without gate": PLAIN | EAGER,
    "squared relu": SQUARED_RELU,
    "squared relu, mlp": SQUARED_RELU | {"labels": ["mlp"]},
    "squared relu, one rank": SQUARED_RELU | ONE_RANK,
    "squared relu with gate": SQUARED_RELU | {"model.gated_linear_unit": True},
    "layer norm": LAYER_NORM,
    "layer norm, layernorm": LAYER_NORM | {"labels": ["layernorm"]},
    "layer norm, full": LAYER_NORM | {"full": ("uniform", 2)},
    "layer norm, one rank": LAYER_NORM | ONE_RANK,
    "dropout": DROPOUT,
    "dropout, bias": DROPOUT | BIAS,
    "dropout, mlp": DROPOUT | {"labels": ["mlp", "layernorm", "mla_up_proj"]},
    "dropout, full": DROPOUT | {"full": ("uniform", 1)},
    "dropout, whole rows": DROPOUT | WHOLE_ROWS,
    "dropout eager": DROPOUT_EAGER,
    "dropout eager, bias": DROPOUT_EAGER | BIAS,
    "no dropout, bias, unfused": BIAS | {"training.kernels.bias_dropout_fusion": False},
    "gpt": GELU | PLAIN | BIAS | LAYER_NORM | DROPOUT,
    "gpt, full": GELU | PLAIN | BIAS | LAYER_NORM | DROPOUT | {"full": ("uniform", 1)},
}
