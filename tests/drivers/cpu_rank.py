"""A rank of the GPU driver on a CPU: `labkit.drivers.cuda.rank` as it is, over gloo, on a device that counts storages.

`LABKIT_TEST_FAULT` (JSON: rank, iteration, phase, does) makes one rank fail where that phase begins.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.drivers.cuda.leash import leave_with_the_launcher
from tests.drivers.real_cpu import CudaAsCpu, Storages, prepare_megatron, replace_cuda

if TYPE_CHECKING:
    from labkit.drivers.cuda.device import Device

RESERVED = 2**20


class Counted(Storages):
    """Storages with their peak, and a limit that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.limit: int | None = None
        self.observe: Callable[[int], None] = lambda requested: None

    def grown(self) -> None:
        self.peak = max(self.peak, self.bytes)
        if self.limit is not None and self.bytes > self.limit:
            self.observe(self.bytes - self.limit)
            self.limit = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.\nNo more lines.")


def device(counted: Counted) -> "Device":
    """The CPU with the face of a GPU."""
    from labkit.drivers.cuda.device import Device

    class Cpu(Face, Device):
        pass

    return Cpu(counted)


class Face:
    """What the driver asks of a GPU."""

    name = "CPU"
    versions = {"CUDA": "none"}
    total_bytes = free_bytes = 8 * 2**30

    def __init__(self, counted: Counted) -> None:
        fault = json.loads(os.environ.get("LABKIT_TEST_FAULT", "{}"))
        self._fault = fault if int(os.environ["RANK"]) == fault.get("rank") else {}
        self._counted = counted
        self._begun = 0

    def join(self, timeout: timedelta) -> None:
        dist.init_process_group("gloo", timeout=timeout)

    def synchronize(self) -> None:
        pass

    def begin_peak(self) -> None:
        self._counted.peak = self._counted.bytes
        if self._begun == self._fault.get("at"):
            _fail(self._fault["does"], self._counted)
        self._begun += 1

    @property
    def allocated_bytes(self) -> int:
        return self._counted.bytes

    @property
    def reserved_bytes(self) -> int:
        return self._counted.bytes + RESERVED

    @property
    def peak_allocated_bytes(self) -> int:
        return self._counted.peak

    @property
    def peak_reserved_bytes(self) -> int:
        return self._counted.peak + RESERVED

    def on_out_of_memory(self, observe: Callable[[int], None]) -> None:
        self._counted.observe = observe

    def record_history(self) -> None:
        pass

    def snapshot(self, path: Path) -> None:
        path.write_bytes(b"a snapshot")


def _fail(does: str, counted: Counted) -> None:
    if does == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif does == "hangs":
        time.sleep(3600)
    elif does == "oom":
        counted.limit = counted.bytes
    elif does == "cuda_error":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    elif does == "not finite":
        _spoil()
    elif does == "exits":
        sys.stderr.write("a library gave up\n")
        sys.stderr.flush()
        os._exit(3)
    else:
        raise AssertionError(does)


def _spoil() -> None:
    """From here on the loss is no number."""
    from labkit.drivers import step

    mean = step._mean_loss

    def spoiled(loss_mask: Any, losses: torch.Tensor) -> Any:
        return mean(loss_mask, losses * float("nan"))

    step._mean_loss = spoiled


def main(folder: Path) -> None:
    """As `labkit.drivers.cuda.rank` does it."""
    leave_with_the_launcher()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    replace_cuda()
    prepare_megatron()
    from labkit.drivers.cuda import rank

    counted = Counted()
    with CudaAsCpu(), counted:
        rank.main(folder, lambda: device(counted))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
