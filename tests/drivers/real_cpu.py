"""All ranks of workloads, really trained on the CPU: `python -m tests.drivers.real_cpu FOLDER`.

Data, gloo's collectives between processes and autograd are real; so are Megatron Core's modules, built and stepped by
labkit's own code. Only the answers of `torch.cuda` are replaced: there is one device, and it is the CPU. Each folder in
`FOLDER` has a `workload.json`; of each moment at which a phase begins, `RANK.json` there gets the storages that are
alive. Imports take seconds, so a rank is a fork of the process that has done them.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from labkit import Workload
from labkit.drivers.trace.cuda_surface import _Device, _is_cuda

CPU = torch.device("cpu")
STEPS = 2


class Idle:
    """A stream or event on which nothing is ever under way."""

    stream_id = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class CudaAsCpu(TorchFunctionMode):
    """Answers requests for tensors on CUDA with tensors on the CPU; what moves there is a copy, as it would be."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.cuda:
            return args[0].clone()
        options = {name: CPU if _is_cuda(value) else value for name, value in (kwargs or {}).items()}
        return function(*(CPU if _is_cuda(argument) else argument for argument in args), **options)


class Storages(TorchDispatchMode):
    """The storages of all tensors that operators have returned and that are alive: [dtype, bytes] of each."""

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[Any]]] = {}
        self.bytes = 0
        """Of those alive."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            for tensor in item if isinstance(item, list) else [item]:
                if isinstance(tensor, torch.Tensor):
                    self._seen(tensor)
        return result

    def _seen(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._living and self._living[key][0]() is storage:
            return

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if key in self._living and self._living[key][0] is reference:
                self.bytes -= self._living.pop(key)[1][1]

        self._living[key] = weakref.ref(storage, died), [str(tensor.dtype)[6:], storage.nbytes()]
        self.bytes += storage.nbytes()
        self.grown()

    def grown(self) -> None:
        """More is alive than before."""

    def alive(self, without: set[int]) -> list[list[Any]]:
        """Those that hold anything, but for some, by their address."""
        return [held for key, (_, held) in self._living.items() if held[1] and key not in without]


def replace_cuda() -> None:
    """What Megatron asks the device."""
    idle = Idle()
    properties = SimpleNamespace(name="CPU", major=9, minor=0, multi_processor_count=1)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": CPU,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "current_stream": idle,
        "set_device": None,
        "synchronize": None,
        "manual_seed": None,
        "is_current_stream_capturing": False,
        "stream": contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Idle),
        (torch.cuda, "Event", Idle),
        (torch.cuda, "device", _Device),
        (torch.cuda, "get_rng_state", _rng_state),  # the device's generator is the CPU's
        (torch.cuda.nvtx, "range_push", _always(None)),
        (torch.cuda.nvtx, "range_pop", _always(None)),
        (torch.accelerator, "is_available", _always(False)),
        (torch.Tensor, "record_stream", _always(None)),
        (torch.Tensor, "type", _tensor_type(torch.Tensor.type)),
        # A function mode is off while it handles a call, and so would be all through a backward it had handled.
        (torch.autograd, "has_torch_function", _always(False)),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def _tensor_type(original: Any) -> Any:
    names = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    return lambda self, *args: original(self, *args) if args else names[self.dtype]


def _always(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


def _rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def prepare_megatron() -> None:
    """Megatron without CUDA's libraries: its own layers, PyTorch's norms and optimizer."""
    for library in ("transformer_engine", "apex", "amp_C", "flash_attn", "fla", "mamba_ssm", "causal_conv1d"):
        sys.modules[library] = None  # type: ignore[assignment]
    from megatron.core.tensor_parallel import random

    from labkit.drivers import step

    replaced: list[tuple[Any, str, Any]] = [
        (random, "_get_cuda_rng_state", _rng_state),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (step, "host_batches", _unseen(step.host_batches)),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def _unseen(host_batches: Any) -> Any:
    """Host memory is not the device's, though here both are the CPU's."""

    def unseen(workload: Workload) -> Iterator[Any]:
        batches = host_batches(workload)
        while True:
            with _disable_current_modes():
                batch = next(batches)
            yield batch

    return unseen


def train(workload: Workload, folder: Path) -> dict[str, Any]:
    """Take the steps; returns the losses, and by iteration and phase what is alive when it begins."""
    from labkit.drivers.arguments import megatron_arguments
    from labkit.drivers.cell import Cell
    from labkit.drivers.watch import Watch

    gc.disable()
    alive: list[tuple[int, str, list[Any]]] = []
    losses: list[float] = []
    with CudaAsCpu(), Storages() as storages:
        arguments = megatron_arguments(workload, num_microbatches=workload.distinct_microbatches)
        cell = Cell(workload, arguments, Watch())
        optimizer: Any = cell.optimizer

        def phase(iteration: int, name: str) -> None:
            # gloo's threads let go of a collective's tensors a moment after it is over (`ProcessGroupGloo::runLoop`).
            time.sleep(0.2)
            # AdamW counts steps in tensors that lie on the host with a GPU too (`Adam._init_group`).
            states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
            counts = {state["step"].untyped_storage()._cdata for state in states}
            alive.append((iteration, name, storages.alive(without=counts)))

        step = cell.step(phase)
        for _ in range(STEPS):
            gc.collect()
            loss = step.run()
            assert loss is not None
            losses.append(float(loss))
            del loss
    return {"alive": alive, "losses": losses}


def main(workload: Workload, rank: int, folder: Path) -> None:
    """Train and write the result."""
    world_size = workload.parallelism.world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    result = train(workload, folder)
    (folder / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def run_all(folder: Path) -> None:
    """One workload after the other, its ranks side by side."""
    torch.set_num_threads(1)
    replace_cuda()
    prepare_megatron()
    process = multiprocessing.get_context("fork").Process
    for cell in sorted(folder.iterdir()):
        workload = Workload.from_mapping(json.loads((cell / "workload.json").read_text(encoding="utf-8")))
        ranks = [process(target=main, args=(workload, rank, cell)) for rank in range(workload.parallelism.world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
