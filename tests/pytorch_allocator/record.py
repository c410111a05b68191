"""A memory snapshot that PyTorch itself writes, of a small training run over a CUDA that has no device.

    LD_PRELOAD=libcuda.so.1 python record.py FILE '{"steps": 2, ...}'

The allocator, the recorded history and the file are PyTorch's. The run is not: its functions have the names, files and
lines of Megatron's, and only ask for memory and let go of it.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
_free = torch._C._cuda_cudaCachingAllocator_raw_delete

CALL = (
    "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1775 _wrapped_call_impl",
    "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1786 _call_impl",
)
TRAIN = (
    "/opt/megatron/pretrain_gpt.py:310 <module>",
    "/opt/megatron/megatron/training/training.py:850 pretrain",
)
STEP = (
    *TRAIN,
    "/opt/megatron/megatron/training/training.py:2100 train",
    "/opt/megatron/megatron/training/training.py:1300 train_step",
    "/opt/megatron/megatron/core/pipeline_parallel/schedules.py:600 forward_backward_no_pipelining",
)
LAYER = (
    *STEP,
    "/opt/megatron/megatron/core/pipeline_parallel/schedules.py:400 forward_step",
    "/opt/megatron/pretrain_gpt.py:180 forward_step",
    *CALL,
    "/opt/megatron/megatron/core/distributed/data_parallel_base.py:22 forward",
    *CALL,
    "/opt/megatron/megatron/core/transformer/module.py:430 forward",
    *CALL,
    "/opt/megatron/megatron/core/models/gpt/gpt_model.py:480 forward",
    *CALL,
    "/opt/megatron/megatron/core/transformer/transformer_block.py:700 forward",
    *CALL,
    "/opt/megatron/megatron/core/transformer/transformer_layer.py:470 forward",
)
TE = "/opt/venv/lib/python3.12/site-packages/transformer_engine/pytorch"
SITES = {
    "parameters": (
        *TRAIN,
        "/opt/megatron/megatron/training/training.py:1100 setup_model_and_optimizer",
        "/opt/megatron/megatron/training/training.py:950 get_model",
        f"{TE}/module/linear.py:1200 __init__",
    ),
    "gradients": (
        *TRAIN,
        "/opt/megatron/megatron/training/training.py:1100 setup_model_and_optimizer",
        "/opt/megatron/megatron/core/distributed/param_and_grad_buffer.py:700 __init__",
    ),
    "qkv": (
        *LAYER,
        *CALL,
        "/opt/megatron/megatron/core/transformer/attention.py:900 forward",
        *CALL,
        f"{TE}/module/layernorm_linear.py:1500 forward",
    ),
    "fc1": (
        *LAYER,
        *CALL,
        "/opt/megatron/megatron/core/transformer/mlp.py:140 forward",
        *CALL,
        f"{TE}/module/linear.py:1480 forward",
    ),
    "act": (
        *LAYER,
        *CALL,
        "/opt/megatron/megatron/core/transformer/mlp.py:190 forward",
        "/opt/megatron/megatron/core/fusions/fused_bias_swiglu.py:250 bias_swiglu_impl",
    ),
    "logits": (
        *LAYER[:-3],
        "/opt/megatron/megatron/core/models/gpt/gpt_model.py:560 _postprocess",
        "/opt/megatron/megatron/core/tensor_parallel/layers.py:1020 forward",
    ),
    "backward": (
        "/opt/venv/lib/python3.12/site-packages/torch/autograd/function.py:311 apply",
        f"{TE}/module/linear.py:700 backward",
    ),
    "reduce": (
        "/opt/venv/lib/python3.12/site-packages/torch/autograd/function.py:311 apply",
        "/opt/megatron/megatron/core/distributed/distributed_data_parallel.py:440 hook",
        "/opt/megatron/megatron/core/distributed/param_and_grad_buffer.py:400 start_grad_sync",
    ),
    "optimizer": (
        *STEP[:-1],
        "/opt/megatron/megatron/core/optimizer/optimizer.py:560 step",
        "/opt/megatron/megatron/core/optimizer/distrib_optimizer.py:2400 step_with_ready_grads",
        f"{TE}/optimizers/fused_adam.py:520 initialize_state",
    ),
    "clip": (
        *STEP[:-1],
        "/opt/megatron/megatron/core/optimizer/optimizer.py:545 step",
        "/opt/megatron/megatron/core/optimizer/clip_grads.py:150 get_grad_norm_fp32",
    ),
}

type Frame = Callable[[int, int, tuple["Frame", ...]], int]


def _frame(place: str) -> Frame:
    """A function of that name, at that line of that file, which calls the next."""
    file, _, rest = place.rpartition(":")
    line, _, name = rest.partition(" ")
    plain = name.strip("<>")
    body = "return deeper[0](nbytes, stream, deeper[1:]) if deeper else allocate(nbytes, stream)"
    source = "\n" * (int(line) - 1) + f"def {plain}(nbytes, stream, deeper): {body}"
    made: dict[str, Any] = {"allocate": _allocate}
    exec(compile(source, file, "exec"), made)  # noqa: S102
    made[plain].__code__ = made[plain].__code__.replace(co_name=name)
    function: Frame = made[plain]
    return function


class Run:
    """A run of some layers and what it holds."""

    def __init__(self, layers: int, unit: int) -> None:
        frames = {place: _frame(place) for chain in SITES.values() for place in chain}
        self._chains = {name: tuple(frames[place] for place in chain) for name, chain in SITES.items()}
        self._layers, self._unit = layers, unit
        self._kept: list[int] = []

    def _ask(self, site: str, units: float, stream: int = 0) -> int:
        first, *deeper = self._chains[site]
        return first(int(units * self._unit), stream, tuple(deeper))

    def build(self) -> None:
        """Parameters and gradients."""
        self._kept += [self._ask("parameters", 2 + layer % 3) for layer in range(self._layers)]
        self._kept.append(self._ask("gradients", 2 * self._layers))

    def step(self, number: int, leak: float) -> None:
        """Forward, backward, optimizer step."""
        saved: list[int] = []
        for _ in range(self._layers):
            saved.append(self._ask("qkv", 3))
            saved.append(self._ask("fc1", 4))
            temporary = self._ask("act", 2.5)
            saved.append(self._ask("act", 2))
            _free(temporary)
        saved.append(self._ask("logits", 6))
        while saved:
            gradient, other = self._ask("backward", 1.2), self._ask("reduce", 0.4, stream=8)
            _free(saved.pop())
            _free(gradient)
            _free(other)
        _free(self._ask("clip", 0.1))
        if number == 0:
            self._kept.append(self._ask("optimizer", 4 * self._layers))
        if leak:
            self._kept.append(self._ask("logits", leak))


def main(path: str, options: dict[str, float]) -> None:
    """Run and write the snapshot; where memory runs out, at once."""
    # Sets the allocator up, and then fails: nothing else is there.
    with suppress(RuntimeError):
        torch.cuda.init()
    stacks = "all" if options.get("native") else "python"
    torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=int(options.get("entries", 10**7)))
    run = Run(int(options.get("layers", 4)), int(options.get("unit", 1_000_001)))
    with suppress(torch.OutOfMemoryError):
        run.build()
        for number in range(int(options["steps"])):
            run.step(number, options.get("leak", 0))
    torch.cuda.memory._dump_snapshot(path)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
