"""Random workloads for `benchmarks/differential.py`, over everything that `TransformerConfig` looks at.

A case is a set of changes to a small dense model. Most are drawn part by part; a part of them is aimed at one check of
`TransformerConfig` that little else leads to. A seed and a number give the same case everywhere.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.workload import Workload
from labkit.workload.launched import GRAPH_MODULES
from labkit.workload.offload_rules import OFFLOAD_MODULES
from labkit.workload.recompute import RECOMPUTE_MODULES

Changes = dict[str, Any]
"""Dotted fields of a workload, and options of its launch by their spelling: `--fp8-format` and its values as text."""

_BASE: dict[str, Any] = {
    "model": {
        "name": "drawn",
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    },
    "parallelism": {"world_size": 1},
    "batch": {"seq_length": 1024, "global_batch_size": 1},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": []},
    "training": {},
}
_EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
_LATENT = {"kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
_GDN = {
    "linear_attention_freq": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_MAMBA = {"mamba_state_dim": 16, "mamba_head_dim": 32, "mamba_num_groups": 4}
_MOE = "model.mixture_of_experts."
_KERNELS = "training.kernels."


_EP = {
    "model.mixture_of_experts": _EXPERTS,
    "parallelism.world_size": 2,
    "parallelism.expert_model_parallel_size": 2,
    "batch.global_batch_size": 2,
    "--overlap-moe-expert-parallel-comm": "",
}
_FINE = {
    "environment": ["NVTE_CPU_OFFLOAD_V1=1"],
    "--fine-grained-activation-offloading": "",
    "--offload-modules": "core_attn",
}
_PIPELINE: Changes = {
    "parallelism.world_size": 4,
    "parallelism.pipeline_model_parallel_size": 4,
    "batch.global_batch_size": 4,
}
_CAPACITY = {f"{_MOE}moe_expert_capacity_factor": 1.0, f"{_MOE}moe_pad_expert_input_to_capacity": True}
_EXPERT = {"model.mixture_of_experts": _EXPERTS}
_TE, _LOCAL = {"--cuda-graph-impl": "transformer_engine"}, {"--cuda-graph-impl": "local"}
_FLEX = _EXPERT | {f"{_KERNELS}moe_token_dispatcher_type": "flex"}


def _labels(*labels: str) -> Changes:
    return {"recompute.recompute_modules": list(labels)}


_AIMED: tuple[Changes, ...] = (
    {"--cuda-graph-modules": "full_iteration full_iteration_inference"},
    _TE | {"--cuda-graph-modules": "full_iteration"},
    _TE | {"--cuda-graph-modules": "full_iteration_inference"},
    _LOCAL | {"--cuda-graph-modules": "full_iteration_inference"},
    _LOCAL | {"--cuda-graph-modules": "full_iteration_inference", "--inference-cuda-graph-scope": "layer"},
    {"--cuda-graph-modules": "full_iteration", "--inference-cuda-graph-scope": "block"},
    {"--cuda-graph-modules": "full attn"},
    _LOCAL | {"--cuda-graph-modules": "full_iteration", "--no-check-for-nan-in-loss-and-grad": ""},
    _PIPELINE | {"--defer-embedding-wgrad-compute": "", "--wgrad-deferral-limit": "-1"},
    _PIPELINE | {"--defer-embedding-wgrad-compute": "", f"{_KERNELS}gradient_accumulation_fusion": False},
    {"parallelism.tensor_model_parallel_size": 2, "parallelism.world_size": 2, "model.num_attention_heads": 1},
    {"model.gated_delta_net": _GDN | {"linear_num_key_heads": 1, "linear_num_value_heads": 1}},
    {
        "--fp8-format": "hybrid",
        "--fp8-recipe": "tensorwise",
        "--first-last-layers-bf16": "",
        "--num-layers-at-start-in-bf16": "5",
    },
    {
        "--fp8-format": "hybrid",
        "--fp8-recipe": "mxfp8",
        "--first-last-layers-bf16": "",
        "--num-layers-at-end-in-bf16": "-1",
    },
    {
        "--fp8-format": "hybrid",
        "--fp8-recipe": "blockwise",
        "--first-last-layers-bf16": "",
        "--num-layers-at-end-in-bf16": "2",
    },
    {"--fp8-format": "hybrid", "--fp8-recipe": "delayed", **_labels("layernorm")},
    {"--fp8-format": "hybrid", "--fp8-recipe": "delayed", **_labels("moe_act"), **_EXPERT},
    {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8", **_labels("moe_act", "layernorm"), **_EXPERT},
    {"--fp8-output-proj": ""},
    {"--fp8-output-proj": "", "--fp8-format": "hybrid", "--fp8-recipe": "mxfp8"},
    {"--fp4-format": "e2m1", "--fp4-recipe": "custom"},
    {"--fp4-format": "e2m1", "--fp4-recipe": "custom", "--fp4-quantizer-factory": "package.factory"},
    _EXPERT | {"--moe-single-grouped-weight": ""},
    _EXPERT | {"--moe-single-grouped-weight": "", "--use-transformer-engine-op-fuser": ""},
    _EXPERT | {"--moe-single-grouped-weight": "", "--use-transformer-engine-op-fuser": "", "--fp8-format": "hybrid"},
    _EXPERT | {"--moe-single-grouped-bias": ""},
    _EXPERT
    | {
        "--moe-single-grouped-weight": "",
        "--use-transformer-engine-op-fuser": "",
        "training.software.transformer_engine": "2.13.0",
    },
    _EXPERT | {"--moe-single-grouped-bias": "", "model.add_bias_linear": True, f"{_KERNELS}bias_dropout_fusion": False},
    _FLEX | {"--moe-enable-deepep": ""},
    _FLEX | {"--moe-enable-deepep": "", "--moe-flex-dispatcher-backend": "deepep"},
    _FLEX | {"--moe-flex-dispatcher-backend": "deepep"} | _CAPACITY,
    _FLEX | _CAPACITY,
    _EXPERT
    | {
        f"{_KERNELS}moe_token_dispatcher_type": "allgather",
        f"{_KERNELS}moe_shared_expert_overlap": True,
        f"{_MOE}moe_shared_expert_intermediate_size": 128,
    },
    _EXPERT | {f"{_MOE}moe_expert_capacity_factor": 1.0, "--moe-router-load-balancing-type": "sinkhorn"},
    _EXPERT | {f"{_MOE}moe_pad_expert_input_to_capacity": True},
    _FINE | {"--min-offloaded-tensor-size": "-1"},
    _FINE | {"--delta-offload-bytes-across-pp-ranks": "-1"},
    _FINE | {"--activation-offload-fraction": "1.5"},
    _FINE | {"--offload-modules": "fused_group_mlp expert_fc1", "--use-transformer-engine-op-fuser": ""},
    _FINE | {"--offload-modules": "attn_proj core_attn qkv_linear attn_norm mlp_norm"},
    _FINE | {"--offload-modules": "moe_act"} | _EXPERT | _labels("moe"),
    {"--moe-paged-stash": "", "--cpu-offloading-num-layers": "1", "recompute.recompute_granularity": None},
    _FLEX
    | {
        "--moe-paged-stash": "",
        "--moe-expert-rank-capacity-factor": "1.5",
        "--use-transformer-engine-op-fuser": "",
        "--offload-modules": "moe_act",
    },
    _PIPELINE
    | {
        "model.num_layers": 8,
        "parallelism.num_layers_in_first_pipeline_stage": 2,
        "parallelism.num_layers_in_last_pipeline_stage": 4,
        "parallelism.virtual_pipeline_model_parallel_size": 2,
    },
    _PIPELINE
    | {
        "model.num_layers": 10,
        "parallelism.num_layers_in_first_pipeline_stage": 2,
        "parallelism.num_layers_in_last_pipeline_stage": 2,
        "parallelism.virtual_pipeline_model_parallel_size": 2,
    },
    _PIPELINE
    | {
        "model.num_layers": 7,
        "parallelism.account_for_loss_in_pipeline_split": True,
        "parallelism.virtual_pipeline_model_parallel_size": 3,
    },
    _PIPELINE
    | {
        "model.num_layers": 6,
        "parallelism.account_for_loss_in_pipeline_split": True,
        "parallelism.virtual_pipeline_model_parallel_size": 2,
    },
    _PIPELINE | {"model.num_layers": 4, "parallelism.pipeline_model_parallel_layout": "Et|tt|t|L"},
    _PIPELINE | {"model.num_layers": 4, "parallelism.pipeline_model_parallel_layout": "Et|t|t|tLL"},
    _PIPELINE
    | {"model.num_layers": 4, "parallelism.pipeline_model_parallel_layout": "Et|t|tm|tL", "model.mtp_num_layers": 1},
    _PIPELINE
    | {
        "model.num_layers": 4,
        "parallelism.pipeline_model_parallel_layout": "Et|t|t|t||m||mL",
        "model.mtp_num_layers": 2,
    },
    *(
        _PIPELINE | {"model.num_layers": 4, "parallelism.pipeline_model_parallel_layout": layout}
        for layout in ("t|t|t|tL", "Et|t|t|t", "Et|t|tL", "EtE|t|t|tL", "Ett|t|tt|tL", "Et|tm|t|tL")
    ),
    _PIPELINE
    | {
        "model.num_layers": 4,
        "parallelism.pipeline_model_parallel_layout": "Et|tm|t|tL",
        "model.mtp_num_layers": 1,
    },
    *(
        _PIPELINE
        | {
            "model.num_layers": 9,
            f"parallelism.num_layers_in_{end}_pipeline_stage": 3,
            "parallelism.virtual_pipeline_model_parallel_size": 2,
        }
        for end in ("first", "last")
    ),
    {
        "--cuda-graph-impl": "local",
        "--fp8-format": "hybrid",
        "--fp8-recipe": "mxfp8",
        "--tensor-parallel-num-weight-shards": "2",
        **_labels("shared_experts"),
        "model.mixture_of_experts": _EXPERTS | {"moe_shared_expert_intermediate_size": 128},
    },
    {"--use-mup": "", "--mup-base-hidden-size": "0"},
    {"--use-mup": "", "--mup-base-hidden-size": "128"},
    _EXPERT | {f"{_MOE}moe_router_num_groups": 3, f"{_MOE}moe_router_group_topk": 2},
    _EXPERT | {f"{_MOE}moe_router_num_groups": 2, f"{_MOE}moe_router_group_topk": 4},
    _EXPERT | {f"{_MOE}moe_router_group_topk": 2},
    _EXPERT | {f"{_MOE}moe_router_topk": 1},
    _EXPERT | {f"{_MOE}moe_router_topk": 1, "--moe-router-load-balancing-type": "sinkhorn"},
    _TE | {"--cpu-offloading-num-layers": "1", "recompute.recompute_granularity": None},
    _TE | _EXPERT | {"--cuda-graph-modules": "moe"},
    _TE | _EXPERT | _CAPACITY | {"--cuda-graph-modules": "attn moe"},
    _TE | _EXPERT | {"--cuda-graph-modules": "moe moe_router"},
    _TE | _EXPERT | {"--cuda-graph-modules": "moe_preprocess"},
    _TE | _EXPERT | {f"{_MOE}moe_expert_capacity_factor": 1.0, "--cuda-graph-modules": "moe_router moe_preprocess"},
    _TE
    | _EXPERT
    | {"--moe-router-padding-for-fp8": "", "--fp8-format": "e4m3", "--cuda-graph-modules": "moe_router moe_preprocess"},
    _TE | _EXPERT | {"--cuda-graph-modules": "attn moe_router"} | _labels("moe"),
    _TE | {"--cuda-graph-modules": "attn", "model.attention_dropout": 0.1} | _labels("core_attn"),
    _TE | {"--cuda-graph-modules": "mlp", "model.attention_dropout": 0.1} | _labels("core_attn"),
    _TE | {"--cuda-graph-modules": "mlp", "model.hidden_dropout": 0.1} | _labels("mlp"),
    _TE | {"--cuda-graph-modules": "attn", "model.hidden_dropout": 0.1} | _labels("mlp"),
    _TE | _EXPERT | {"--moe-input-jitter-eps": "0.1"} | _labels("moe"),
    _TE | _EXPERT | {"--cuda-graph-modules": "attn", "--moe-input-jitter-eps": "0.1"} | _labels("moe"),
    _LOCAL | _FINE | {"--cuda-graph-modules": "attn"},
    _LOCAL | _FINE | _EXPERT | {"--cuda-graph-modules": "attn", "--offload-modules": "expert_fc1"},
    _LOCAL | _FINE | _EXPERT | {"--offload-modules": "expert_fc1 moe_act"},
    _LOCAL | _FINE | _EXPERT | _CAPACITY | {"--offload-modules": "expert_fc1", "--cuda-graph-modules": "moe"},
    _TE | _FINE | _EXPERT | _CAPACITY | {"--cuda-graph-modules": "moe"},
    _TE | _FINE | {"--cuda-graph-modules": "attn", "--cuda-graph-warmup-steps": "0"},
    _FINE | {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": ""},
    _FINE
    | {
        "--cuda-graph-impl": "full_iteration",
        "--no-check-for-nan-in-loss-and-grad": "",
        "--fine-grained-offloading-max-inflight-offloads": "2",
    },
    {"--cuda-graph-impl": "full_iteration", "--cuda-graph-modules": "attn"},
    _EP,
    _EP | {f"{_KERNELS}moe_token_dispatcher_type": "allgather"},
    _EP | {"training.precision": "fp32", f"{_KERNELS}attention_backend": "unfused"},
    _EP
    | {
        "recompute.recompute_granularity": "full",
        "recompute.recompute_method": "uniform",
        "recompute.recompute_num_layers": 1,
    },
    _EP | {"recompute.recompute_granularity": None, "recompute.recompute_method": "block"},
    _EP | {"recompute.recompute_method": "uniform"},
    _EP | {"recompute.recompute_granularity": None, "recompute.recompute_num_layers": 1},
    _EP | _labels("moe"),
    _EP | _labels("moe") | {"recompute.recompute_granularity": None},
    _EP | _labels("moe_act", "layernorm"),
    _EP | {f"{_KERNELS}moe_shared_expert_overlap": True},
    _EP | {"model.mtp_num_layers": 2},
    _EP | {"model.mtp_num_layers": 1},
    _EP
    | _FINE
    | {
        f"{_KERNELS}moe_token_dispatcher_type": "flex",
        "--moe-flex-dispatcher-backend": "ncclep",
        "--offload-modules": "expert_fc1",
    },
    _EP | _TE | {"--cuda-graph-modules": "mlp", f"{_MOE}moe_layer_freq": 2},
    _EP | _TE | {"--cuda-graph-modules": "attn moe_router", "--delay-wgrad-compute": ""},
    _EP | _LOCAL | {"--cuda-graph-modules": "mlp", f"{_MOE}moe_layer_freq": 2},
    _EP | {"--overlap-dispatch-backward-with-experts-wgrad": ""},
    _EP | {"--ep-overlap-early-attn-memory-release": "", "--delay-wgrad-compute": ""},
    _EP
    | {
        "model.num_layers": 8,
        "parallelism.world_size": 4,
        "parallelism.pipeline_model_parallel_size": 2,
        "parallelism.virtual_pipeline_model_parallel_size": 2,
        "batch.global_batch_size": 8,
    },
    {"--delay-wgrad-compute": ""},
    {"--overlap-dispatch-backward-with-experts-wgrad": ""},
    {
        "parallelism.context_parallel_size": 2,
        "parallelism.world_size": 2,
        "batch.global_batch_size": 1,
        "--cp-comm-type": "p2p a2a",
    },
    {
        "parallelism.context_parallel_size": 2,
        "parallelism.world_size": 2,
        "batch.global_batch_size": 1,
        "--batch-invariant-mode": "",
        f"{_KERNELS}attention_backend": "flash",
        "--flash-attention-version": "3",
    },
    {
        "--batch-invariant-mode": "",
        f"{_KERNELS}attention_backend": "flash",
        "--flash-attention-version": "3",
        "model.attention_dropout": 0.1,
    },
    {"--batch-invariant-mode": "", f"{_KERNELS}attention_backend": "flash", "--flash-attention-version": "2"},
    {"--batch-invariant-mode": "", f"{_KERNELS}attention_backend": "flash", "--flash-attention-version": "4"},
    {
        "model.multi_latent_attention": _LATENT | {"rope_type": "yarn"},
        f"{_KERNELS}apply_rope_fusion": True,
        "--cache-mla-latents": "",
    },
    {"model.multi_latent_attention": _LATENT, f"{_KERNELS}apply_rope_fusion": True},
    {"model.multi_latent_attention": _LATENT, "model.attention_output_gate": True},
    {"model.multi_latent_attention": _LATENT, "--rotary-interleaved": ""},
    {"--no-rope-freq": "[0,1]"},
    {"--no-rope-freq": "3"},
    {"--no-rope-freq": "2"},
)
"""Changes that bring one check of `TransformerConfig` to speak, or just not: those that little else leads to."""


class Draw:
    """Draws the changes of one case."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed}/{number}")  # noqa: S311 (no secret)
        self.changes: Changes = {}
        self.calm = self.maybe(0.75)
        """Model, layout and recompute choice are well put together, so that what follows them is judged."""

    def maybe(self, chance: float) -> bool:
        """Whether a chance comes true."""
        return self.random.random() < chance

    def one(self, *values: Any) -> Any:
        """One of the values."""
        return self.random.choice(values)

    def some(self, values: Sequence[str], most: int = 3) -> list[str]:
        """One to `most` of the values, in no order."""
        return self.random.sample(values, self.random.randint(1, most))

    def set(self, chance: float, path: str, *values: Any) -> None:
        """With a chance, one of the values for a field or an option."""
        if self.maybe(chance):
            self.changes[path] = self.one(*values)

    def case(self) -> Changes:
        """All changes."""
        if self.maybe(0.4):
            return self.aimed()
        self.model()
        self.layout()
        self.recompute()
        parts = [self.graphs, self.offloading, self.overlaps, self.quantization, self.experts, self.activation]
        parts += [self.attention, self.rest]
        for part in self.random.sample(parts, self.one(1, 1, 1, 2) if self.calm else self.one(0, 1, 1, 2, 3)):
            part()
        return self.changes

    def aimed(self) -> Changes:
        """Changes that are aimed at one check, at times with others around them."""
        aimed = self.one(*_AIMED)
        self.set(0.3, "model.hidden_size", 512)
        self.set(0.2, "model.ffn_hidden_size", 1024)
        self.set(0.2, "model.qk_layernorm", True)
        self.set(0.2, f"{_KERNELS}bias_dropout_fusion", False)
        self.set(0.2, f"{_KERNELS}moe_router_fusion", True)
        if self.maybe(0.4):
            self.changes["model.mixture_of_experts"] = dict(_EXPERTS)
            self.set(0.5, f"{_MOE}moe_shared_expert_intermediate_size", 128)
        self.changes |= aimed
        if self.maybe(0.2):
            self.random.choice((self.graphs, self.quantization, self.experts, self.activation, self.attention))()
            self.changes |= aimed
        return self.changes

    @property
    def has_experts(self) -> bool:
        """The model has some."""
        return "model.mixture_of_experts" in self.changes

    def model(self) -> None:
        """Which kinds of layers there are."""
        changes = self.changes
        self.set(0.4, "model.num_layers", 2, 3, 6, 8, 12)
        self.set(0.1, "model.num_attention_heads", 4, 16, *(() if self.calm else (6, 12)))
        self.set(0.2, "model.num_query_groups", 1, 2, 4, *(() if self.calm else (3, 6)))
        self.set(0.15, "model.kv_channels", 32, 64)
        if self.maybe(0.6):
            changes["model.mixture_of_experts"] = dict(_EXPERTS)
            self.set(0.4, f"{_MOE}moe_layer_freq", 2, 3, (1, 0), (0, 1, 1, 1), (1, 1, 1, 1))
            self.set(0.35, f"{_MOE}moe_shared_expert_intermediate_size", 128, 256)
            self.set(0.1, f"{_MOE}num_moe_experts", 1, 4, 6, 16)
        if self.maybe(0.3):
            changes["model.multi_latent_attention"] = dict(_LATENT)
            self.set(0.5, "model.multi_latent_attention.rope_type", "yarn")
            self.set(0.1 if self.calm else 0.4, f"{_KERNELS}apply_rope_fusion", True)
            self.set(0.02 if self.calm else 0.15, "model.attention_output_gate", True)
        kind = self.one("transformer", "transformer", "transformer", "gdn", "hybrid")
        if kind == "gdn":
            self.delta_nets()
        elif kind == "hybrid":
            self.pattern()
        elif self.maybe(0.2):
            changes["model.mtp_num_layers"] = self.one(1, 1, 2)
            self.set(0.1, "model.position_embedding_type", "none", "learned_absolute", "yarn")

    def delta_nets(self) -> None:
        """Layers of gated delta net."""
        self.changes["model.gated_delta_net"] = dict(_GDN)
        odd = 0.0 if self.calm else 0.3
        self.set(odd, "model.gated_delta_net.linear_num_key_heads", 1, 2, 3, 8)
        self.set(odd, "model.gated_delta_net.linear_num_value_heads", 2, 4, 6, 16)

    def pattern(self) -> None:
        """Layers of a hybrid pattern."""
        attention = "+" if "model.multi_latent_attention" in self.changes else "*"
        symbols = ["M", attention, "-", *("E" if self.has_experts else "")]
        if self.maybe(0.3):
            self.delta_nets()
            symbols.append("G")
        self.changes["model.mamba"] = dict(_MAMBA)
        layers = self.random.choices(symbols, k=self.one(2, 4, 4, 8))
        self.changes["model.num_layers"] = len(layers)
        if self.maybe(0.25):
            layers.insert(len(layers) // 2, "|")
        self.changes["model.hybrid_layer_pattern"] = "".join(layers)

    def layout(self) -> None:
        """How ranks share the work, such that they factor."""
        changes, experts = self.changes, self.has_experts
        tensor, context = self.one(1, 1, 2, 2, 4), self.one(1, 1, 1, 2)
        pipeline = self.one(1, 1, 2, 2, 4)
        if self.calm:
            context = context if "model.gated_delta_net" not in changes else 1
            pipeline = self.one(*(ranks for ranks in (1, 1, 2, 4) if changes.get("model.num_layers", 4) % ranks == 0))
            stages = changes.get("model.hybrid_layer_pattern", "").count("|") + 1
            pipeline = stages if stages > 1 else pipeline
        expert = self.one(1, 2, 4) if experts or self.maybe(0.03) else 1
        expert_tensor = self.one(None, 1, 1, 2) if experts else None
        dense, routed = tensor * context * pipeline, (expert_tensor or tensor) * expert * pipeline
        world = math.lcm(dense, routed) * self.one(1, 1, 2)
        batch = self.one(1, 2, 4) * pipeline
        changes |= {
            "parallelism.world_size": world,
            "parallelism.tensor_model_parallel_size": tensor,
            "parallelism.context_parallel_size": context,
            "parallelism.pipeline_model_parallel_size": pipeline,
            "parallelism.expert_model_parallel_size": expert,
            "parallelism.expert_tensor_parallel_size": expert_tensor,
            "parallelism.sequence_parallel": self.maybe(
                (0.95 if self.calm else 0.7) if tensor > 1 else (0.0 if self.calm else 0.1)
            ),
            "batch.global_batch_size": world // dense * batch,
        }
        self.set(0.2, "parallelism.cp_comm_type", "a2a", "all_gather")
        layers = changes.get("model.num_layers", 4)
        if not self.calm:
            self.stages(pipeline)
        elif "model.hybrid_layer_pattern" in changes:
            pass
        elif pipeline > 1 and layers % (2 * pipeline) == 0 and self.maybe(0.5):
            changes["parallelism.virtual_pipeline_model_parallel_size"] = 2
        elif pipeline > 2 and layers > pipeline and self.maybe(0.5):
            changes["parallelism.num_layers_in_first_pipeline_stage"] = self.one(1, 2)
            changes["parallelism.num_layers_in_last_pipeline_stage"] = self.one(1, 2)

    def stages(self, pipeline: int) -> None:
        """How layers are spread over a pipeline."""
        at = "parallelism."
        if self.maybe(0.1 if pipeline == 1 else 0.35):
            self.changes[f"{at}virtual_pipeline_model_parallel_size"] = self.one(2, 2, 3)
        if self.maybe(0.08 if pipeline == 1 else 0.25):
            self.set(0.7, f"{at}num_layers_in_first_pipeline_stage", 1, 2, 3, 5)
            self.set(0.7, f"{at}num_layers_in_last_pipeline_stage", 1, 2, 3, 5)
        if self.maybe(0.12):
            self.set(0.7, f"{at}account_for_embedding_in_pipeline_split", True)
            self.set(0.7, f"{at}account_for_loss_in_pipeline_split", True)
        if self.maybe(0.15):
            self.changes[f"{at}pipeline_model_parallel_layout"] = self.placed(pipeline)

    def placed(self, pipeline: int) -> str:
        """Layers placed by hand, most of them well."""
        layers = self.changes.get("model.num_layers", 4) + (self.one(-1, 1) if self.maybe(0.15) else 0)
        stages = pipeline * self.one(1, 1, 2) + (1 if self.maybe(0.1) else 0)
        rows = ["t" * (layers // stages + (stage < layers % stages)) for stage in range(stages)]
        rows[0] = ("" if self.maybe(0.05) else "E") + rows[0]
        depths = self.changes.get("model.mtp_num_layers", 0) + (1 if self.maybe(0.05) else 0)
        at = -1 if self.maybe(0.7) else self.random.randrange(stages)
        rows[at] += "m" * depths
        rows[-1] += "" if self.maybe(0.05) else "L"
        return "|".join(rows)

    def recompute(self) -> None:
        """The recompute choice, its parts at times without each other."""
        at = "recompute."
        self.changes[f"{at}recompute_granularity"] = self.one("selective", "selective", "selective", "full", None)
        full = self.changes[f"{at}recompute_granularity"] == "full"
        likely, odd = (1.0, 0.01) if self.calm else (0.85, 0.08)
        self.set(likely if full else odd, f"{at}recompute_method", "uniform", "block")
        self.set(likely if full else odd, f"{at}recompute_num_layers", 1, 1, 2)
        labels = self.some([label for label in RECOMPUTE_MODULES if not self.calm or self.fits(label)])
        self.changes[f"{at}recompute_modules"] = labels if self.maybe(0.7) else self.one(None, [])
        self.set(0.02 if self.calm else 0.1, "--distribute-saved-activations", "")
        self.set(0.01 if self.calm else 0.15, f"{_KERNELS}moe_grouped_gemm", False)
        self.set(0.1 if self.has_experts else 0.02, f"{_KERNELS}moe_shared_expert_overlap", True)

    def fits(self, label: str) -> bool:
        """Whether the model has what a label recomputes."""
        needs = {"mla_up_proj": "model.multi_latent_attention", "gdn_norm_out": "model.gated_delta_net"}
        return needs.get(label, "model") in {*self.changes, "model"} and (label != "moe_act" or self.has_experts)

    def graphs(self) -> None:
        """CUDA graphs, by all names of their options."""
        impl = self.one("none", "local", "transformer_engine", "transformer_engine", "full_iteration")
        self.set(0.85, "--cuda-graph-impl", impl)
        former = self.some((*GRAPH_MODULES, "full", "full_iteration", "full_iteration_inference"), 2)
        modules = former if self.maybe(0.12) else self.some(GRAPH_MODULES)
        option = "--cuda-graph-scope" if self.maybe(0.1) else "--cuda-graph-modules"
        self.set(0.25 if impl == "full_iteration" else 0.75, option, " ".join(modules))
        self.set(0.02, "--cuda-graph-scope", "attn")
        self.set(0.03, "--enable-cuda-graph", "")
        self.set(0.03, "--external-cuda-graph", "")
        self.set(0.06, "--inference-cuda-graph-scope", "none", "layer", "block")
        self.set(0.1, "--cuda-graph-warmup-steps", "0", "1", "11")
        self.set(0.7 if impl == "full_iteration" else 0.1, "--no-check-for-nan-in-loss-and-grad", "")
        self.set(0.2, "model.attention_dropout", 0.1)
        self.set(0.2, "model.hidden_dropout", 0.1)
        self.set(0.1, "--moe-input-jitter-eps", "0.01")
        self.set(0.03, "--inference-dynamic-batching-num-cuda-graphs", "0", "-1")
        if self.has_experts and self.maybe(0.4):
            self.capacity()
        if self.maybe(0.25):
            self.fine_grained()
        if self.maybe(0.05):
            self.changes["--cpu-offloading-num-layers"] = "1"
            self.changes["recompute.recompute_granularity"] = None
        if self.maybe(0.1):
            self.changes["--moe-router-padding-for-fp8"] = ""
            self.changes["--fp8-format"] = "hybrid"
        if self.has_experts and self.maybe(0.1):
            self.changes |= {"--fp8-format": "hybrid", "--tensor-parallel-num-weight-shards": "8"}
            self.changes |= {f"{_MOE}moe_shared_expert_intermediate_size": 128, "--cuda-graph-impl": "local"}
            self.changes["recompute.recompute_modules"] = ["shared_experts"]

    def capacity(self) -> None:
        """Experts that drop tokens."""
        self.set(0.9, f"{_MOE}moe_expert_capacity_factor", 1.0, 1.5)
        self.set(0.7, f"{_MOE}moe_pad_expert_input_to_capacity", True)

    def offloading(self) -> None:
        """Activations that wait on the host."""
        if self.maybe(0.4):
            self.set(0.9, "--cpu-offloading-num-layers", "1", "1", "1", "2", "4", "9")
            if self.maybe(0.7):
                self.changes["recompute.recompute_granularity"] = None
        if self.maybe(0.6):
            self.fine_grained()
        self.set(0.2, "--moe-paged-stash", "")
        self.set(0.1, "--optimizer-cpu-offload", "")
        if "--moe-paged-stash" in self.changes and self.has_experts:
            self.rank_capacity()

    def fine_grained(self) -> None:
        """Tensors offloaded one by one."""
        self.changes["--fine-grained-activation-offloading"] = ""
        if self.maybe(0.97):
            names = self.some(("expert_fc1", "moe_act"), 2) if self.maybe(0.4) else self.some(OFFLOAD_MODULES)
            if "attn_proj" in names and self.maybe(0.7):
                names.append("core_attn")
            self.changes["--offload-modules"] = " ".join([*names, *(["nothing"] if self.maybe(0.03) else [])])
        self.set(0.9, "environment", ["NVTE_CPU_OFFLOAD_V1=1"])
        self.set(0.04, "--min-offloaded-tensor-size", "-1", "0")
        self.set(0.04, "--activation-offload-fraction", "-0.5", "1.5", "0.5")
        self.set(0.04, "--delta-offload-bytes-across-pp-ranks", "-1", "10")
        self.set(0.2, "--fine-grained-offloading-max-inflight-offloads", "0", "2", "-1")
        self.set(0.3, "--use-transformer-engine-op-fuser", "")
        self.set(0.1, "--moe-paged-stash", "")

    def rank_capacity(self) -> None:
        """A bound of the rows of a rank."""
        self.set(0.8, "--moe-expert-rank-capacity-factor", "1.5")
        self.set(0.5, "--use-transformer-engine-op-fuser", "")
        self.set(0.5, f"{_KERNELS}moe_token_dispatcher_type", "flex")
        self.set(0.3, "--moe-flex-dispatcher-backend", "hybridep", "ncclep", "deepep")

    def overlaps(self) -> None:
        """Communication beside computation."""
        self.set(0.75 if self.has_experts else 0.1, "--overlap-moe-expert-parallel-comm", "")
        self.set(0.2, "--delay-wgrad-compute", "")
        self.set(0.07, "--overlap-dispatch-backward-with-experts-wgrad", "")
        self.set(0.1, "--ep-overlap-early-attn-memory-release", "")
        self.set(0.05, "--overlap-p2p-communication-warmup-flush", "")
        self.set(0.05, "--no-overlap-p2p-communication", "")
        self.set(0.1, "--tp-comm-overlap", "")
        self.set(0.1, "--defer-embedding-wgrad-compute", "")
        self.set(0.1, "--wgrad-deferral-limit", "-1", "2")
        if self.maybe(0.2):
            self.fine_grained()
        if self.maybe(0.2):
            self.set(0.9, "--cuda-graph-impl", "transformer_engine", "local")
            self.set(0.9, "--cuda-graph-modules", "attn", "moe_router", "attn moe_router moe_preprocess", "mlp")
        if "model.mtp_num_layers" not in self.changes and "model.hybrid_layer_pattern" not in self.changes:
            self.set(0.1, "model.mtp_num_layers", 1, 2)
        self.set(0.1, "--overlap-param-gather-with-optimizer-step", "")
        self.set(0.15, f"{_KERNELS}gradient_accumulation_fusion", False)
        self.set(0.1, f"{_KERNELS}moe_shared_expert_overlap", True)
        self.set(0.15, f"{_KERNELS}moe_token_dispatcher_type", "allgather", "flex")
        self.set(0.05, "training.precision", "fp32")
        flex = self.changes.get(f"{_KERNELS}moe_token_dispatcher_type") == "flex"
        self.set(0.5 if flex else 0.03, "--moe-flex-dispatcher-backend", "ncclep")
        self.set(0.1, "model.add_qkv_bias", True)
        if self.has_experts and self.maybe(0.7):
            self.changes["parallelism.expert_model_parallel_size"] = 2
            self.changes["parallelism.expert_tensor_parallel_size"] = 1
            self.changes["parallelism.world_size"] *= 2
            self.changes["batch.global_batch_size"] *= 2

    def quantization(self) -> None:
        """FP8 and FP4."""
        self.set(0.85, "--fp8-format", "hybrid", "e4m3")
        self.set(0.75, "--fp8-recipe", "delayed", "tensorwise", "mxfp8", "blockwise", "custom")
        self.set(0.1, "--fp8-quantizer-factory", "package.module.factory")
        self.set(0.2, "--fp8-param-gather", "")
        self.set(0.1, "--fp8-output-proj", "")
        self.set(0.3, "--first-last-layers-bf16", "")
        self.set(0.15, "--num-layers-at-start-in-bf16", "0", "2", "5", "-1")
        self.set(0.15, "--num-layers-at-end-in-bf16", "0", "2", "5", "-1")
        self.set(0.1, "--fp4-format", "e2m1")
        self.set(0.1, "--fp4-recipe", "custom", "nvfp4")
        self.set(0.05, "--fp4-quantizer-factory", "package.module.factory")
        self.set(0.05, "--fp4-param-gather", "")
        self.set(0.15, "--moe-router-padding-for-quantization", "")
        self.set(0.1, "--moe-router-padding-for-fp8", "")
        self.set(0.1, "training.optimizer.fp8_recipe", "tensorwise", "delayed")
        if self.maybe(0.1):
            self.changes["training.data_parallel.use_distributed_optimizer"] = False
            self.changes["training.data_parallel.overlap_param_gather"] = False
        self.set(0.15, "--optimizer-cpu-offload", "")
        self.set(0.15, "training.optimizer.use_precision_aware_optimizer", True)
        if self.maybe(0.1):
            self.set(1, "--tensor-parallel-num-weight-shards", "1", "2", "3", "4", "8")
            self.set(0.8, "--cuda-graph-impl", "local")

    def experts(self) -> None:
        """Routing, dispatch and what experts are made of."""
        self.set(
            0.15, "--moe-router-load-balancing-type", "sinkhorn", "aux_loss", "quantile_balancing", "aux_loss none"
        )
        self.set(0.1, "training.software.transformer_engine", "2.13.0", "2.14.0", "2.17.1")
        self.set(0.06, "--moe-single-grouped-weight", "")
        self.set(0.04, "--moe-single-grouped-bias", "")
        if "--moe-single-grouped-weight" in self.changes:
            self.set(0.6, "--use-transformer-engine-op-fuser", "")
            self.set(0.4, "--fp8-format", "hybrid")
            self.set(0.7, "--fp8-recipe", "mxfp8", "tensorwise")
        self.set(0.05, "--use-transformer-engine-op-fuser", "")
        self.set(0.06, "--moe-enable-deepep", "")
        self.set(0.3, f"{_KERNELS}moe_token_dispatcher_type", "allgather", "flex", "flex")
        flex = self.changes.get(f"{_KERNELS}moe_token_dispatcher_type") == "flex"
        self.set(0.5 if flex else 0.05, "--moe-flex-dispatcher-backend", "deepep", "deepep", "hybridep", "ncclep")
        if self.maybe(0.08):
            self.set(0.7, "--moe-deepep-num-sms", "20", "24")
            self.set(0.7, "--moe-hybridep-num-sms", "20", "24")
            self.set(0.2, "--moe-flex-dispatcher-num-sms", "16")
        self.set(0.2, f"{_KERNELS}moe_shared_expert_overlap", True)
        if not self.has_experts:
            return
        self.set(0.15, f"{_MOE}moe_router_topk", 1, 4)
        self.set(0.2, f"{_MOE}moe_router_pre_softmax", True)
        self.set(0.2, f"{_MOE}moe_router_score_function", "sigmoid")
        self.set(0.2, f"{_MOE}moe_router_enable_expert_bias", True)
        self.set(0.2, f"{_MOE}moe_router_group_topk", 1, 2, 4)
        self.set(0.2, f"{_MOE}moe_router_num_groups", 2, 3, 4)
        self.set(0.2, "model.add_bias_linear", True)
        self.set(0.1, f"{_KERNELS}moe_permute_fusion", False)
        if self.maybe(0.3):
            self.capacity()
        if self.maybe(0.15):
            self.rank_capacity()

    def activation(self) -> None:
        """Activations and their kernels."""
        self.set(0.6, "model.activation_func", "gelu", "gelu", "squared_relu")
        self.set(0.4, "model.gated_linear_unit", False)
        self.set(0.3, "model.add_bias_linear", True)
        self.set(0.4, f"{_KERNELS}bias_activation_fusion", False)
        self.set(0.15, "--quick-geglu", "")
        self.set(0.15, "--glu-linear-offset", "1.0", "0")
        self.set(0.15, "--use-te-activation-func", "")
        self.set(0.2, "--fused-residual-rmsnorm", "")
        self.set(0.3, "model.normalization", "LayerNorm")
        self.set(0.2, f"{_KERNELS}transformer_impl", "local")

    def attention(self) -> None:
        """Attention, positions and context parallelism."""
        self.set(0.3, f"{_KERNELS}apply_rope_fusion", True)
        self.set(0.3, "model.position_embedding_type", "none", "yarn", "learned_absolute")
        self.set(0.2, "--rotary-interleaved", "")
        self.set(0.15, "--no-rope-freq", "2", "3", "4", "[0,1]*2", "([0]*3+[1])", "0")
        self.set(0.15, "--cp-comm-type", "p2p a2a", "p2p p2p all_gather a2a", "a2a+p2p")
        self.set(0.05, "--hierarchical-context-parallel-sizes", "1 2", "2 2", "1")
        self.set(0.15, "--cache-mla-latents", "")
        self.set(0.1, "--mla-down-proj-fusion", "")
        self.set(0.2, "--batch-invariant-mode", "")
        invariant = "--batch-invariant-mode" in self.changes
        self.set(0.8 if invariant else 0.1, f"{_KERNELS}attention_backend", "flash")
        self.set(0.1, f"{_KERNELS}attention_backend", "unfused", "auto")
        self.set(0.8 if invariant else 0.1, "--flash-attention-version", "2", "3", "4", "3")
        self.set(0.1, "model.attention_dropout", 0.1)
        self.set(0.2, "model.attention_output_gate", True)
        self.set(0.1, "model.qk_layernorm", True)

    def rest(self) -> None:
        """What else a configuration looks at."""
        self.set(0.1, "--use-mup", "")
        self.set(0.1, "--mup-base-hidden-size", "128", "0", "-1")
        self.set(0.05, "--init-method-xavier-uniform", "")
        self.set(0.1, "--inference-fuse-tp-communication", "")
        self.set(0.1, "--inference-disable-triton-nvls-kernels", "")
        self.set(0.15, "--tensor-parallel-num-weight-shards", "1", "2", "3", "4")
        self.set(0.15, "--expert-tensor-parallel-num-weight-shards", "1", "2", "3")
        self.set(0.1, "--fp32-residual-connection", "")
        self.set(0.15, "--fp16", "")
        self.set(0.1, "--fp16-lm-cross-entropy", "")
        self.set(0.1, "training.precision", "fp32")
        self.set(0.05, "--train-iters", "-1", "5")
        self.set(0.1, "model.untie_embeddings_and_output_weights", False)
        self.set(0.1, "training.data_parallel.grad_reduce_in_fp32", True)
        self.set(0.1, "training.data_parallel.overlap_grad_reduce", False)


def workload_of(changes: Mapping[str, Any]) -> Workload:
    """The workload that the changes make of the base, rules unapplied.

    Raises:
        InputError: they make none.
    """
    mapping = copy.deepcopy(_BASE)
    arguments: list[str] = []
    for path, value in changes.items():
        if path.startswith("--"):
            arguments.append(f"{path} {value}".strip())
        elif path == "environment":
            mapping.setdefault("launch", {})["environment"] = value
        else:
            *sections, last = path.split(".")
            at = mapping
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = copy.deepcopy(value)
    if arguments:
        mapping.setdefault("launch", {})["arguments"] = arguments
    return Workload.unchecked(mapping)
