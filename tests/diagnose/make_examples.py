"""Write `examples/` and `data/examples/`: `python -m tests.diagnose.make_examples`.

What Megatron-LM and PyTorch print, by themselves.

Arguments go through Megatron's parser and validator, and the block, steps, memory and footprints are those of its own
`validate_args`, `training_log`, `report_memory` and `report_theoretical_memory`, with the figures of a story: NVIDIA's
published study of Moonlight 16B (`data/published`). Tables are `torch.cuda.memory_summary`'s.
"""

import contextlib
import gzip
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from labkit.drivers.trace import megatron_args
from labkit.drivers.trace.surface import fake_cuda
from labkit.importers.launch import read_launch
from labkit.importers.silent import SILENT
from labkit.workload.gpu import GPUS

EXAMPLES = Path(__file__).with_name("examples")
RECORDED = Path(__file__).parents[1] / "pytorch_allocator" / "step.pickle.gz"
SHIPPED = Path(__file__).parents[2] / "data" / "examples"
MOONLIGHT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264
--num-attention-heads 16 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1
--global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8
--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16
--swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 50000 --vocab-size 163840
--make-vocab-size-divisible-by 1280 --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --rope-type rope --no-rope-fusion --num-experts 64
--moe-layer-freq ([0]*1+[1]*26)
--moe-ffn-hidden-size 1408 --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
--moe-router-topk-scaling-factor 2.446 --moe-router-dtype fp32 --attention-backend fused
--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
--no-create-attention-mask-in-dataloader --recompute-granularity selective --recompute-modules moe_act core_attn
--qk-layernorm --fp8-recipe tensorwise --moe-shared-expert-overlap --moe-router-pre-softmax --cross-entropy-loss-fusion
--train-iters 20 --lr 1e-4 --log-interval 1 --log-throughput"""
LONG = MOONLIGHT.replace(
    "--seq-length 4096 --max-position-embeddings 4096", "--seq-length 18432 --max-position-embeddings 18432"
).replace("--recompute-modules moe_act core_attn", "--recompute-modules core_attn")
"""Sequences of 18,432 tokens with the one label that does nothing."""
LONG_PEAK_BYTES = 77_300_000_000
STORY = """labkit's example of a run that died. The block of arguments, the steps and the reports of memory are printed
by Megatron Core's own functions; the figures, the traceback and the message below them are made up: no such run was
measured.
"""
FAILURE = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/workspace/pretrain_gpt.py", line 309, in <module>
[rank3]:     pretrain(
[rank3]:   File "/workspace/megatron/training/training.py", line 1512, in train_step
[rank3]:     losses_reduced = forward_backward_func(
[rank3]:   File "/workspace/megatron/core/pipeline_parallel/schedules.py", line 623, in forward_backward_no_pipelining
[rank3]:     output_tensor, num_tokens = forward_step(
[rank3]:   File "/workspace/megatron/core/transformer/transformer_layer.py", line 702, in forward
[rank3]:     output = self._forward_mlp(hidden_states, kwargs.get("inference_context", None))
[rank3]:   File "/workspace/megatron/core/transformer/moe/moe_layer.py", line 371, in forward
[rank3]:     output, mlp_bias = custom_forward(hidden_states)
[rank3]:   File "/workspace/megatron/core/transformer/moe/experts.py", line 866, in forward
[rank3]:     intermediate_parallel = self.bias_act_func(intermediate_parallel, bias_parallel, permuted_probs)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.27 GiB. GPU 3 has a total capacity of \
79.10 GiB of which 1.01 GiB is free. Including non-PyTorch memory, this process has 78.09 GiB memory in use. Of the \
allocated memory 75.81 GiB is allocated by PyTorch, and 861.18 MiB is reserved by PyTorch but unallocated. If reserved \
but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See \
documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)
"""
NVIDIA_PEAK_BYTES = 35_941_000_000
"""`moe_act`, after iteration 2 (`data/published/moonlight-16b.yaml`)."""


