"""Multi-latent attention (Megatron Core `transformer/multi_latent_attention.py`, `MLASelfAttention`)."""

from labkit.memory.layers.core import core_attention
from labkit.memory.layers.inputs import sequence_ends
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters, replicated, row_parallel
from labkit.memory.layers.rotary import rotary, rotary_table, yarn_tables
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Model, Workload
from labkit.workload.model import MultiLatentAttention


def multi_latent_attention(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the normed hidden state (shard rows, hidden) to the attention output (shard rows, hidden)."""
    model, mla = workload.model, _latent_sizes(workload.model)
    heads = model.num_attention_heads // sizes.tp
    head_width = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    query_width = heads * head_width
    value_width = heads * mla.v_head_dim
    latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    _parameters(tape, model, sizes, query_width, value_width)

    rotary_table(tape, sizes, model.rotary_width)
    if mla.rope_type == "yarn":
        yarn_tables(tape, model.rotary_width, _table_rows(workload, sizes))
    compressed_query, query_input_width = hidden, model.hidden_size
    if mla.q_lora_rank is not None:
        with tape.module("linear_q_down_proj"):
            compressed_query = replicated(tape, sizes, hidden, model.hidden_size, mla.q_lora_rank)
        query_input_width = mla.q_lora_rank
    with tape.module("linear_kv_down_proj"):
        kv_combined = replicated(tape, sizes, hidden, model.hidden_size, latent)
    latent_view = tape.view(kv_combined, "kv_compressed", (sizes.shard, mla.kv_lora_rank))
    position_key = tape.view(kv_combined, "k_pos_emb", (sizes.shard, 1, mla.qk_pos_emb_head_dim))
    tape.op("split", [kv_combined], [latent_view, position_key])
    if sizes.sp > 1:
        shard_position_key = position_key
        position_key = tape.value("k_pos_emb", (sizes.tokens, 1, mla.qk_pos_emb_head_dim))
        tape.op("gather_from_sequence_parallel", [shard_position_key], [position_key])

    with tape.module("@qkv_up_proj"):
        query_name = "linear_q_proj" if mla.q_lora_rank is None else "linear_q_up_proj"
        with tape.module(query_name):
            query_input = compressed_query
            if model.qk_layernorm:
                query_input = norm(tape, model, compressed_query, sizes.shard, query_input_width)
            packed_query = column_parallel(tape, sizes, query_input, query_input_width, query_width)
        with tape.module("linear_kv_up_proj"):
            # Transformer Engine makes its strided input contiguous first.
            kv_input = tape.value("input", (sizes.shard, mla.kv_lora_rank))
            tape.op("contiguous", [latent_view], [kv_input], aliases=True)
            if model.qk_layernorm:
                kv_input = norm(tape, model, kv_input, sizes.shard, mla.kv_lora_rank)
            packed_kv = column_parallel(
                tape, sizes, kv_input, mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim)
            )
        query, key, value, held = _with_positions(tape, workload, sizes, packed_query, packed_kv, position_key)
        # Local variables of get_query_key_value_tensors live until it returns.
        tape.hold([packed_query, packed_kv, position_key, *held])

    core = _core(tape, workload, sizes, query, key, value)
    with tape.module("linear_proj"):
        output = row_parallel(tape, sizes, core, value_width)
    # Local variables of MultiLatentAttention.forward live until it returns.
    tape.hold([kv_combined, compressed_query, query, key, value, core])
    return output


def _with_positions(
    tape: Tape, workload: Workload, sizes: Sizes, packed_query: Value, packed_kv: Value, position_key: Value
) -> tuple[Value, Value, Value, list[Value]]:
    """Query, key, value (tokens, heads, width), and what variables hold besides."""
    mla, width = _latent_sizes(workload.model), workload.model.rotary_width
    heads = workload.model.num_attention_heads // sizes.tp
    wide = (sizes.tokens, heads, mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    narrow = (sizes.tokens, heads, mla.v_head_dim)
    if workload.training.kernels.apply_rope_fusion:
        # `ApplyMLARotaryEmbQ` turns in place, `ApplyMLARotaryEmbKV` writes both tensors anew.
        query = tape.view(packed_query, "query", wide)
        tape.op("rotate_in_place", [packed_query], [query], aliases=True, saves=sequence_ends(tape, sizes))
        key, value = tape.value("key", wide), tape.value("value", narrow)
        tape.op("rotate_keys", [packed_kv, position_key], [key, value], saves=sequence_ends(tape, sizes))
        return query, key, value, []
    query_content = tape.view(packed_query, "q_no_pe", (sizes.tokens, heads * mla.qk_head_dim))
    query_position = tape.view(packed_query, "q_pos_emb", (sizes.tokens, heads, mla.qk_pos_emb_head_dim))
    tape.op("split", [packed_query], [query_content, query_position])
    key_content = tape.view(packed_kv, "k_no_pe", (sizes.tokens, heads * mla.qk_head_dim))
    value_content = tape.view(packed_kv, "v", (sizes.tokens, heads * mla.v_head_dim))
    tape.op("split", [packed_kv], [key_content, value_content])
    rotated_query = rotary(tape, sizes, query_position, width, interleaved=True)
    rotated_key = rotary(tape, sizes, position_key, width, interleaved=True)
    query, key, value = (tape.value(name, shape) for name, shape in (("query", wide), ("key", wide), ("value", narrow)))
    tape.op("cat", [query_content, rotated_query], [query], aliases=True)
    tape.op("cat", [key_content, rotated_key], [key], aliases=True)
    tape.op("contiguous", [value_content], [value], aliases=True)
    return query, key, value, [rotated_query, rotated_key]


def _table_rows(workload: Workload, sizes: Sizes) -> int:
    """Rows of YaRN's tables: the original positions, or those that a fused kernel turns (`get_cached_cos_sin`)."""
    if not workload.training.kernels.apply_rope_fusion:
        return workload.model.original_max_position_embeddings // sizes.cp
    return sizes.longest if sizes.packed else sizes.sequence


def _core(tape: Tape, workload: Workload, sizes: Sizes, query: Value, key: Value, value: Value) -> Value:
    """The core attention; values of packed sequences are padded to the width of queries, and the output is trimmed.

    Source: `_prepare_mla_core_attention_value`, `_trim_mla_core_attention_output`.
    """
    tokens, heads, width = value.shape
    if not sizes.packed or query.shape == value.shape:
        with tape.module("core_attention"):
            return core_attention(tape, workload, sizes, query, key, value)
    with tape.module("core_attention"):
        padded = tape.value("value", query.shape)
        tape.op("pad", [value], [padded])
        whole = core_attention(tape, workload, sizes, query, key, padded)
        narrow = tape.view(whole, "output", (tokens, heads, width))
        tape.op("slice", [whole], [narrow])
    trimmed = tape.value("output", (tokens, heads * width))
    tape.op("reshape", [narrow], [trimmed], aliases=True)
    return trimmed


def _latent_sizes(model: Model) -> MultiLatentAttention:
    """The model's latent attention; only its layers ask."""
    if model.multi_latent_attention is None:
        raise ValueError("a latent attention layer needs multi_latent_attention")
    return model.multi_latent_attention


def _parameters(tape: Tape, model: Model, sizes: Sizes, query_width: int, value_width: int) -> None:
    """In the order `MultiLatentAttention` and `MLASelfAttention` register them."""
    mla, hidden = _latent_sizes(model), model.hidden_size
    replicated_here = sizes.sp > 1
    tape.parameter("linear_proj.weight", (hidden, value_width))
    if model.add_bias_linear:
        tape.parameter("linear_proj.bias", (hidden,), replicated=replicated_here)
    query_input = hidden
    query_name = "linear_q_proj"
    if mla.q_lora_rank is not None:
        tape.parameter("linear_q_down_proj.weight", (mla.q_lora_rank, hidden), replicated=replicated_here)
        query_input, query_name = mla.q_lora_rank, "linear_q_up_proj"
    if model.qk_layernorm:
        norm_parameters(tape, model, query_input, f"{query_name}.layer_norm_", replicated=sizes.sp > 1)
    tape.parameter(f"{query_name}.weight", (query_width, query_input))
    latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    tape.parameter("linear_kv_down_proj.weight", (latent, hidden), replicated=replicated_here)
    if model.qk_layernorm:
        norm_parameters(tape, model, mla.kv_lora_rank, "linear_kv_up_proj.layer_norm_", replicated=sizes.sp > 1)
    up_width = (model.num_attention_heads // sizes.tp) * (mla.qk_head_dim + mla.v_head_dim)
    tape.parameter("linear_kv_up_proj.weight", (up_width, mla.kv_lora_rank))
