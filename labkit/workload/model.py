"""The model: its sizes, in Megatron Core's `TransformerConfig` vocabulary."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from labkit.workload.base import Many, Part

MlpKind = Literal["dense", "moe"]


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


class MixtureOfExperts(Part):
    """Sizes and routing rule of the mixture-of-experts layers (`moe_*` of `TransformerConfig`)."""

    num_moe_experts: Annotated[int, Field(gt=0, le=4096)]
    moe_router_topk: PositiveInt
    moe_ffn_hidden_size: PositiveInt
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Total hidden width of the shared experts; None has no shared expert."""
    moe_layer_freq: PositiveInt | Many[Literal[0, 1]] = 1
    """N: every N-th layer is MoE, starting at the first; a list names each layer (1 MoE, 0 dense)."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: PositiveInt | None = None
    moe_router_group_topk: PositiveInt | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_router_dtype: Literal["fp32"] | None = None
    """Dtype of routing and combination weights; None keeps the compute dtype."""


class Model(Part):
    """A decoder-only language model."""

    name: str = Field(min_length=1)
    num_layers: Annotated[int, Field(gt=0, le=2000)]
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    """Hidden width of the dense MLP layers."""
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt = 128
    """Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""
    multi_latent_attention: MultiLatentAttention
    mixture_of_experts: MixtureOfExperts | None = None
    qk_layernorm: bool = False
    normalization: Literal["RMSNorm"] = "RMSNorm"
    gated_linear_unit: Literal[True] = True
    activation_func: Literal["silu"] = "silu"
    add_bias_linear: Literal[False] = False
    untie_embeddings_and_output_weights: Literal[True] = True
    rotary_base: PositiveInt = 10000
    hidden_dropout: float = Field(default=0.0, ge=0.0, le=0.0)
    attention_dropout: float = Field(default=0.0, ge=0.0, le=0.0)

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """The MLP of each layer, in order (Megatron Core `get_moe_layer_freq` semantics)."""
        kinds: tuple[MlpKind, MlpKind] = ("dense", "moe")
        if self.mixture_of_experts is None:
            return (kinds[False],) * self.num_layers
        frequency = self.mixture_of_experts.moe_layer_freq
        if isinstance(frequency, int):
            flags = [layer % frequency == 0 for layer in range(self.num_layers)]
        else:
            flags = [flag == 1 for flag in frequency]
        return tuple(kinds[flag] for flag in flags)
