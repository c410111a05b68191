"""Megatron's validated arguments and its configuration as fields of a `Workload`, and what no field expresses.

The inverse of `labkit.drivers.arguments`. Everything is stated, so that Megatron's defaults hold and not labkit's.
What has no field goes into `launch` as it was written: a trace runs it, an estimate does not price it.
"""

import shlex
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from labkit.errors import InputError
from labkit.importers.shell import gaps
from labkit.importers.silent import decides_no_memory, is_conditional
from labkit.workload.caching import AllocatorSettings
from labkit.workload.gpu import GPUS
from labkit.workload.launch import FIELD_OF_VARIABLE, READ_FROM_ENVIRONMENT, RESERVED_ALONE
from labkit.workload.workload import first_problem

_GPT2_VOCABULARY = 50257
_LLAMA2_VOCABULARY = 32000
_DEFAULT_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
_GPUS = {
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "a100": "a100-80gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
}


class Fields(NamedTuple):
    """A workload as a mapping, and what it leaves out."""

    mapping: dict[str, Any]
    not_priced: list[str]
    """What `launch` carries along, and how an estimate takes it."""
    not_expressed: list[str]
    """What is nowhere in the mapping."""
    assumed: list[str]


class Arguments(NamedTuple):
    """What Megatron made of the arguments (`labkit.drivers.trace.megatron_args`)."""

    values: Mapping[str, Any]
    """Every argument after validation."""
    given: Mapping[str, Any]
    """Those that were given and differ from Megatron's default, before validation."""
    options: Mapping[str, str]
    """How each is written on a command line."""
    config: Mapping[str, Any]
    """Fields of Megatron's `TransformerConfig`."""
    written: Mapping[str, list[str]]
    """The words of each that was given; a gap in them (`labkit.importers.shell`) is a value that is not known."""


_SAME = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads attention_output_gate qk_layernorm "
    "normalization gated_linear_unit add_bias_linear hidden_dropout attention_dropout",
    "attention": "num_query_groups kv_channels add_qkv_bias",
    "multi_latent_attention": "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type",
    "gated_delta_net": "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads",
    "mamba": "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
    "mixture_of_experts": "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate moe_latent_size moe_layer_freq moe_router_score_function moe_router_pre_softmax "
    "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity moe_token_drop_policy",
    "parallelism": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size sequence_parallel cp_comm_type virtual_pipeline_model_parallel_size "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split",
    "kernels": "attention_backend deterministic_mode bias_activation_fusion use_fused_weighted_squared_relu "
    "bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion cross_entropy_loss_fusion "
    "cross_entropy_fusion_impl",
    "local_kernels": "masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling persist_layer_norm",
    "expert_kernels": "moe_grouped_gemm moe_token_dispatcher_type moe_permute_fusion moe_router_fusion "
    "moe_shared_expert_overlap",
    "recompute": "recompute_granularity recompute_modules recompute_method recompute_num_layers",
    "optimizer": "optimizer use_precision_aware_optimizer main_params_dtype main_grads_dtype exp_avg_dtype "
    "exp_avg_sq_dtype",
}
"""Fields that have the same name and meaning on both sides."""

_OTHER = """
    pipeline_model_parallel_layout
    num_experts group_query_attention multi_latent_attention experimental_attention_variant
    linear_attention_freq hybrid_layer_pattern hybrid_override_pattern mtp_hybrid_override_pattern is_hybrid_model
    mtp_num_layers swiglu squared_relu bias_gelu_fusion bias_swiglu_fusion position_embedding_type
    use_rotary_position_embeddings add_position_embedding rotary_base rotary_percent
    yarn_original_max_position_embeddings
    untie_embeddings_and_output_weights vocab_size padded_vocab_size pad_vocab_size make_vocab_size_divisible_by
    max_position_embeddings seq_length micro_batch_size global_batch_size decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    microbatch_group_size_per_vp_stage expert_tensor_parallel_size moe_layer_recompute recompute_activations
    moe_grouped_gemm moe_flex_dispatcher_backend moe_enable_deepep bf16 use_distributed_optimizer overlap_grad_reduce
    overlap_param_gather ddp_average_in_collective num_distributed_optimizer_instances
    accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 fp8_recipe
    create_attention_mask_in_dataloader sft dataloader_inter_document_masking spec hidden_size
    eval_global_batch_size eval_micro_batch_size transformer_impl no_persist_layer_norm
"""
EXPRESSED = frozenset(" ".join((*_SAME.values(), _OTHER)).split())
"""Arguments (`dest`) that become fields, or that `fields` itself judges."""

