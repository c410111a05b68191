"""Multi-latent attention (Megatron Core `transformer/multi_latent_attention.py`, `MLASelfAttention`)."""

from collections.abc import Sequence

from labkit.memory.layers.linear import column_parallel, replicated, rms_norm, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Model


def multi_latent_attention(tape: Tape, model: Model, sizes: Sizes, hidden: Value) -> Value:
    """From the normed hidden state (shard rows, hidden) to the attention output (shard rows, hidden)."""
    mla = model.multi_latent_attention
    heads = model.num_attention_heads // sizes.tp
    query_width = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    value_width = heads * mla.v_head_dim
    latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    _parameters(tape, model, sizes, query_width, value_width)

    rotary_table(tape, sizes.sequence, mla.qk_pos_emb_head_dim)
    compressed_query, query_input_width = hidden, model.hidden_size
    if mla.q_lora_rank is not None:
        with tape.module("linear_q_down_proj"):
            compressed_query = replicated(tape, sizes, hidden, model.hidden_size, mla.q_lora_rank)
        query_input_width = mla.q_lora_rank
    with tape.module("linear_kv_down_proj"):
        kv_combined = replicated(tape, sizes, hidden, model.hidden_size, latent)
    latent_view = tape.view(kv_combined, "kv_compressed", (sizes.shard, mla.kv_lora_rank))
    position_key = tape.view(kv_combined, "k_pos_emb", (sizes.shard, mla.qk_pos_emb_head_dim))
    tape.op("split", [kv_combined], [latent_view, position_key])
    if sizes.sp > 1:
        shard_position_key = position_key
        position_key = tape.value("k_pos_emb", (sizes.tokens, mla.qk_pos_emb_head_dim))
        tape.op("gather_from_sequence_parallel", [shard_position_key], [position_key])

    with tape.module("@qkv_up_proj"):
        query_name = "linear_q_proj" if mla.q_lora_rank is None else "linear_q_up_proj"
        with tape.module(query_name):
            query_input = compressed_query
            if model.qk_layernorm:
                query_input = rms_norm(tape, compressed_query, sizes.shard, query_input_width)
            packed_query = column_parallel(tape, sizes, query_input, query_input_width, query_width)
        with tape.module("linear_kv_up_proj"):
            # Transformer Engine makes its strided input contiguous first.
            kv_input = tape.value("input", (sizes.shard, mla.kv_lora_rank))
            tape.op("contiguous", [latent_view], [kv_input], aliases=True)
            if model.qk_layernorm:
                kv_input = rms_norm(tape, kv_input, sizes.shard, mla.kv_lora_rank)
            packed_kv = column_parallel(
                tape, sizes, kv_input, mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim)
            )
        query_content = tape.view(packed_query, "q_no_pe", (sizes.tokens, heads * mla.qk_head_dim))
        query_position = tape.view(packed_query, "q_pos_emb", (sizes.tokens, heads * mla.qk_pos_emb_head_dim))
        tape.op("split", [packed_query], [query_content, query_position])
        key_content = tape.view(packed_kv, "k_no_pe", (sizes.tokens, heads * mla.qk_head_dim))
        value_content = tape.view(packed_kv, "v", (sizes.tokens, value_width))
        tape.op("split", [packed_kv], [key_content, value_content])
        rotated_query = rotary(tape, sizes, query_position, heads, mla.qk_pos_emb_head_dim)
        rotated_key = rotary(tape, sizes, position_key, 1, mla.qk_pos_emb_head_dim)
        query = tape.value("query", (sizes.tokens, query_width))
        tape.op("cat", [query_content, rotated_query], [query], aliases=True)
        key = tape.value("key", (sizes.tokens, query_width))
        tape.op("cat", [key_content, rotated_key], [key], aliases=True)
        value = tape.value("value", (sizes.tokens, value_width))
        tape.op("contiguous", [value_content], [value], aliases=True)
        # Local variables of get_query_key_value_tensors live until it returns.
        tape.hold([packed_query, packed_kv, rotated_query, rotated_key, position_key])

    with tape.module("core_attention"):
        causal_flops = 2 * sizes.batch * sizes.sequence**2 * (query_width + value_width) // 2
        core = fused_attention(tape, sizes, [query, key, value], heads, value_width, causal_flops)
    with tape.module("linear_proj"):
        output = row_parallel(tape, sizes, core, value_width)
    tape.hold([kv_combined, compressed_query])
    return output


