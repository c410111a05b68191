"""How the step is carried out: precision, kernels, data parallelism, optimizer, hardware, software."""

import re
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, PositiveInt

from labkit.workload.base import Part
from labkit.workload.behaviour import large_cublas_workspace
from labkit.workload.caching import AllocatorSettings
from labkit.workload.gpu import GPUS
from labkit.workload.runtime import Lora, Runtime

FloatName = Literal["fp32", "bf16"]
FLOAT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class Kernels(Part):
    """Choices among Megatron Core's and Transformer Engine's implementations (`TransformerConfig`)."""

    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Whose layers: Transformer Engine's or Megatron Core's own, whose attention is unfused."""
    attention_backend: Literal["fused", "flash", "unfused", "auto"] = "fused"
    """`auto`: what Transformer Engine chooses (`labkit.workload.attention_backends`)."""
    masked_softmax_fusion: bool = True
    """Own layers: APEX's kernel for mask and softmax where it takes the lengths."""
    attention_softmax_in_fp32: bool = False
    """Own layers: without that kernel, softmax in fp32."""
    apply_query_key_layer_scaling: bool = False
    """Own layers: scores are scaled by the layer's number, and softmax is in fp32."""
    persist_layer_norm: bool = True
    """Own layers: APEX's persistent kernel where it has the hidden size."""
    deterministic_mode: bool = False
    """Deterministic operations throughout (`--deterministic-mode`), attention's included."""
    deterministic_attention: bool = False
    """Those of attention alone (`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`)."""
    bias_activation_fusion: bool = True
    use_fused_weighted_squared_relu: bool = False
    """One kernel for squared ReLU and the weights of routed rows, in experts."""
    bias_dropout_fusion: bool = True
    apply_rope_fusion: bool = False
    gradient_accumulation_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: Literal["te", "native"] = "te"
    moe_grouped_gemm: bool = True
    """The products of all experts of a rank in one call; otherwise one expert after the other."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    moe_flex_dispatcher_backend: Literal["hybridep"] = "hybridep"
    moe_permute_fusion: bool = True
    moe_router_fusion: bool = False
    moe_shared_expert_overlap: bool = False

    @property
    def local(self) -> bool:
        """Layers are Megatron Core's own."""
        return self.transformer_impl == "local"

    @property
    def groups_experts(self) -> bool:
        """The products of a rank's experts are one call; own layers have none such (`LocalSpecProvider`)."""
        return self.moe_grouped_gemm and not self.local

    @property
    def softmax_in_fp32(self) -> bool:
        """Own layers' softmax is in fp32 outside of its kernel (`TransformerConfig.__post_init__`)."""
        return self.attention_softmax_in_fp32 or self.apply_query_key_layer_scaling

    @property
    def attends_deterministically(self) -> bool:
        """Attention's backward is deterministic."""
        return self.deterministic_mode or self.deterministic_attention


class DataParallel(Part):
    """Megatron Core `DistributedDataParallelConfig`."""

    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    average_in_collective: bool = True
    num_distributed_optimizer_instances: PositiveInt = 1
    """Groups of data-parallel ranks that each share the whole optimizer's state out among themselves."""


class Optimizer(Part):
    """Megatron Core `OptimizerConfig`, as far as it decides memory."""

    optimizer: Literal["adam", "sgd"] = "adam"
    use_precision_aware_optimizer: bool = False
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    main_grads_dtype: FloatName = "fp32"
    exp_avg_dtype: FloatName | Literal["fp16"] = "fp32"
    exp_avg_sq_dtype: FloatName | Literal["fp16"] = "fp32"
    store_param_remainders: bool = True
    """Keep only the low 16 bits of the fp32 main parameters beside the bf16 ones (where the optimizer holds them)."""
    fp8_recipe: Literal["delayed", "tensorwise"] | None = None
    """A recipe other than `delayed` makes Megatron Core, not Transformer Engine, hold the main
    parameters, and copy the gradients to fp32 in the step, even when nothing runs in FP8."""

    @property
    def main_params_in_te(self) -> bool:
        """Transformer Engine's FusedAdam holds the main parameters and reads gradients where they lie.

        Source: `OptimizerConfig.use_precision_aware_optimizer_no_fp8_or_ds_fp8`.
        """
        copies = self.main_params_dtype == "fp32" and self.fp8_recipe not in (None, "delayed")
        return self.use_precision_aware_optimizer and not copies


class Software(Part):
    """Versions the workload runs under; they decide what is kept (see `labkit.workload.behaviour`)."""

    megatron_core: str = Field(default="0.19.2", max_length=40)
    transformer_engine: str = Field(default="2.20.2", max_length=40)
    torch: str = Field(default="2.14.1", max_length=40)
    apex: bool = True
    """APEX is installed, as in NVIDIA's containers."""


class WorkspaceBytes(NamedTuple):
    """Sizes of the workspaces that libraries keep."""

    gemm: int
    """Transformer Engine's, of one GEMM."""
    cublas: int
    """PyTorch's, of one cuBLAS handle and stream."""


class Training(Part):
    """The training setup."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """Of parameters and activations: Megatron's `--bf16`, or neither that nor `--fp16`, which goes with the launch."""
    kernels: Kernels = Kernels()
    data_parallel: DataParallel = DataParallel()
    optimizer: Optimizer = Optimizer()
    gpu: Literal["h100-80gb", "h200-141gb", "a100-40gb", "a100-80gb", "b200-180gb", "gb200-186gb"] = "h100-80gb"
    cublas_workspace_config: str | None = Field(default=None, pattern=r"^(:[0-9]{1,6}:[0-9]{1,3})+$", max_length=100)
    """The environment's `CUBLAS_WORKSPACE_CONFIG`, `:KIB:COUNT` once or several times; None: unset."""
    allocator: AllocatorSettings = AllocatorSettings()
    """Of PyTorch's caching allocator."""
    software: Software = Software()
    runtime: Runtime = "megatron"
    lora: Lora | None = None
    """For the `lora` runtime, which needs it."""

    @cached_property
    def workspaces(self) -> WorkspaceBytes:
        """Of the libraries on this GPU."""
        gpu, config = GPUS[self.gpu], self.cublas_workspace_config
        if config is None and self.kernels.deterministic_mode:
            config = ":4096:8"  # `megatron.training.determinism`
        if config is None:
            large = large_cublas_workspace(self.software, gpu.compute_capability)
            config = ":4096:8" if large else ":4096:2:16:8"
        cublas = sum(int(kib) * int(count) for kib, count in re.findall(r":(\d+):(\d+)", config)) * 1024
        return WorkspaceBytes(gpu.gemm_workspace_bytes, cublas)

    @property
    def steps_optimizer(self) -> bool:
        """The optimizer steps after backward."""
        return self.lora is None or self.lora.optimizer_step

    @property
    def differentiates(self) -> bool:
        """A backward pass follows."""
        return self.lora is None or not self.lora.no_grad

    @property
    def fuses_activation(self) -> bool:
        """An MLP's activation is one kernel."""
        return self.kernels.bias_activation_fusion or self.compiles_layers

    @property
    def compiles_layers(self) -> bool:
        """Whole layers run under `torch.compile`: pointwise chains keep no intermediates."""
        return self.lora is not None and self.lora.compile_layers
