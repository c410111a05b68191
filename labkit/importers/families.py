"""Hugging Face's model families as fields of a `Model`.

Keys, their defaults and what layers are made of them: `configuration_*.py` and `modeling_*.py` of transformers 5.24.
What Megatron makes of a family: `models/*/..._bridge.py` of Megatron Bridge 0.6.2. Layers that Megatron Core lacks in
this version of labkit become notes.
"""

from collections.abc import Callable
from typing import Any

from labkit.errors import InputError, nearest
from labkit.importers.keys import Keys

type Fields = dict[str, Any]

_MOST_LAYERS = 2000
WINDOW = "taken as attention to everything before"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu2": "squared_relu",
}
_SCALINGS_WITHOUT_TABLES = frozenset("default linear dynamic llama3 longrope su mrope proportional".split())
"""Ways to scale rotary positions that change angles alone, not what is kept."""
_BLOCKS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Nemotron-H's layers as a hybrid pattern of Megatron's (`NemotronHConfig._pattern_to_list`)."""
_LAYER_TYPES = ("full_attention", "linear_attention", "sliding_attention")
_MAMBA_CONVOLUTION, _MAMBA_CHUNK = 4, 128
"""`MambaMixer.__init__` of Megatron Core: d_conv, chunk_size."""

_HARMLESS = frozenset(
    """
    architectures auto_map model_type _name_or_path transformers_version torch_dtype dtype id2label label2id use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id image_token_id
    video_token_id audio_token_id vision_start_token_id vision_end_token_id vision_token_id tokenizer_class
    initializer_range rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps max_position_embeddings pretraining_tp
    max_window_layers rope_theta rope_interleave rope_scaling rope_parameters rope_traditional use_mrope
    output_router_logits router_jitter_noise output_attentions output_hidden_states return_dict use_return_dict
    chunk_size_feed_forward problem_type task_specific_params is_encoder_decoder is_decoder add_cross_attention
    ep_size num_logits_to_keep time_step_floor time_step_limit time_step_max time_step_min time_step_rank
    rescale_prenorm_residual use_mamba_kernels mamba_ssm_cache_dtype mamba_ssm_dtype expand initial_context_length
    experts_per_token mtp_use_dedicated_embeddings moe_shared_expert_overlap unsloth_fixed unsloth_version
    attn_implementation _attn_implementation _attn_implementation_autoset keep_mtp_spec_in_bf16
    mtp_loss_scaling_factor swiglu_alpha norm_topk_prob num_experts_per_tok torchscript use_bfloat16
    quantization_config bad_words_ids begin_suppress_tokens cross_attention_hidden_size diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix pruned_heads remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature tf_legacy_loss tie_encoder_decoder top_k top_p typical_p
    """.split()
)
"""Keys that change nothing that is kept, in any of these families, or that a family reads where it does."""


class Section:
    """The fields of a model, in the making, and what they leave out."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.kind = keys.text("model_type")
        self.model: Fields = {}
        self.kernels: Fields = {}
        """Of the training set-up: without them Megatron refuses the model."""
        self.launch: dict[str, str] = {}
        """Arguments of Megatron-LM that say what no field does, which a trace runs, and how an estimate takes them."""
        self.not_expressed: list[str] = []
        self.assumed: list[str] = []
        self.differences: list[tuple[int, str]] = []
        """Parameters that the published weights have beyond Megatron's, or lack, and what they are."""

    def lose(self, name: str, meaning: str) -> None:
        """Name a key whose value no field expresses."""
        self.not_expressed.append(f"{self.keys.named(name)}: {meaning}")

    def only(self, name: str, value: object, meaning: str) -> None:
        """Name a key unless it is missing or has the one value that needs no field."""
        if self.keys.plain(name, value) != value:
            self.lose(name, meaning)


def section(keys: Keys) -> Section:
    """The model that a configuration describes.

    Raises:
        InputError: a family that labkit does not know, or a key that is missing or of another type.
    """
    found = Section(keys)
    kind = found.kind
    family = _FAMILIES.get(_ALIASES.get(kind, kind))
    if family is None:
        raise InputError(f"{keys.source}: model_type {kind[:80]!r} is not known here{nearest(kind[:80], FAMILIES)}")
    family(found)
    found.model = _finished(found)
    found.not_expressed += keys.unknown(_HARMLESS)
    return found