_MEANING = {
    "transformer_impl": "layers for inference; taken as Transformer Engine's",
    "fp8": "FP8 copies of weights and activations; taken as bf16 throughout",
    "fp8_param_gather": "parameters in FP8; taken as bf16",
    "fp4": "FP4 copies of weights and activations; taken as bf16 throughout",
    "fp16": "priced as bf16, whose tensors have the same sizes; a loss scaler's are left out",
    "cuda_graph_impl": "memory pools of CUDA graphs",
    "use_megatron_fsdp": "parameters sharded by Megatron-FSDP; taken as Megatron's own data parallelism",
    "use_torch_fsdp2": "parameters sharded by PyTorch's FSDP2; taken as Megatron's own data parallelism",
    "fine_grained_activation_offloading": "activations moved to the host; taken as kept",
    "cpu_offloading_num_layers": "activations moved to the host; taken as kept",
    "optimizer_cpu_offload": "optimizer state on the host; taken as on the GPU",
    "overlap_moe_expert_parallel_comm": "two micro-batches under way at once; taken as one",
    "delay_wgrad_compute": "inputs of linears wait for their weight gradients; taken as computed at once",
    "use_transformer_engine_op_fuser": "MLPs of fused operations; taken as Transformer Engine's modules",
    "use_checkpoint_args": "the checkpoint's own arguments stand in for these; give those",
    "rotary_interleaved": "taken as rotary halves side by side",
    "qk_l2_norm": "norms of queries and keys without weights; taken as none",
    "tp_comm_overlap": "user buffers of tensor-parallel overlap",
    "nccl_ub": "gradient and parameter buffers in NCCL's own pool",
    "overlap_p2p_comm": "taken as overlapped where stages interleave",
    "overlap_p2p_comm_warmup_flush": "receive buffers of overlapped warm-up",
    "log_num_zeros_in_grad": "a comparison of each gradient",
    "rampup_batch_size": "taken as the full batch from the start",
    "freeze_all_layers": "taken as trained",
    "skip_train": "taken as training",
    "window_size": "taken as attention to everything before",
    "window_attn_skip_freq": "taken as attention to everything before",
    "softmax_type": "sinks, one number a head; taken as none",
    "disable_jit_fuser": "compiled regions run eagerly and keep more",
}
_WITH_MEGATRON_FSDP = ("load", "finetune", "no_load_optim", "log_params_norm")
"""Silent arguments that decide memory with Megatron-FSDP: looking for a checkpoint makes the optimizer's state, and the
norm of the parameters frees those that were gathered."""
_ENVIRONMENT = {
    "NVTE_FLASH_ATTN": ("1", "flash-attention is switched off"),
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": ("0", "another kernel for the experts' MLP"),
}
"""Variables that change what is allocated, the value that is labkit's, and what another one means."""
_WORKSPACES, _NONDETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SILENT_VARIABLES = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", *FIELD_OF_VARIABLE)
_PACKING = ("sft", "dataloader_inter_document_masking")
_BATCH = ("seq_length", "micro_batch_size", "global_batch_size", "create_attention_mask_in_dataloader")


def known_gpu(stated: str) -> str | None:
    """The GPU of that name, or of that kind, if there is one."""
    gpu = _GPUS.get(stated.lower(), stated)
    return gpu if gpu in GPUS else None


def fields(read: Arguments, *, name: str, gpu: str, environment: Mapping[str, str]) -> Fields:
    """The workload that Megatron's reading of the arguments describes.

    Raises:
        InputError: the model is none labkit has, or its vocabulary is not known.
    """
    return _Mapping(read).workload(name, gpu, environment)


