"""The model: its sizes, in Megatron Core's `TransformerConfig` vocabulary."""

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveInt

from labkit.workload.base import Many, Part

Mixer = Literal["attention", "mla", "gdn", "mamba"]
MlpKind = Literal["dense", "moe"]


class LayerKind(NamedTuple):
    """What one decoder layer is made of; layers of one kind hold the same bytes.

    A transformer layer has both; a layer of a hybrid pattern has one of them.
    """

    mixer: Mixer | None
    mlp: MlpKind | None


HYBRID_SYMBOLS: dict[str, LayerKind] = {
    "M": LayerKind("mamba", None),
    "G": LayerKind("gdn", None),
    "*": LayerKind("attention", None),
    "+": LayerKind("mla", None),
    "-": LayerKind(None, "dense"),
    "E": LayerKind(None, "moe"),
}
"""Megatron Core `models/hybrid/hybrid_layer_allocation.Symbols`."""


def _kinds(pattern: str) -> tuple[LayerKind, ...]:
    return tuple(HYBRID_SYMBOLS[symbol] for symbol in pattern)


class MultiLatentAttention(Part):
    """Sizes of multi-latent attention (Megatron Core `MLATransformerConfig`)."""

    q_lora_rank: PositiveInt | None = None
    """Width of the compressed query; None projects queries straight from the hidden state."""
    kv_lora_rank: PositiveInt
    """Width of the compressed key-value latent."""
    qk_head_dim: PositiveInt
    """Per-head width of the query and key parts without position."""
    qk_pos_emb_head_dim: PositiveInt
    """Per-head width of the query and key parts that carry rotary positions."""
    v_head_dim: PositiveInt
    """Per-head width of the values."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """How angles grow with positions; every layer keeps YaRN's tables of cosines and sines."""


class GatedDeltaNet(Part):
    """Sizes of gated delta net layers (`linear_*` of `TransformerConfig`, variant `gated_delta_net`)."""

    linear_attention_freq: PositiveInt | Many[Literal[0, 1]] | None = None
    """N: N-1 delta net layers, then one of attention; a list names each layer (1 delta net, 0 attention).

    None: a hybrid pattern names them.
    """
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32


class Mamba(Part):
    """Sizes of Mamba 2 layers (`mamba_*` of `TransformerConfig`)."""

    mamba_state_dim: PositiveInt = 128
    mamba_head_dim: PositiveInt = 64
    mamba_num_groups: PositiveInt = 8
    mamba_num_heads: PositiveInt | None = None
    """None: twice the hidden size over the head width."""


