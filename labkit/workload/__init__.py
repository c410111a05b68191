"""What is run: `Workload` and its parts. Knows nothing of bytes, imports no torch."""

from labkit.workload.batch import Batch, Packed
from labkit.workload.finding import Finding
from labkit.workload.launch import Launch
from labkit.workload.model import GatedDeltaNet, LayerKind, Mamba, MixtureOfExperts, Model, MultiLatentAttention
from labkit.workload.parallelism import Parallelism
from labkit.workload.recompute import RECOMPUTE_MODULES, Recompute
from labkit.workload.routing import Routing
from labkit.workload.runtime import Lora
from labkit.workload.training import DataParallel, Kernels, Optimizer, Software, Training
from labkit.workload.workload import Workload

__all__ = [
    "RECOMPUTE_MODULES",
    "Batch",
    "DataParallel",
    "Finding",
    "GatedDeltaNet",
    "Kernels",
    "Launch",
    "LayerKind",
    "Lora",
    "Mamba",
    "MixtureOfExperts",
    "Model",
    "MultiLatentAttention",
    "Optimizer",
    "Packed",
    "Parallelism",
    "Recompute",
    "Routing",
    "Software",
    "Training",
    "Workload",
]