class _Mapping:
    def __init__(self, read: Arguments) -> None:
        self.values, self.given, self.options, self.config, self.written = read
        self.launched: dict[str, str] = {}
        self.priced_not: list[str] = []
        self.lost: list[str] = []
        self.assumed: list[str] = []

    def workload(self, name: str, gpu: str, environment: Mapping[str, str]) -> Fields:
        self._refuse()
        mapping = {
            "model": {"name": name, **self._model()},
            "parallelism": self._parallelism(),
            "batch": self._batch(),
            "recompute": self._recompute(),
            "training": {
                "precision": self._precision(),
                "gpu": self._gpu(gpu),
                "cublas_workspace_config": environment.get(_WORKSPACES) or None,
                "allocator": self._allocator(environment),
                "kernels": self._kernels(environment),
                "data_parallel": self._data_parallel(),
                "optimizer": self._optimizer(),
            },
        }
        self._own_layers()
        variables = self._environment(environment)
        self._rest()
        if self.launched or variables:
            mapping["launch"] = {"arguments": list(self.launched.values()), "environment": variables}
        return Fields(mapping, self.priced_not, self.lost, self.assumed)

    def _lose(self, dest: str, meaning: str, value: Any = None) -> None:
        """Carry an argument that no field expresses along as it was written, or report that it is lost."""
        shown = self.given.get(dest) if value is None else value
        words = self.written.get(dest)
        if words:
            self.launched[dest] = shlex.join(words)
        if words and self.options[dest] in RESERVED_ALONE:
            return
        (self.priced_not if words else self.lost).append(f"{self.options[dest]}{_as_written(shown)}: {meaning}")

    def _same(self, part: str) -> dict[str, Any]:
        return {name: self.config.get(name, self.values.get(name)) for name in _SAME[part].split()}

    def _refuse(self) -> None:
        if self.values.get("decoder_num_layers") is not None or "encoder_num_layers" in self.given:
            raise InputError(
                "--encoder-num-layers and --decoder-num-layers make an encoder and a decoder; labkit has decoders"
            )
        variant = self.config["experimental_attention_variant"]
        if variant not in (None, "gated_delta_net"):
            raise InputError(f"--experimental-attention-variant {variant}: labkit has gated_delta_net alone")

    def _model(self) -> dict[str, Any]:
        config, values = self.config, self.values
        latent = bool(config["multi_latent_attention"])
        pattern = values["hybrid_layer_pattern"]
        model = {
            **self._same("model"),
            **self._vocabulary(),
            **self._positions(latent=latent),
            "activation_func": self._activation(),
            "untie_embeddings_and_output_weights": values["untie_embeddings_and_output_weights"],
            "mtp_num_layers": config["mtp_num_layers"] or None,
            "hybrid_layer_pattern": pattern,
        }
        if latent:
            model["multi_latent_attention"] = self._same("multi_latent_attention")
        else:
            model |= self._same("attention")
        if "G" in (pattern or "") or config["experimental_attention_variant"] == "gated_delta_net":
            frequency = None if pattern else config["linear_attention_freq"]
            model["gated_delta_net"] = {"linear_attention_freq": frequency, **self._same("gated_delta_net")}
        if "M" in (pattern or ""):
            model["mamba"] = self._same("mamba")
        if config["num_moe_experts"]:
            model["mixture_of_experts"] = self._experts()
        return model

    def _batch(self) -> dict[str, Any]:
        batch = {key: self.values[key] for key in _BATCH}
        packing = next((self.options[dest] for dest in _PACKING if self.values[dest]), None)
        if packing is None:
            return batch
        length = batch["seq_length"]
        batch["create_attention_mask_in_dataloader"] = False  # which Megatron's packing data sets do not make
        if batch["micro_batch_size"] > 1:
            self.lost.append(f"{packing}: samples packed into one row; taken as whole sequences of {length} tokens")
            return batch
        said = "whose lengths only the data say; write them in batch.packed.lengths"
        self.assumed.append(f"{packing} packs sequences, {said}: taken as one of {length} tokens")
        return {**batch, "packed": {"lengths": [length]}}

    def _vocabulary(self) -> dict[str, int]:
        """The vocabulary before padding, and what it is padded to a multiple of."""
        values, divisor = self.values, self.values["make_vocab_size_divisible_by"]
        if values["padded_vocab_size"] is not None:
            return {"vocab_size": values["padded_vocab_size"], "make_vocab_size_divisible_by": 1}
        size, tokenizer = values["vocab_size"], values["tokenizer_type"]
        if size is None and tokenizer in (None, "GPT2BPETokenizer"):
            size = _GPT2_VOCABULARY
            if tokenizer is None:
                self.assumed.append("no vocabulary is given: that of GPT2BPETokenizer, 50257 tokens")
        if size is None and tokenizer == "Llama2Tokenizer":
            size = _LLAMA2_VOCABULARY
            self.assumed.append("no vocabulary is given: that of Llama 2, 32000 tokens")
        if size is None:
            raise InputError(f"--tokenizer-type {tokenizer}: its vocabulary is not known here; add --vocab-size")
        return {"vocab_size": size, "make_vocab_size_divisible_by": divisor if values["pad_vocab_size"] else 1}

    def _positions(self, *, latent: bool) -> dict[str, Any]:
        values = self.values
        kind = values["position_embedding_type"]
        if kind not in ("learned_absolute", "rope", "yarn", "none"):
            self._lose("position_embedding_type", "taken as rope")
            kind = "rope"
        longest = values["max_position_embeddings"]
        if kind == "learned_absolute" and longest != values["seq_length"]:
            self._lose(
                "max_position_embeddings", f"a table of so many positions; taken as {values['seq_length']}", longest
            )
        originals = self.config.get("original_max_position_embeddings") if latent else None
        if kind == "yarn":
            originals = values["yarn_original_max_position_embeddings"]
        return {
            "position_embedding_type": kind,
            **({} if originals is None else {"original_max_position_embeddings": originals}),
            "rotary_base": int(values["rotary_base"]),
            "rotary_percent": values["rotary_percent"],
        }

    def _activation(self) -> str:
        name: str = self.config["activation_func"]
        if name not in ("silu", "gelu", "squared_relu"):
            self._lose("quick_geglu", f"taken as gelu, not {name}")
            return "gelu"
        return name

    def _experts(self) -> dict[str, Any]:
        experts = self._same("mixture_of_experts")
        kind = experts["moe_router_load_balancing_type"]
        if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
            self._lose("moe_router_load_balancing_type", "taken as none")
            experts["moe_router_load_balancing_type"] = "none"
            if kind == "sinkhorn" and experts["moe_router_topk"] == 1:
                experts["moe_router_score_function"] = "sigmoid"  # `TopKRouter.sinkhorn_load_balancing`
        if isinstance(experts["moe_aux_loss_coeff"], list):
            experts["moe_aux_loss_coeff"] = max(experts["moe_aux_loss_coeff"], key=float)
        if experts["moe_router_dtype"] not in (None, "fp32"):
            self._lose("moe_router_dtype", "taken as fp32")
            experts["moe_router_dtype"] = "fp32"
        if self.values["hybrid_layer_pattern"]:
            experts["moe_layer_freq"] = 1  # the pattern says which
        return experts

    def _parallelism(self) -> dict[str, Any]:
        layout = {"world_size": self.values["world_size"], **self._same("parallelism")}
        layout["pipeline_model_parallel_layout"] = self.values["pipeline_model_parallel_layout"]
        if layout["cp_comm_type"] == "allgather":
            layout["cp_comm_type"] = "all_gather"
        if layout["cp_comm_type"] not in ("p2p", "a2a", "all_gather"):
            self._lose("cp_comm_type", "taken as p2p in all layers")
            layout["cp_comm_type"] = "p2p"
        if self.config["num_moe_experts"]:
            layout["expert_tensor_parallel_size"] = self.config["expert_tensor_parallel_size"]
        if layout["virtual_pipeline_model_parallel_size"]:
            layout["microbatch_group_size_per_vp_stage"] = self.config["microbatch_group_size_per_vp_stage"]
        return layout

    def _recompute(self) -> dict[str, Any]:
        choice = self._same("recompute")
        if choice["recompute_granularity"] != "selective":
            choice["recompute_modules"] = None
        return choice

    def _kernels(self, environment: Mapping[str, str]) -> dict[str, Any]:
        kernels = self._same("kernels")
        implementation = self.values["transformer_impl"]
        if implementation == "local":
            kernels |= {"transformer_impl": implementation, **self._same("local_kernels")}
        elif implementation != "transformer_engine":
            self._lose("transformer_impl", _MEANING["transformer_impl"], implementation)
        if kernels["attention_backend"] not in ("fused", "flash", "unfused", "auto"):
            kernels["attention_backend"] = "unfused"
            self._lose("attention_backend", "taken as unfused")
        kernels["deterministic_attention"] = environment.get(_NONDETERMINISTIC) == "0"
        return {**kernels, **self._expert_kernels()}

    def _expert_kernels(self) -> dict[str, Any]:
        if not self.config["num_moe_experts"]:
            return {}
        kernels = self._same("expert_kernels")
        backend = self.config["moe_flex_dispatcher_backend"]
        if kernels["moe_token_dispatcher_type"] == "flex" and backend != "hybridep":
            self._lose("moe_flex_dispatcher_backend", "taken as the alltoall dispatcher", backend)
            kernels["moe_token_dispatcher_type"] = "alltoall"
        return kernels

    def _data_parallel(self) -> dict[str, Any]:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        return {
            **{name: self.values[name] for name in names},
            "grad_reduce_in_fp32": self.values["accumulate_allreduce_grads_in_fp32"],
            "average_in_collective": self.values["ddp_average_in_collective"],
            "num_distributed_optimizer_instances": self.values["num_distributed_optimizer_instances"],
        }

    def _optimizer(self) -> dict[str, Any]:
        optimizer = self._same("optimizer")
        if optimizer["optimizer"] not in ("adam", "sgd"):
            self._lose("optimizer", "taken as adam")
            optimizer["optimizer"] = "adam"
        if self.values["fp8_recipe"] != "delayed":
            if self.values["fp8_recipe"] == "tensorwise":
                optimizer["fp8_recipe"] = "tensorwise"
            else:
                self._lose("fp8_recipe", "taken as none")
        if optimizer["optimizer"] == "sgd" and not self.values["sgd_momentum"]:
            self._lose("sgd_momentum", "no momentum; taken as one a parameter")
        if not self.values["clip_grad"]:
            self._lose("clip_grad", "no norm of the gradients; taken as computed")
        return optimizer

    def _gpu(self, stated: str) -> str:
        gpu = known_gpu(stated)
        if stated and gpu is None:
            self.lost.append(f"gpu {stated}: taken as h100-80gb")
        return gpu or "h100-80gb"

    def _precision(self) -> str:
        if self.values["fp16"]:
            self._lose("fp16", _MEANING["fp16"])
        return "bf16" if self.values["fp16"] or self.values["bf16"] else "fp32"

    def _own_layers(self) -> None:
        spec = self.values["spec"]
        if spec and spec != _DEFAULT_SPEC:
            self._lose("spec", "layers of your own; taken as Megatron's")

    def _allocator(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """`AcceleratorAllocatorConfig` reads the older name first."""
        for name in _ALLOCATOR:
            if environment.get(name):
                try:
                    return AllocatorSettings.read(environment[name]).model_dump(exclude_unset=True)
                except ValueError as error:
                    reason = (
                        first_problem(AllocatorSettings, error) if isinstance(error, ValidationError) else str(error)
                    )
                    self.lost.append(f"{name}={environment[name][:80]}: {reason}; taken as unset")
                break
        return {}

    def _environment(self, environment: Mapping[str, str]) -> list[str]:
        """The variables that somebody reads, and what those that matter mean."""
        for name, (same, meaning) in _ENVIRONMENT.items():
            if environment.get(name, same) != same:
                self.priced_not.append(f"{name}={environment[name][:80]}: {meaning}")
        return [
            f"{name}={value}"
            for name, value in environment.items()
            if READ_FROM_ENVIRONMENT.fullmatch(name)
            and not name.startswith(_SILENT_VARIABLES)
            and value != _ENVIRONMENT.get(name, ("",))[0]
        ]

    def _rest(self) -> None:
        for dest, value in self.given.items():
            if dest.startswith("_") or dest not in self.options or dest in EXPRESSED or decides_no_memory(dest):
                continue
            self._lose(dest, _MEANING.get(dest, "labkit has no field for it"), value)
        sharded = _WITH_MEGATRON_FSDP if self.values["use_megatron_fsdp"] else ()
        self._unknown(sharded)
        if self.launched:
            conditional = [
                dest for dest in self.given if (is_conditional(dest) or dest in sharded) and dest in self.written
            ]
            self.launched.update((dest, shlex.join(self.written[dest])) for dest in conditional)

    def _unknown(self, sharded: Collection[str]) -> None:
        """Say which silent arguments were left out, as the machine alone knows their values."""
        left_out = []
        for dest, words in self.written.items():
            why = gaps(" ".join(words))
            if why and dest in sharded:
                self.lost.append(f"{self.options[dest]}: decides memory with --use-megatron-fsdp, and needs {why[0]}")
            elif why:
                left_out.append(f"{self.options[dest]} (needs {why[0]})")
        if left_out:
            self.assumed.append(f"left out, as it decides no memory: {', '.join(left_out)}")


def _as_written(value: Any) -> str:
    """A value behind its option: nothing behind a flag."""
    if value is None or isinstance(value, bool):
        return ""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split())
    return f" {text}" if len(text) <= 80 else f" {text[:77]}..."