def _parameters(tape: Tape, model: Model, sizes: Sizes, query_width: int, value_width: int) -> None:
    """In the order `MultiLatentAttention` and `MLASelfAttention` register them."""
    mla, hidden = model.multi_latent_attention, model.hidden_size
    replicated_here = sizes.sp > 1
    tape.parameter("linear_proj.weight", (hidden, value_width))
    query_input = hidden
    query_name = "linear_q_proj"
    if mla.q_lora_rank is not None:
        tape.parameter("linear_q_down_proj.weight", (mla.q_lora_rank, hidden), replicated=replicated_here)
        query_input, query_name = mla.q_lora_rank, "linear_q_up_proj"
    if model.qk_layernorm:
        tape.parameter(f"{query_name}.layer_norm_weight", (query_input,), replicated=replicated_here)
    tape.parameter(f"{query_name}.weight", (query_width, query_input))
    latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    tape.parameter("linear_kv_down_proj.weight", (latent, hidden), replicated=replicated_here)
    if model.qk_layernorm:
        tape.parameter("linear_kv_up_proj.layer_norm_weight", (mla.kv_lora_rank,), replicated=replicated_here)
    up_width = (model.num_attention_heads // sizes.tp) * (mla.qk_head_dim + mla.v_head_dim)
    tape.parameter("linear_kv_up_proj.weight", (up_width, mla.kv_lora_rank))


def rotary_table(tape: Tape, sequence: int, width: int) -> None:
    """The table of angles (sequence, width) in fp32 that each layer's `RotaryEmbedding` caches at first use.

    `rotary_pos_embedding.py`: `@lru_cache(maxsize=32)` around a method, so one entry a layer, 32 in all.
    """
    with tape.module("rotary_pos_emb"):
        table = tape.value("angles", (sequence, width), "fp32", grad=False)
        tape.op("rotary_angles", [], [table], caches=32)


def rotary(tape: Tape, sizes: Sizes, packed: Value, heads: int, width: int) -> Value:
    """Unfused rotary embedding of a slice (tokens, heads, width) of `packed` (`rope_utils.py`).

    Saves cosine and sine (sequence, width) in the compute dtype; its temporaries are the interleaved copy, the rotated
    halves and the two products.
    """
    shape = (sizes.tokens, heads, width)
    cosine = tape.value("cos", (sizes.sequence, width), grad=False)
    sine = tape.value("sin", (sizes.sequence, width), grad=False)
    out = tape.value("rotated", shape)
    temporaries = [tape.buffer(name, shape) for name in ("interleaved", "half_rotated", "cos_product", "sin_product")]
    tape.op(
        "rotary",
        [packed],
        [out, cosine, sine],
        saves=[cosine, sine],
        temporaries=temporaries,
        backward_temporaries=temporaries[:3],
    )
    return out


def fused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], heads: int, value_width: int, flops: int) -> Value:
    """cuDNN fused attention (`transformer_engine` `FusedAttnFunc`): saves q, k, v, output, log-sum-exp, RNG state."""
    with tape.module("fused_attention"):
        out = tape.value("output", (sizes.tokens, value_width))
        statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence, 1), "fp32", grad=False)
        rng_state = tape.value("rng_state", (2,), "int64", grad=False)
        saves = [*qkv, out, statistics, rng_state]
        tape.op("fused_attention", qkv, [out, statistics, rng_state], saves=saves, flops=flops)
    return out
