"""How many parameters an architecture has, by hand from what layers transformers 5.24 makes (`modeling_*.py`).

Nothing of labkit's: what is not among a configuration's keys is written out here.
"""

from typing import Any

type Config = dict[str, Any]


def parameters(config: Config) -> int:
    """Of the language model, without multi-token prediction and buffers."""
    if "text_config" in config:
        config = {"tie_word_embeddings": config["tie_word_embeddings"], **config["text_config"]}
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    ends = vocabulary * hidden * (1 if config["tie_word_embeddings"] else 2) + hidden
    if config["model_type"] == "nemotron_h":
        kinds = {"M": _mamba, "*": _attention, "-": _plain_mlp, "E": _nemotron_experts}
        return int(ends + sum(hidden + kinds[symbol](config) for symbol in config["hybrid_override_pattern"]))
    layers = range(config["num_hidden_layers"])
    return int(ends + sum(2 * hidden + _mixer(config, layer) + _mlp(config, layer) for layer in layers))


def _mixer(config: Config, layer: int) -> int:
    if "kv_lora_rank" in config:
        return _latent_attention(config)
    if "linear_num_value_heads" in config and (layer + 1) % 4:
        return _delta_net(config)
    return _attention(config)


def _attention(config: Config) -> int:
    """q_proj, k_proj, v_proj, o_proj, and what families add to them."""
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    width = config.get("head_dim") or config.get("attention_head_dim") or hidden // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    found = hidden * (2 * queries + 2 * keys)
    if kind.startswith("qwen2"):
        found += queries + 2 * keys  # biases of three
    if kind.startswith(("qwen3_next", "qwen3_5")):
        found += hidden * queries  # gates, a second half of q_proj
    if kind.startswith("qwen3"):
        found += 2 * width  # q_norm, k_norm
    if kind == "gpt_oss":
        found += queries + 2 * keys + hidden + heads  # biases of four, sinks
    return int(found)


def _latent_attention(config: Config) -> int:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank = config["q_lora_rank"]
    queries = heads * (plain + turned)
    found = hidden * queries if rank is None else hidden * rank + rank + rank * queries
    found += hidden * (latent + turned) + latent + latent * heads * (plain + values)
    return int(found + heads * values * hidden)


def _delta_net(config: Config) -> int:
    """in_proj of queries, keys, values, gates and two numbers a head; convolution, A_log, dt_bias, norm, out_proj."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    found = hidden * (2 * keys + 2 * values + 2 * heads) + config["linear_conv_kernel_dim"] * (2 * keys + values)
    return int(found + 2 * heads + config["linear_value_head_dim"] + values * hidden)


def _mamba(config: Config) -> int:
    """in_proj, convolution with bias, A_log, D, dt_bias, a norm, out_proj."""
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner, states = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    convolved = inner + 2 * states
    return int(hidden * (inner + convolved + heads) + 5 * convolved + 3 * heads + inner + inner * hidden)


def _plain_mlp(config: Config) -> int:
    return int(2 * config["hidden_size"] * config["intermediate_size"])


def _nemotron_experts(config: Config) -> int:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    latent = config.get("moe_latent_size")
    found = hidden * experts + 2 * hidden * config["moe_shared_expert_intermediate_size"]
    found += 2 * (latent or hidden) * config["moe_intermediate_size"] * experts
    return int(found + (2 * hidden * latent if latent else 0))


def _mlp(config: Config, layer: int) -> int:
    """gate_proj, up_proj and down_proj: one, or a router with one for each expert."""
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        return int(config["num_local_experts"] * hidden * (1 + 3 * config["intermediate_size"]))
    if kind == "gpt_oss":
        width = config["intermediate_size"]
        return int(config["num_local_experts"] * (hidden + 1 + 3 * hidden * width + 2 * width + hidden))
    experts = config.get("num_experts") or config.get("n_routed_experts")
    if experts is None or layer < config.get("first_k_dense_replace", 0):
        return int(3 * hidden * config["intermediate_size"])
    found = experts * hidden * (1 + 3 * config["moe_intermediate_size"])
    found += 3 * hidden * config["moe_intermediate_size"] * config.get("n_shared_experts", 0)
    if "shared_expert_intermediate_size" in config:
        found += 3 * hidden * config["shared_expert_intermediate_size"] + hidden  # and its gate
    return int(found)


def prediction_parameters(config: Config) -> int:
    """Of one layer of DeepSeek-V3's multi-token prediction: two norms, a projection, a layer, a norm."""
    hidden = config["hidden_size"]
    last = config["num_hidden_layers"] - 1
    return int(3 * hidden + 2 * hidden * hidden + 2 * hidden + _latent_attention(config) + _mlp(config, last))