def arguments(text: str) -> tuple[Any, str]:
    """Megatron's namespace of launch arguments, and what it printed."""
    launch = read_launch(text.replace("(", "'(").replace(")", ")'").replace("\n", " "), "launch")
    request: dict[str, Any] = {
        "arguments": list(launch.arguments),
        "environment": {},
        "world_size": launch.world_size,
        "silent": SILENT,
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        namespace = megatron_args.read(request)[0]
    return namespace, printed.getvalue()


def steps(
    namespace: Any, count: int, peaks: dict[int, int], ranks: tuple[int, ...] = (0,), typical: float = 0.46626
) -> str:
    """Lines of `training_log`, the first step slow, with `report_memory` of each rank where there is a peak."""
    from megatron.training import training
    from megatron.training.utils import common_utils

    seconds = (typical * (1 + (4 if step == 0 else 0.01 * (step * 7 % 5))) for step in range(count))
    timers = mock.Mock(return_value=mock.Mock(elapsed=mock.Mock(side_effect=lambda **_: next(seconds))))
    nothing = {name: mock.Mock(return_value=None) for name in ("get_tensorboard_writer", "get_wandb_writer")}
    nothing |= {name: mock.Mock(return_value=None) for name in ("get_one_logger", "get_energy_monitor")}
    nothing |= {"get_loaded_iteration": mock.Mock(return_value=0), "one_logger_utils": mock.Mock()}
    nothing |= {"get_moe_metrics_tracker": mock.Mock(return_value=mock.Mock(report=mock.Mock(return_value="")))}
    nothing |= {"get_num_microbatches": mock.Mock(return_value=1), "clear_aux_losses_tracker": mock.Mock()}
    nothing |= {"get_args": mock.Mock(return_value=namespace), "get_timers": mock.Mock(return_value=timers)}
    nothing |= {"reduce_max_stat_across_model_parallel_group": mock.Mock(side_effect=lambda value, **_: value)}
    nothing |= {
        "print_rank_last": mock.Mock(side_effect=print),
        "report_memory": mock.Mock(),
        "report_theoretical_memory": mock.Mock(),
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.ExitStack() as patched:
        for name, value in nothing.items():
            patched.enter_context(mock.patch.object(training, name, value, create=True))
        patched.enter_context(mock.patch.object(common_utils, "get_args", nothing["get_args"]))
        for iteration in range(1, count + 1):
            namespace.consumed_train_samples = iteration * namespace.global_batch_size
            losses = {"lm loss": torch.tensor([12.1 - 0.3 * iteration])}
            training.training_log(
                {}, losses, 1e-4, iteration, 1.0, False, 0, 2.345, None, None, None, is_first_iteration=True
            )
            if iteration == 1:
                theory(namespace)
            for rank in ranks if iteration in peaks else ():
                peak = peaks[iteration] + rank * 2**20
                figures = {
                    "memory_allocated": peak - 9_000 * 2**20,
                    "max_memory_allocated": peak,
                    "memory_reserved": peak + 2_950 * 2**20,
                    "max_memory_reserved": peak + 2_950 * 2**20,
                }
                with contextlib.ExitStack() as stack:
                    for figure, amount in figures.items():
                        stack.enter_context(mock.patch.object(torch.cuda, figure, mock.Mock(return_value=amount)))
                    stack.enter_context(mock.patch("torch.distributed.get_rank", mock.Mock(return_value=rank)))
                    stack.enter_context(mock.patch.object(common_utils.mpu, "get_data_parallel_rank", return_value=0))
                    common_utils.report_memory(f"(after {iteration} iterations)")
    return printed.getvalue()


def theory(namespace: Any) -> None:
    """`report_theoretical_memory`'s lines."""
    from megatron.training.theoretical_memory_usage import report_theoretical_memory

    report_theoretical_memory(namespace, num_microbatches=1, verbose=True)


def summary(stats: dict[str, int], *, abbreviated: bool) -> str:
    """`torch.cuda.memory_summary` of such statistics; what is not given is 0."""
    from torch.cuda import memory

    class _Stats(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return 0

    given = mock.Mock(return_value=_Stats({"num_ooms": 0, "num_alloc_retries": 0} | stats))
    with (
        mock.patch.object(memory, "memory_stats", given),
        mock.patch.object(memory, "_get_device_index", return_value=0),
    ):
        text: str = memory.memory_summary(abbreviated=abbreviated)
    return text


def main() -> None:
    """Write the files."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with fake_cuda(GPUS["h100-80gb"]):
        namespace, block = arguments(MOONLIGHT)
        namespace.padded_vocab_size = 163840
        log = steps(namespace, 5, {1: NVIDIA_PEAK_BYTES - 2**30, 2: NVIDIA_PEAK_BYTES}, ranks=(0, 1))
        failing, long = arguments(LONG)
        failing.padded_vocab_size = 163840
        died = steps(failing, 12, {2: LONG_PEAK_BYTES}, ranks=tuple(range(8)), typical=1.873)
    (EXAMPLES / "moonlight.log").write_text(block + log)
    (SHIPPED / "moonlight-oom.log").write_text(STORY + long + died + FAILURE)
    (SHIPPED / "step.pickle").write_bytes(gzip.decompress(RECORDED.read_bytes()))
    full = {"num_ooms": 1, "num_alloc_retries": 3, "allocated_bytes.all.freed": 8945 * 2**30}
    for name, current, peak in (("allocated", 55, 57), ("requested", 54, 56), ("reserved", 77, 78)):
        full |= {f"{name}_bytes.all.current": current * 2**30, f"{name}_bytes.all.peak": peak * 2**30}
    full |= {"inactive_split_bytes.all.current": 21 * 2**30, "inactive_split_bytes.all.peak": 22 * 2**30}
    small = {"allocated_bytes.all.current": 700 * 1024, "allocated_bytes.all.peak": 3 * 2**20}
    small["reserved_bytes.all.current"] = 20 * 2**20
    (EXAMPLES / "summary.txt").write_text(summary(full, abbreviated=False))
    (EXAMPLES / "summary_abbreviated.txt").write_text(summary(full, abbreviated=True))
    (EXAMPLES / "summary_small.txt").write_text(summary(small, abbreviated=True))


if __name__ == "__main__":
    main()
