"""Hold the estimate against a trace on random small workloads.

`python benchmarks/fuzz_estimate.py --seed 1 --cases 50 --worst 3`

A workload is drawn field by field over everything that is priced; what the rules refuse is drawn again, so that every
drawn one must run in Megatron and agree. Prints one line a case, then the worst as YAML that `labkit compare` reads.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError, LabkitError
from labkit.workload import Workload
from tests.memory.grid.agreement import Agreement, stages

LABELS = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "gdn_norm_out")


class Outcome(NamedTuple):
    """One workload and what became of it."""

    number: int
    workload: Workload
    errors: Agreement | None
    """Of the stage that disagrees most; None if a side failed."""
    failure: str = ""

    @property
    def severity(self) -> float:
        """Failures first, then how far beyond its tolerance a figure is."""
        return float("inf") if self.errors is None else self.errors.severity


class Draw:
    """Random fields; a seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (no secret)

    def one(self, *choices: Any) -> Any:
        """One of `choices`, alike in weight."""
        return self._random.choice(choices)

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self._random.random() < probability

    def sometimes(self, probability: float, fields: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """`fields()` so often, else nothing."""
        return fields() if self.chance(probability) else {}

    def several(self, *choices: Any) -> list[Any]:
        """Any of `choices`."""
        return [choice for choice in choices if self.chance(0.3)]


def drawn(draw: Draw) -> dict[str, Any]:
    """A workload as plain data; the rules may refuse it."""
    layers = draw.one(1, 2, 3, 4, 4, 5, 6)
    moderate = draw.chance(0.2)
    model = _model(draw, layers, moderate)
    lengths = (2048, 3000, 4096) if moderate else (128, 192, 256, 333, 512, 600, 768, 1000, 1001, 1536)
    return {
        "model": model,
        "parallelism": _layout(draw, layers, "mixture_of_experts" in model),
        "batch": {
            "seq_length": draw.one(*lengths),
            "micro_batch_size": draw.one(1, 1, 2) if moderate else draw.one(1, 1, 1, 2, 3, 4, 8),
            "global_batch_size": draw.one(8, 16, 24, 48),
        },
        "recompute": _recompute(draw, layers),
        "training": _training(draw, model),
        **(_routing(draw) if "mixture_of_experts" in model else {}),
    }


def _model(draw: Draw, layers: int, moderate: bool) -> dict[str, Any]:
    heads = draw.one(4, 8, 8, 12, 16)
    model = {
        "name": "fuzz",
        "num_layers": layers,
        "hidden_size": draw.one(1024, 1536, 2048) if moderate else draw.one(192, 256, 384, 512, 768, 1024),
        "ffn_hidden_size": draw.one(2816, 4096) if moderate else draw.one(704, 1024, 1408, 3072),
        "num_attention_heads": heads,
        "vocab_size": draw.one(1000, 5000, 32000),
        "untie_embeddings_and_output_weights": draw.chance(0.75),
        "normalization": draw.one("RMSNorm", "RMSNorm", "LayerNorm"),
        "qk_layernorm": draw.chance(0.4),
        **draw.sometimes(0.2, lambda: {"make_vocab_size_divisible_by": draw.one(1, 64)}),
        **draw.sometimes(0.2, lambda: {"hidden_dropout": 0.1}),
        **draw.sometimes(0.2, lambda: {"attention_dropout": 0.1}),
        **draw.sometimes(0.2, lambda: {"rotary_percent": draw.one(0.25, 0.5)}),
        **draw.sometimes(0.15, lambda: {"position_embedding_type": draw.one("learned_absolute", "none")}),
        **draw.sometimes(0.15, lambda: {"mtp_num_layers": draw.one(1, 1, 2)}),
        **_mixers(draw, heads, layers),
    }
    pattern = model.get("hybrid_layer_pattern")
    if "E" in pattern if pattern else draw.chance(0.5):
        model["mixture_of_experts"] = _experts(draw, layers)
    gated = draw.chance(0.7)
    model |= {"activation_func": draw.one("silu", "silu", "gelu", "squared_relu"), "gated_linear_unit": gated}
    if "gated_delta_net" in model:
        model["activation_func"] = "silu"
    model["add_bias_linear"] = "mixture_of_experts" not in model and draw.chance(0.3)
    return model


def _mixers(draw: Draw, heads: int, layers: int) -> dict[str, Any]:
    latent = {
        "q_lora_rank": draw.one(None, 96, 192),
        "kv_lora_rank": draw.one(64, 128),
        "qk_head_dim": draw.one(32, 64, 128),
        "qk_pos_emb_head_dim": draw.one(16, 32, 64),
        "v_head_dim": draw.one(32, 64, 128),
    }
    attention = {
        "num_query_groups": draw.one(None, 1, 2, 4, heads // 2),
        "kv_channels": draw.one(None, 64, 128),
        "attention_output_gate": draw.chance(0.3),
        "add_qkv_bias": draw.chance(0.2),
    }
    delta = {
        "linear_key_head_dim": draw.one(64, 96, 128),
        "linear_value_head_dim": draw.one(64, 128),
        "linear_num_key_heads": draw.one(4, 8),
        "linear_num_value_heads": draw.one(8, 16),
        **draw.sometimes(0.2, lambda: {"linear_conv_kernel_dim": draw.one(2, 3)}),
    }
    mamba = {
        "mamba_state_dim": draw.one(16, 64, 128),
        "mamba_num_groups": draw.one(1, 2, 4, 8),
        "mamba_head_dim": draw.one(32, 64),
        **draw.sometimes(0.3, lambda: {"mamba_num_heads": draw.one(8, 16, 24)}),
    }
    match draw.one("attention", "attention", "attention", "mla", "mla", "gdn", "hybrid", "hybrid"):
        case "attention":
            return attention
        case "mla":
            return {"multi_latent_attention": latent}
        case "gdn":
            frequency = draw.one(2, 3, 4, [int(draw.chance(0.6)) for _ in range(layers)])
            return attention | {"gated_delta_net": delta | {"linear_attention_freq": frequency}}
    scored = draw.one("*", "+")
    pattern = "".join(draw.one("M", "M", "G", scored, "-", "E") for _ in range(layers))
    return {
        **({"multi_latent_attention": latent} if "+" in pattern else attention),
        "hybrid_layer_pattern": pattern,
        **({"mamba": mamba} if "M" in pattern else {}),
        **({"gated_delta_net": delta} if "G" in pattern else {}),
    }


def _experts(draw: Draw, layers: int) -> dict[str, Any]:
    return {
        "num_moe_experts": draw.one(4, 8, 16),
        "moe_router_topk": draw.one(1, 2, 3, 4),
        "moe_ffn_hidden_size": draw.one(256, 352, 704),
        "moe_shared_expert_intermediate_size": draw.one(None, 512, 704),
        "moe_layer_freq": draw.one(1, 2, [int(draw.chance(0.6)) for _ in range(layers)]),
        "moe_router_score_function": draw.one("softmax", "sigmoid"),
        "moe_router_pre_softmax": draw.chance(0.4),
        "moe_router_enable_expert_bias": draw.chance(0.3),
        "moe_router_load_balancing_type": draw.one("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        "moe_aux_loss_coeff": draw.one(0.0, 0.01, 0.01),
        "moe_router_dtype": draw.one(None, "fp32"),
        **draw.sometimes(0.15, lambda: {"moe_router_topk_scaling_factor": 2.5}),
        **draw.sometimes(0.2, lambda: {"moe_z_loss_coeff": 0.001}),
        **draw.sometimes(0.2, lambda: {"moe_router_num_groups": 4, "moe_router_group_topk": draw.one(1, 2)}),
        **draw.sometimes(0.2, lambda: {"moe_shared_expert_gate": True}),
        **draw.sometimes(0.15, lambda: {"moe_latent_size": draw.one(96, 128)}),
        **draw.sometimes(0.25, lambda: _capacity(draw)),
    }


def _capacity(draw: Draw) -> dict[str, Any]:
    return {
        "moe_expert_capacity_factor": draw.one(0.7, 1.0, 1.5),
        "moe_pad_expert_input_to_capacity": draw.chance(0.5),
        "moe_token_drop_policy": draw.one("probs", "position"),
    }


def _routing(draw: Draw) -> dict[str, Any]:
    kind = draw.one(None, None, "balanced", "allowance", "worst")
    return {} if kind is None else {"routing": {"kind": kind}}


def _layout(draw: Draw, layers: int, experts: bool) -> dict[str, Any]:
    tensor, stages, context = draw.one(1, 1, 2, 2, 4), draw.one(1, 1, 1, 2, 4), draw.one(1, 1, 1, 2, 4)
    return {
        "world_size": tensor * stages * context * draw.one(1, 2, 4, 8),
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1 and (experts or draw.chance(0.7)),
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": context,
        "cp_comm_type": draw.one("p2p", "p2p", "a2a", "all_gather"),
        **(
            {
                "expert_model_parallel_size": draw.one(1, 1, 2, 4),
                "expert_tensor_parallel_size": draw.one(1, 1, None, tensor),
            }
            if experts
            else {}
        ),
        **draw.sometimes(0.5 * (stages > 1), lambda: {"virtual_pipeline_model_parallel_size": 2}),
        **draw.sometimes(0.2 * (stages > 1), lambda: {"num_layers_in_first_pipeline_stage": draw.one(1, layers - 1)}),
        **draw.sometimes(0.2 * (stages > 1), lambda: {"account_for_loss_in_pipeline_split": True}),
    }


def _recompute(draw: Draw, layers: int) -> dict[str, Any]:
    match draw.one("none", "selective", "selective", "selective", "full"):
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": draw.several(*LABELS)}
        case "full":
            method = {"recompute_method": draw.one("uniform", "block"), "recompute_num_layers": draw.one(1, 2, layers)}
            return {"recompute_granularity": "full", **method}
    return {}


def _training(draw: Draw, model: Mapping[str, Any]) -> dict[str, Any]:
    distributed, reduces = draw.chance(0.85), draw.chance(0.7)
    data_parallel = {
        "use_distributed_optimizer": distributed,
        "grad_reduce_in_fp32": draw.chance(0.4),
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": distributed and reduces and draw.chance(0.7),
        "average_in_collective": draw.chance(0.5),
        "num_distributed_optimizer_instances": draw.one(1, 1, 1, 2) if distributed else 1,
    }
    software = {"transformer_engine": draw.one("2.20.2", "2.20.2", "2.18.0", "2.14.0")}
    return {
        "optimizer": _optimizer(draw, distributed),
        "kernels": _kernels(draw, model),
        "data_parallel": data_parallel,
        "software": software,
        "gpu": draw.one("h100-80gb", "h200-141gb"),
    }


def _optimizer(draw: Draw, distributed: bool) -> dict[str, Any]:
    if not distributed:
        return {"optimizer": draw.one("adam", "sgd")}
    optimizer = {"use_precision_aware_optimizer": draw.chance(0.5), "fp8_recipe": draw.one(None, None, "tensorwise")}
    if optimizer["use_precision_aware_optimizer"]:
        optimizer |= {"exp_avg_dtype": draw.one("fp32", "bf16", "fp16"), "main_params_dtype": draw.one("fp32", "fp16")}
        optimizer |= {"exp_avg_sq_dtype": draw.one("fp32", "bf16", "fp16"), "store_param_remainders": draw.chance(0.6)}
        optimizer |= {"main_grads_dtype": draw.one("fp32", "bf16")}
    return optimizer


def _kernels(draw: Draw, model: Mapping[str, Any]) -> dict[str, Any]:
    """Fused activations where there is a kernel."""
    name, gated, experts = model["activation_func"], model["gated_linear_unit"], "mixture_of_experts" in model
    fusible = {"silu": gated, "gelu": not experts and (gated or model["add_bias_linear"]), "squared_relu": False}
    return {
        "attention_backend": draw.one("fused", "fused", "flash", "unfused"),
        "bias_activation_fusion": fusible[name] and draw.chance(0.7),
        "use_fused_weighted_squared_relu": name == "squared_relu" and not gated and draw.chance(0.5),
        "bias_dropout_fusion": draw.chance(0.8),
        "apply_rope_fusion": "multi_latent_attention" not in model and draw.chance(0.3),
        "gradient_accumulation_fusion": draw.chance(0.8),
        "cross_entropy_loss_fusion": draw.chance(0.75),
        "cross_entropy_fusion_impl": draw.one("te", "native"),
        "moe_token_dispatcher_type": draw.one("alltoall", "alltoall", "allgather", "flex"),
        "moe_permute_fusion": draw.chance(0.7),
        "moe_router_fusion": draw.chance(0.2),
        "moe_shared_expert_overlap": draw.chance(0.3),
    }


def valid(draw: Draw) -> Workload:
    """A drawn workload that the rules let pass."""
    while True:
        try:
            return Workload.from_mapping(drawn(draw))
        except InputError:
            continue


def compared(number: int, workload: Workload, server: TraceServer) -> Outcome:
    """Both sides of every stage; the one that disagrees most counts."""
    try:
        errors = max((pair.agreement for pair in stages(workload, server)), key=lambda each: each.severity)
    except LabkitError as error:
        return Outcome(number, workload, None, str(error))
    except Exception as error:  # noqa: BLE001 (an estimate that fails is what is looked for)
        return Outcome(number, workload, None, f"{type(error).__name__}: {error}")
    return Outcome(number, workload, errors)


def line(outcome: Outcome) -> str:
    """One case in a line."""
    if outcome.errors is None:
        return f"{outcome.number:4d} FAILED {outcome.failure}"
    errors = outcome.errors
    return (
        f"{outcome.number:4d} {'ok  ' if errors.holds else 'MISS'} static {errors.between_steps:+.3%} "
        f"retained {errors.retained:+.3%} peak {errors.peak:+.3%} phases {errors.phase:+.3%} in {errors.worst_phase}"
    )


def as_yaml(workload: Workload) -> str:
    """What it states beside the defaults."""
    stated = workload.model_dump(mode="json", exclude_defaults=True)
    stated["batch"] = workload.batch.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(stated, sort_keys=False)


def main(arguments: list[str]) -> int:
    """Draw, compare, print; 1 if anything missed its tolerance or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--worst", type=int, default=5, help="how many to print as YAML")
    options = parser.parse_args(arguments)
    draw, outcomes, started = Draw(options.seed), [], time.monotonic()
    with TraceServer() as server:
        for number in range(options.cases):
            outcomes.append(compared(number, valid(draw), server))
            print(line(outcomes[-1]), flush=True)
    missed = [outcome for outcome in outcomes if outcome.severity > 1]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} agree, {time.monotonic() - started:.0f} s")
    for outcome in sorted(missed, key=lambda each: -each.severity)[: options.worst]:
        print(f"\n# {line(outcome).strip()}\n{as_yaml(outcome.workload)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
