"""What a rank's process finds in its environment: the same for a trace and for a GPU. Imports no torch."""

from labkit.workload import Workload


def variables(workload: Workload) -> dict[str, str]:
    """Variables that decide what Megatron, Transformer Engine and PyTorch do, from the workload's fields.

    `CUDA_DEVICE_MAX_CONNECTIONS` is 1, as Megatron asks before Blackwell, but with Megatron-FSDP, which asks for it to
    be unset.
    """
    training, launch = workload.training, workload.launch
    stated: dict[str, str] = {}
    if launch is None or "--use-megatron-fsdp" not in launch.words:
        stated["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if training.kernels.deterministic_attention:
        stated["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    if training.cublas_workspace_config is not None:
        stated["CUBLAS_WORKSPACE_CONFIG"] = training.cublas_workspace_config
    return {**stated, **({} if launch is None else launch.variables)}