def _finished(found: Section) -> Fields:
    """The fields that say something; the width of dense layers is that of experts where there are none."""
    model, experts = found.model, found.model.get("mixture_of_experts", {})
    pattern, frequency = model.get("hybrid_layer_pattern"), experts.get("moe_layer_freq", [1])
    if 0 not in frequency:
        experts.pop("moe_layer_freq", None)
    if 1 not in frequency:
        del model["mixture_of_experts"]
    if "mixture_of_experts" in model and 0 not in frequency and "-" not in (pattern or ""):
        model["ffn_hidden_size"] = experts["moe_ffn_hidden_size"]
    elif model["ffn_hidden_size"] is None:
        raise InputError(f"{found.keys.source}: intermediate_size is missing")
    return {name: _stated(value) for name, value in model.items() if value is not None}


def _stated(value: Any) -> Any:
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def _decoder(found: Section, *, activation: str = "hidden_act", layers: int | None = None) -> None:
    """What all families have; `layers` where another key names them, without positions then."""
    keys = found.keys
    found.model |= {
        "num_layers": layers or keys.integer("num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": keys.integer("hidden_size"),
        "ffn_hidden_size": keys.optional_integer("intermediate_size"),
        "num_attention_heads": keys.integer("num_attention_heads"),
        "vocab_size": keys.integer("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.flag("tie_word_embeddings", False),
        "activation_func": _activation(found, activation),
        "attention_dropout": keys.number("attention_dropout", 0.0, most=1.0) or None,
    }
    if layers is None:
        found.model |= _positions(found)


def _activation(found: Section, key: str) -> str | None:
    name = found.keys.text(key, "silu")
    if name not in _ACTIVATIONS:
        found.lose(key, "taken as silu")
    activation = _ACTIVATIONS.get(name, "silu")
    return None if activation == "silu" else activation


def _positions(found: Section) -> Fields:
    """Rotary positions: keys of their own, or in `rope_parameters` (transformers 5) or `rope_scaling`."""
    keys = found.keys
    scaling = keys.part("rope_parameters") if "rope_parameters" in keys else keys.part("rope_scaling")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    base = (scaling if "rope_theta" in scaling else keys).number("rope_theta", 10000.0)
    share = keys.number("partial_rotary_factor", 1.0, most=1.0)
    share = scaling.number("partial_rotary_factor", share, most=1.0)
    fields: Fields = {"rotary_base": max(1, round(base)), "rotary_percent": share if share < 1.0 else None}
    if kind == "yarn":
        fields["position_embedding_type"] = "yarn"
        fields["original_max_position_embeddings"] = scaling.integer("original_max_position_embeddings", 4096)
    elif kind not in _SCALINGS_WITHOUT_TABLES:
        found.not_expressed.append(f"rope type {kind[:80]!r}: labkit does not know it; taken as plain rotary positions")
    return fields


def _attention(found: Section, *, normed: bool = False, bias: bool | None = None) -> None:
    """Multi-head or grouped-query attention; `bias` of queries, keys and values where no key says it."""
    keys, model = found.keys, found.model
    groups = keys.optional_integer("num_key_value_heads")
    model |= {
        "num_query_groups": None if groups == model["num_attention_heads"] else groups,
        "kv_channels": keys.optional_integer("head_dim"),
        "qk_layernorm": normed or None,
    }
    if bias is not None:
        model["add_qkv_bias"] = bias or None
        return
    if keys.flag("attention_bias", False):
        model["add_qkv_bias"] = True
        if not model.get("add_bias_linear"):
            found.lose("attention_bias", "no bias of the attention output, which Megatron has with all others alone")
            found.differences.append((_vectors(found), "biases of the attention output"))


def _vectors(found: Section) -> int:
    """Elements of a vector as wide as the hidden state in each layer of attention."""
    model = found.model
    pattern = model.get("hybrid_layer_pattern")
    layers: int = model["num_layers"] if pattern is None else pattern.count("*")
    return layers * int(model["hidden_size"])


def _window(found: Section) -> None:
    """Sliding windows in every layer."""
    keys = found.keys
    width, on = keys.optional_integer("sliding_window"), keys.flag("use_sliding_window", True)
    if width is not None and on:
        found.launch[f"--window-size {width - 1},0"] = WINDOW


def _dense_biases(found: Section) -> None:
    """Llama's two switches, which Megatron has one for."""
    keys = found.keys
    if keys.flag("mlp_bias", False):
        found.model["add_bias_linear"] = True
        if not keys.flag("attention_bias", False):
            found.lose("mlp_bias", "taken with biases of attention too, which Megatron does not leave out beside it")


def _llama(found: Section) -> None:
    _decoder(found)
    _dense_biases(found)
    _attention(found)
    _window(found)


def _qwen2(found: Section) -> None:
    _decoder(found)
    _attention(found, bias=True)
    _layer_windows(found)


def _layer_windows(found: Section) -> None:
    """Windows that `use_sliding_window` turns on, or that layers name themselves."""
    keys = found.keys
    width, on = keys.plain("sliding_window"), keys.flag("use_sliding_window", False)
    if width is not None and on:
        found.lose("sliding_window", WINDOW)
    if "sliding_attention" in keys.texts("layer_types", _LAYER_TYPES):
        found.lose("layer_types", WINDOW)


def _qwen3(found: Section) -> None:
    _decoder(found)
    _attention(found, normed=True)
    _layer_windows(found)


def _qwen2_moe(found: Section) -> None:
    _decoder(found)
    _attention(found, bias=found.keys.flag("qkv_bias", True))
    _layer_windows(found)
    _qwen_experts(found, shared=True, normed=False)


def _qwen3_moe(found: Section) -> None:
    _qwen3(found)
    found.only("qkv_bias", False, "taken without")
    found.only("use_qk_norm", True, "taken with norms")
    found.only("shared_expert_intermediate_size", 0, "taken without a shared expert")
    _qwen_experts(found, shared=False, normed=False)


def _qwen_experts(found: Section, *, shared: bool, normed: bool) -> None:
    """Experts in the layers that two keys leave; a shared one has a gate. `normed` where no key says it."""
    keys, model = found.keys, found.model
    layers, step = model["num_layers"], keys.integer("decoder_sparse_step", 1)
    dense = set(keys.integers("mlp_only_layers", most=layers))
    model["mixture_of_experts"] = {
        "num_moe_experts": keys.integer("num_experts"),
        "moe_router_topk": keys.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": keys.integer("moe_intermediate_size"),
        "moe_router_pre_softmax": _pre_softmax(found, normed=keys.flag("norm_topk_prob", normed)),
        "moe_layer_freq": [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)],
        **_auxiliary_loss(found),
    }
    if shared:
        width = keys.integer("shared_expert_intermediate_size")
        model["mixture_of_experts"] |= {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}


def _pre_softmax(found: Section, *, normed: bool) -> bool | None:
    """Softmax over all experts, and not over the chosen ones; for one that is chosen Megatron knows nothing else."""
    return True if not normed or found.keys.integer("num_experts_per_tok") == 1 else None


def _auxiliary_loss(found: Section, key: str = "router_aux_loss_coef") -> Fields:
    weight = found.keys.number(key, 0.001)
    return {"moe_aux_loss_coeff": weight} if weight else {"moe_router_load_balancing_type": "none"}


def _delta_net(found: Section) -> None:
    """Three layers of gated delta net, then one of gated attention, or as `layer_types` has it."""
    keys, model = found.keys, found.model
    model["attention_output_gate"] = keys.flag("attn_output_gate", True)
    interval = keys.integer("full_attention_interval", 4, most=_MOST_LAYERS)
    named = "layer_types" in keys
    types = keys.texts(
        "layer_types", ("full_attention", "linear_attention"), length=model["num_layers"] if named else 0
    )
    linear = [int(each == "linear_attention") for each in types]
    regular = [int((layer + 1) % interval != 0) for layer in range(model["num_layers"])]
    model["gated_delta_net"] = {
        "linear_attention_freq": interval if linear in ([], regular) else linear,
        "linear_conv_kernel_dim": keys.integer("linear_conv_kernel_dim", 4),
        "linear_key_head_dim": keys.integer("linear_key_head_dim", 128),
        "linear_value_head_dim": keys.integer("linear_value_head_dim", 128),
        "linear_num_key_heads": keys.integer("linear_num_key_heads", 16),
        "linear_num_value_heads": keys.integer("linear_num_value_heads", 32),
    }


def _prediction(found: Section, key: str) -> None:
    """Layers of multi-token prediction, which Megatron Bridge trains along where a configuration has them."""
    depths = found.keys.integer(key, 0, least=0, most=64)
    if depths:
        found.model["mtp_num_layers"] = depths
        found.assumed.append(
            f"{key} {depths}: multi-token prediction is trained along, as in Megatron Bridge; where it is not, take "
            "out mtp_num_layers, and what follows / in a hybrid_layer_pattern"
        )


def _qwen3_next(found: Section) -> None:
    _decoder(found)
    found.model["rotary_percent"] = found.model["rotary_percent"] or _quarter(found)
    _attention(found, normed=True)
    found.keys.plain("use_sliding_window")  # of the family it is derived from
    _delta_net(found)
    _prediction(found, "mtp_num_hidden_layers")
    found.only("output_gate_type", "swish", "labkit does not know it")
    found.keys.plain("mlp_only_layers")  # of experts, if there are any


def _quarter(found: Section) -> float | None:
    """The share of a head that these families turn where no key says it."""
    keys = found.keys
    said = "partial_rotary_factor" in keys or "partial_rotary_factor" in keys.part("rope_parameters")
    return None if said or "partial_rotary_factor" in keys.part("rope_scaling") else 0.25


def _qwen3_next_moe(found: Section) -> None:
    _qwen3_next(found)
    _qwen_experts(found, shared=True, normed=True)


def _mixtral(found: Section) -> None:
    _decoder(found)
    _attention(found, bias=False)
    _window(found)
    keys = found.keys
    found.model["mixture_of_experts"] = {
        "num_moe_experts": keys.integer("num_local_experts", 8),
        "moe_router_topk": keys.integer("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": keys.integer("intermediate_size"),
        "moe_router_pre_softmax": _pre_softmax(found, normed=True),
        **_auxiliary_loss(found),
    }


def _gpt_oss(found: Section) -> None:
    keys = found.keys
    _decoder(found)
    found.model["add_bias_linear"] = True
    found.kernels["bias_dropout_fusion"] = False
    found.only("attention_bias", True, "taken with biases, which its experts have")
    _attention(found, bias=False)
    model = found.model
    found.lose(
        "hidden_act", "with swiglu_limit it is Megatron's clamped quick_gelu; taken as silu, which keeps the same"
    )
    keys.plain("swiglu_limit")
    sinks = model["num_layers"] * model["num_attention_heads"]
    found.launch["--softmax-type learnable"] = "attention sinks, one number a head; taken as none"
    found.differences.append((sinks, "attention sinks"))
    _alternating_windows(found)
    model["mixture_of_experts"] = {
        "num_moe_experts": keys.integer("num_local_experts"),
        "moe_router_topk": keys.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": keys.integer("intermediate_size"),
        "moe_router_load_balancing_type": "none",
    }
    keys.plain("router_aux_loss_coef")


def _alternating_windows(found: Section) -> None:
    """Sliding windows in every other layer, from the first."""
    keys, layers = found.keys, found.model["num_layers"]
    types = keys.texts("layer_types", _LAYER_TYPES)
    pair = ("sliding_attention", "full_attention")
    if keys.plain("sliding_window") is None:
        return
    if types in ([], [pair[layer % 2] for layer in range(layers)]):
        _window(found)
        found.launch["--window-attn-skip-freq 2"] = WINDOW
    else:
        found.lose("sliding_window", WINDOW)


def _latent(found: Section) -> None:
    """Multi-latent attention, with norms of the compressed queries and keys; its positions are its own."""
    keys, model = found.keys, found.model
    yarn = model.pop("position_embedding_type", "rope") == "yarn"
    model["qk_layernorm"] = True
    model["multi_latent_attention"] = {
        "q_lora_rank": keys.optional_integer("q_lora_rank"),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_head_dim": keys.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": keys.integer("qk_rope_head_dim"),
        "v_head_dim": keys.integer("v_head_dim"),
        "rope_type": "yarn" if yarn else None,
    }
    if "q_lora_rank" not in keys:
        # `QKNormConfigResolver` of Megatron Core 0.19: `linear_q_proj` is then one with a norm.
        found.differences.append((-_vectors(found), "norms before queries that are not compressed"))
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim", "partial_rotary_factor"):
        keys.plain(key)  # of keys and values that are compressed, or sums of the above
    found.only("attention_bias", False, "no biases of the compressions")
    found.only("mlp_bias", False, "no biases of MLPs")


def _deepseek_v2(found: Section) -> None:
    _decoder(found)
    _latent(found)
    method = found.keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    _deepseek_experts(found, score="softmax", grouped=method == "group_limited_greedy")


def _deepseek_v3(found: Section) -> None:
    _decoder(found)
    _latent(found)
    method = found.keys.choice("topk_method", ("noaux_tc", "greedy", "group_limited_greedy"), "noaux_tc")
    _deepseek_experts(found, score="sigmoid", grouped=method != "greedy")
    if method == "noaux_tc":
        found.model["mixture_of_experts"]["moe_router_enable_expert_bias"] = True
    _prediction(found, "num_nextn_predict_layers")


def _deepseek_experts(found: Section, *, score: str, grouped: bool) -> None:
    """Dense layers first, then experts in every `moe_layer_freq`-th; shared ones add up to one MLP."""
    keys, model = found.keys, found.model
    layers, dense = model["num_layers"], keys.integer("first_k_dense_replace", 0, least=0, most=_MOST_LAYERS)
    frequency = keys.integer("moe_layer_freq", 1, most=_MOST_LAYERS)
    score = keys.choice("scoring_func", ("softmax", "sigmoid"), score)
    width, shared = keys.integer("moe_intermediate_size"), keys.integer("n_shared_experts", 0, least=0, most=4096)
    normed = keys.flag("norm_topk_prob", False)
    scale = keys.number("routed_scaling_factor", 1.0)
    model["mixture_of_experts"] = {
        "num_moe_experts": keys.integer("n_routed_experts"),
        "moe_router_topk": keys.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * shared or None,
        "moe_layer_freq": [int(layer >= dense and layer % frequency == 0) for layer in range(layers)],
        "moe_router_score_function": None if score == "softmax" else score,
        # Megatron Bridge sets it for sigmoid scores too, which are computed of all experts in any case.
        "moe_router_pre_softmax": True if score == "sigmoid" else _pre_softmax(found, normed=normed),
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        **_groups(found, grouped=grouped),
        "moe_router_load_balancing_type": "seq_aux_loss" if keys.flag("seq_aux", True) else "aux_loss",
        # Published configurations leave it out; Megatron Bridge takes 1e-4 then.
        "moe_aux_loss_coeff": keys.number("aux_loss_alpha", 0.0001),
        "moe_router_dtype": "fp32",  # `DeepseekV3TopkRouter.forward`, `DeepseekV2Gate`: weights and tokens in fp32
    }


def _groups(found: Section, *, grouped: bool) -> Fields:
    """Groups of experts that a token chooses from first."""
    groups, chosen = found.keys.optional_integer("n_group"), found.keys.optional_integer("topk_group")
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if grouped and groups and chosen else {}


def _nemotron_h(found: Section) -> None:
    """Mamba, attention, MLPs and experts as single layers; no positions."""
    keys, model = found.keys, found.model
    pattern = _pattern(found)
    _decoder(found, activation="mlp_hidden_act", layers=len(pattern))
    model["hybrid_layer_pattern"] = pattern
    model["position_embedding_type"] = "none"
    model["gated_linear_unit"] = False
    model["hidden_dropout"] = keys.number("hidden_dropout", 0.0, most=1.0) or None
    if model["activation_func"] == "squared_relu":
        found.kernels["bias_activation_fusion"] = False
    keys.plain("partial_rotary_factor")  # of attention that turns nothing
    _attention(found)
    model["kv_channels"] = model["kv_channels"] or keys.optional_integer("attention_head_dim") or 128
    if "M" in pattern:
        _mamba(found)
    if "E" in pattern:
        _nemotron_experts(found)
    _window(found)
    found.only("residual_in_fp32", False, "residuals in fp32; taken as bf16")
    found.only("use_bias", False, "no biases")
    found.only("mlp_bias", False, "no biases of MLPs")
    _nemotron_prediction(found)


def _pattern(found: Section) -> str:
    """The layers, as one text or one by one."""
    keys = found.keys
    keys.plain("num_hidden_layers")
    for key in ("layers_block_type", "layer_types"):
        if key in keys:
            return "".join(_BLOCKS[each] for each in keys.texts(key, _BLOCKS)[: _MOST_LAYERS + 1])
    return _symbols(keys, "hybrid_override_pattern")


def _symbols(keys: Keys, key: str) -> str:
    pattern = keys.text(key)
    if not pattern or len(pattern) > _MOST_LAYERS or set(pattern) - set(_BLOCKS.values()):
        raise InputError(f"{keys.source}: {key}: should be at most {_MOST_LAYERS} of the symbols M * - E")
    return pattern


def _mamba(found: Section) -> None:
    keys = found.keys
    found.model["mamba"] = {
        "mamba_state_dim": keys.integer("ssm_state_size", 128),
        "mamba_head_dim": keys.integer("mamba_head_dim", 64),
        "mamba_num_groups": keys.integer("n_groups", 8),
        "mamba_num_heads": keys.integer("mamba_num_heads", 128),
    }
    found.only("conv_kernel", _MAMBA_CONVOLUTION, f"Megatron's convolutions have {_MAMBA_CONVOLUTION}")
    found.only("chunk_size", _MAMBA_CHUNK, f"states of chunks; taken as {_MAMBA_CHUNK}")
    found.only("use_conv_bias", True, "taken with a bias")
    found.only("mamba_proj_bias", False, "taken without a bias")
    found.only("mamba_hidden_act", "silu", "taken as silu")


def _nemotron_experts(found: Section) -> None:
    keys = found.keys
    shared = keys.integer("n_shared_experts", 1, least=0, most=4096)
    width = keys.optional_integer("moe_shared_expert_intermediate_size", least=0)
    keys.plain("norm_topk_prob")
    found.model["mixture_of_experts"] = {
        "num_moe_experts": keys.integer("n_routed_experts"),
        "moe_router_topk": keys.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": keys.integer("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": width if shared and width else None,
        "moe_latent_size": keys.optional_integer("moe_latent_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": keys.number("routed_scaling_factor", 1.0),
        **_groups(found, grouped=True),
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.0001,
        "moe_router_dtype": "fp32",
    }


def _nemotron_prediction(found: Section) -> None:
    keys, key = found.keys, "mtp_layers_block_type"
    _prediction(found, "num_nextn_predict_layers")
    listed = "".join(_BLOCKS[each] for each in keys.texts(key, _BLOCKS)[:_MOST_LAYERS])
    one = listed or (_symbols(keys, "mtp_hybrid_override_pattern") if "mtp_hybrid_override_pattern" in keys else "*E")
    found.model["hybrid_layer_pattern"] += f"/{one}" * found.model.get("mtp_num_layers", 0)
    if found.model.get("mtp_num_layers", 0) > 1 and keys.flag("mtp_use_repeated_layer", True):
        found.lose("num_nextn_predict_layers", "depths that share their weights; taken as layers of their own")
    keys.plain("mtp_use_repeated_layer")


_FAMILIES: dict[str, Callable[[Section], None]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next_moe,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "nemotron_h": _nemotron_h,
    "gpt_oss": _gpt_oss,
}
_ALIASES = {
    "kimi_k2": "deepseek_v3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Other names of `model_type` for the same layers."""
FAMILIES = (*_FAMILIES, *_ALIASES)