class MixtureOfExperts(Part):
    """Sizes and routing rule of the mixture-of-experts layers (`moe_*` of `TransformerConfig`)."""

    num_moe_experts: Annotated[int, Field(gt=0, le=4096)]
    moe_router_topk: PositiveInt
    moe_ffn_hidden_size: PositiveInt
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Total hidden width of the shared experts; None has no shared expert."""
    moe_shared_expert_gate: bool = False
    """The shared experts' output is scaled by a sigmoid of a projection of their input."""
    moe_latent_size: PositiveInt | None = None
    """Width the experts work in, between a projection down and one up; None: the hidden size."""
    moe_layer_freq: PositiveInt | Many[Literal[0, 1]] = 1
    """N: every N-th layer is MoE, starting at the first; a list names each layer (1 MoE, 0 dense)."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: PositiveInt | None = None
    moe_router_group_topk: PositiveInt | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_dtype: Literal["fp32"] | None = None
    """Dtype of routing and combination weights; None keeps the compute dtype."""
    moe_expert_capacity_factor: float | None = Field(default=None, gt=0.0, le=1e6)
    """An expert takes at most this times its even share of a rank's rows, the rest is dropped; None drops nothing."""
    moe_pad_expert_input_to_capacity: bool = False
    """Every expert gets exactly its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"


class Model(Part):
    """A decoder-only language model."""

    name: str = Field(min_length=1, max_length=200)
    num_layers: Annotated[int, Field(gt=0, le=2000)]
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    """Hidden width of the dense MLP layers."""
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt = 128
    """Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; None: as many as query heads."""
    kv_channels: PositiveInt | None = None
    """Width of a head; None: the hidden size over the query heads."""
    attention_output_gate: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    multi_latent_attention: MultiLatentAttention | None = None
    """Attention layers are of this kind where it is given."""
    gated_delta_net: GatedDeltaNet | None = None
    mamba: Mamba | None = None
    """Sizes of the `M` layers of `hybrid_layer_pattern`."""
    hybrid_layer_pattern: str | None = None
    """One symbol a layer (`HYBRID_SYMBOLS`), each a mixer or an MLP alone; None: transformer layers of both.

    `|` divides pipeline stages; what follows each `/` are the layers of one depth of multi-token prediction.
    """
    mixture_of_experts: MixtureOfExperts | None = None
    mtp_num_layers: Annotated[int, Field(gt=0, le=64)] | None = None
    """Multi-token prediction layers after the decoder."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    gated_linear_unit: bool = True
    activation_func: Literal["silu", "gelu", "squared_relu"] = "silu"
    add_bias_linear: bool = False
    untie_embeddings_and_output_weights: bool = True
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = "rope"
    original_max_position_embeddings: PositiveInt = 4096
    """Rows of YaRN's tables; its factors decide no memory."""
    rotary_base: PositiveInt = 10000
    rotary_percent: float = Field(default=1.0, gt=0.0, le=1.0)
    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each decoder layer, in order.

        Sources: Megatron Core `hybrid_layer_allocation`, `gpt_layer_specs.get_moe_layer_freq`,
        `experimental_attention_variant_module_specs.get_linear_attention_pattern`.
        """
        if self.hybrid_layer_pattern is not None:
            return _kinds("".join(self.pattern_stages))
        return tuple(map(LayerKind, self._mixers, self.mlp_kinds))

    @property
    def pattern_stages(self) -> tuple[str, ...]:
        """The decoder's part of the hybrid pattern as it is divided into pipeline stages, virtual ones included."""
        return tuple((self.hybrid_layer_pattern or "").split("/")[0].split("|"))

    @property
    def pattern_depths(self) -> tuple[str, ...]:
        """The hybrid pattern's part for each depth of multi-token prediction."""
        return tuple((self.hybrid_layer_pattern or "").split("/")[1:])

    @cached_property
    def prediction_layers(self) -> tuple[LayerKind, ...]:
        """The layers of one depth of multi-token prediction (`get_gpt_mtp_block_spec`, `MultiTokenPredictionLayer`)."""
        if self.mtp_num_layers is None:
            return ()
        if self.hybrid_layer_pattern is None:
            return self.layers[-1:]
        return _kinds(next(iter(self.pattern_depths), ""))  # without depths it is refused

    @cached_property
    def kinds(self) -> frozenset[LayerKind]:
        """The kinds of all layers, those of multi-token prediction included."""
        return frozenset((*self.layers, *self.prediction_layers))

    @property
    def _mixers(self) -> tuple[Mixer, ...]:
        attention: Mixer = "attention" if self.multi_latent_attention is None else "mla"
        if self.gated_delta_net is None:
            return (attention,) * self.num_layers
        frequency = self.gated_delta_net.linear_attention_freq or 1
        if isinstance(frequency, int):
            linear = [(layer + 1) % frequency != 0 for layer in range(self.num_layers)]
        else:
            linear = [flag == 1 for flag in frequency]
        return tuple("gdn" if flag else attention for flag in linear)

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """The MLP of each transformer layer, in order (Megatron Core `get_moe_layer_freq` semantics)."""
        kinds: tuple[MlpKind, MlpKind] = ("dense", "moe")
        if self.mixture_of_experts is None:
            return (kinds[False],) * self.num_layers
        frequency = self.mixture_of_experts.moe_layer_freq
        if isinstance(frequency, int):
            flags = [layer % frequency == 0 for layer in range(self.num_layers)]
        else:
            flags = [flag == 1 for flag in frequency]
        return tuple(kinds[flag] for flag in flags)

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer (`MambaMixer.__init__`: twice the hidden size in all, unless stated)."""
        if self.mamba is None:
            return 0
        return self.mamba.mamba_num_heads or 2 * self.hidden_size // self.mamba.mamba_head_dim

    @property
    def is_latent(self) -> bool:
        """Megatron's `--multi-latent-attention`, which a hybrid pattern's `+` implies."""
        return self.multi_latent_attention is not None or "+" in (self.hybrid_layer_pattern or "")

    @property
    def has_rotary_table(self) -> bool:
        """Whether the model, whatever its layers, makes one table of rotary angles (`GPTModel`, `HybridModel`)."""
        return self.turns_positions and self.multi_latent_attention is None

    @property
    def turns_positions(self) -> bool:
        """Whether its attention, unless it is latent, turns queries and keys by their positions."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def head_width(self) -> int:
        """Width of an attention head outside multi-latent attention."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def widest_head(self) -> int:
        """Width of an attention head's queries or values, whichever are wider."""
        mla = self.multi_latent_attention
        return self.head_width if mla is None else max(mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim)

    @property
    def rotary_width(self) -> int:
        """Elements of a head that rotary positions turn, in pairs (`RotaryEmbedding`): all in YaRN."""
        mla = self.multi_latent_attention
        width = self.head_width if mla is None else mla.qk_pos_emb_head_dim
        yarn = self.position_embedding_type if mla is None else mla.rope_type
        return -(-int(width * (1.0 if yarn == "yarn" else self.rotary_percent)) // 2) * 2

    @property
    def key_value_heads(self) -> int:
        """Key-value heads outside multi-latent attention."""
        return self.num_query_groups or self.num_attention_heads
