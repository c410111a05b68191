"""All that the driver asks of a GPU."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Device:
    """This rank's GPU, with PyTorch's caching allocator on it."""

    def __init__(self) -> None:
        self._index = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self._index)

    def join(self, timeout: timedelta) -> None:
        """Meet the other ranks, over NCCL."""
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", self._index))

    @property
    def name(self) -> str:
        """Such as `NVIDIA H200`."""
        return torch.cuda.get_device_name(self._index)

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that only a process with a GPU sees."""
        nccl = torch.cuda.nccl.version()
        return {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, nccl)),
        }

    def synchronize(self) -> None:
        """Wait until it has done all it was given."""
        torch.cuda.synchronize()

    def begin_peak(self) -> None:
        """The peaks count from here."""
        torch.cuda.reset_peak_memory_stats()

    @property
    def allocated_bytes(self) -> int:
        """Blocks in use."""
        return torch.cuda.memory_allocated()

    @property
    def reserved_bytes(self) -> int:
        """Segments held."""
        return torch.cuda.memory_reserved()

    @property
    def peak_allocated_bytes(self) -> int:
        """The most blocks in use since `begin_peak`."""
        return torch.cuda.max_memory_allocated()

    @property
    def peak_reserved_bytes(self) -> int:
        """The most segments held since `begin_peak`."""
        return torch.cuda.max_memory_reserved()

    @property
    def free_bytes(self) -> int:
        """Of the whole GPU."""
        return torch.cuda.mem_get_info()[0]

    @property
    def total_bytes(self) -> int:
        """Of the whole GPU."""
        return torch.cuda.mem_get_info()[1]

    def on_out_of_memory(self, observe: Callable[[int], None]) -> None:
        """Call `observe` with the bytes asked for whenever the allocator gives up, before it raises."""
        attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        attach(lambda _device, requested, _allocated, _free: observe(requested))

    def record_history(self) -> None:
        """Keep who allocated what, for snapshots."""
        torch.cuda.memory._record_memory_history()

    def snapshot(self, path: Path) -> None:
        """Write what is allocated and what led there (pytorch.org/memory_viz reads it)."""
        torch.cuda.memory._dump_snapshot(str(path))
