"""One training step as Megatron-LM takes it, and where its phases begin.

Source: `megatron.training.training.train`, whose `train_step` this calls, and `get_batch`, `forward_step` and
`loss_func` of `pretrain_gpt.py`, which no wheel contains; Megatron 0.19. Phases are told apart by the timers that
Megatron starts.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import global_vars, training
from megatron.training.utils import calc_params_l2_norm

from labkit.drivers.contract import NotFiniteError
from labkit.workload import Workload

PhaseCallback = Callable[[int, str], None]
"""Called with (iteration, name of `labkit.ledger.PHASES`) when a phase begins."""

_PHASE_OF_TIMER = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "grad_sync",
    "optimizer": "optimizer",
}
_BATCH = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


class _PhaseTimers:
    """Looks like Megatron's `Timers` and says which phase begins."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self._phase = phase
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> "_PhaseTimers":  # noqa: ARG002 (Megatron's call)
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:  # noqa: ARG002 (Megatron's call)
        if self._name in _PHASE_OF_TIMER:
            self._phase(_PHASE_OF_TIMER[self._name])

    def stop(self) -> None:
        pass


class TrainingStep:
    """A rank's pipeline chunks and their optimizer, ready to step. Iterations count from 1."""

    def __init__(
        self,
        workload: Workload,
        arguments: argparse.Namespace,
        chunks: Sequence[Any],
        optimizer: MegatronOptimizer,
        phase: PhaseCallback,
    ) -> None:
        self.arguments = arguments
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.iteration = 0
        self.gradient_norm: Any = None
        """Of all gradients of the last step, before clipping; None where none were clipped."""
        self._phase = phase
        self._reported = ""
        self._schedule = get_forward_backward_func()
        self._learning_rates = training.get_optimizer_param_scheduler(optimizer)
        # Host memory only: what is checked and run again is kept there.
        self._batches = [RerunDataIterator(host_batches(workload)) for _ in self.chunks]
        self._config = config = self.chunks[0].config
        config.timers = global_vars._GLOBAL_TIMERS = _PhaseTimers(self._begin)
        config.grad_scale_func = optimizer.scale_loss
        if config.finalize_model_grads_func is None:
            config.finalize_model_grads_func = finalize_model_grads
        if arguments.overlap_grad_reduce:
            config.no_sync_func = _each(chunk.no_sync for chunk in self.chunks)
            if arguments.align_grad_reduce:
                config.grad_sync_func = _each(chunk.start_grad_sync for chunk in self.chunks)
        self._late_hooks = training.should_disable_forward_pre_hook(arguments)
        if self._late_hooks:
            # The first step's parameters are in place already: Megatron gathers none before it.
            training.disable_forward_pre_hook(self.chunks, param_sync=False)
        elif arguments.overlap_param_gather:
            self._gather_together()
        for chunk in self.chunks:
            chunk.train()
        self._graphs = self._graph_helper() if arguments.cuda_graph_impl == "transformer_engine" else None
        pools = {
            "cuda_graph_warmup_steps": arguments.cuda_graph_warmup_steps,
            "use_single_mempool": config.cuda_graph_use_single_mempool,
        }
        if arguments.cuda_graph_impl == "full_iteration":
            self._schedule = FullCudaGraphWrapper(self._schedule, **pools)
        if arguments.optimizer_cuda_graph:
            optimizer.step = OptimizerCudaGraphWrapper(optimizer.step, **pools)

    def _graph_helper(self) -> TECudaGraphHelper:
        return TECudaGraphHelper(
            model=self.chunks,
            config=self._config,
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            optimizers=[self.optimizer],
        )

    def capture(self) -> None:
        """Capture the CUDA graphs that the next step and all later ones replay, as `train` does before it."""
        assert self._graphs is not None
        self._reported = "capture"
        self._phase(self.iteration + 1, "capture")
        gathers_late = self.iteration > 0 and self._late_hooks
        if gathers_late:
            training.disable_forward_pre_hook(self.chunks, param_sync=False)
        self._graphs.create_cudagraphs()
        if gathers_late:
            training.enable_forward_pre_hook(self.chunks)
            self._graphs.cuda_graph_set_manual_hooks()

    def _begin(self, phase: str) -> None:
        if phase != self._reported:
            self._reported = phase
            self._phase(self.iteration, phase)

    def run(self) -> torch.Tensor | None:
        """Take one step; returns the mean loss over its micro-batches, a scalar on the device, where the head is.

        Raises:
            NotFiniteError: Megatron has found the loss or the gradients not to be finite, here or on another rank.
        """
        self.arguments.curr_iteration = self.iteration
        losses, _, _, exits, _, norm, _, _ = training.train_step(
            _forward,
            self._batches,
            self.chunks,
            self.optimizer,
            self._learning_rates,
            self._config,
            self._forward_backward,
            iteration=self.iteration,
        )
        if exits:
            raise NotFiniteError(f"step {self.iteration} was given up: its loss or its gradients are not finite")
        if self.arguments.log_params_norm:
            calc_params_l2_norm(self.chunks)
        if self._late_hooks and self.iteration == 1:
            # From the second step on, forward gathers the parameters that the optimizer has updated.
            training.enable_forward_pre_hook(self.chunks)
            self._gather_together()
            if self._graphs is not None and self._graphs.capture_finished():
                self._graphs.cuda_graph_set_manual_hooks()
        self.gradient_norm = norm
        loss: torch.Tensor | None = losses.get("lm loss")
        return loss

    def _forward_backward(self, **arguments: Any) -> Any:
        # What zeroing frees (the optimizer's copies of the gradients) is the last step's: the new one begins after it.
        self.iteration += 1
        self._begin("forward")
        with self._telling_turns():
            losses = self._schedule(**arguments)
        if self._reported == "forward":
            self._begin("backward")  # a graph of both was replayed, which no timer tells
        return losses

    @contextmanager
    def _telling_turns(self) -> Iterator[None]:
        """Where two micro-batches take turns in a layer, one timer covers both: each stretch says which way it runs."""
        ways = {way: getattr(ScheduleNode, way) for way in ("forward", "backward")}
        for way, method in ways.items():
            setattr(ScheduleNode, way, self._telling(way, method))
        try:
            yield
        finally:
            for way, method in ways.items():
                setattr(ScheduleNode, way, method)

    def _telling(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._begin(phase)
            return method(*arguments)

        return run

    def _gather_together(self) -> None:
        if self.arguments.align_param_gather:
            self._config.param_sync_func = _each(chunk.start_param_sync for chunk in self.chunks)


def _each(functions: Iterable[Callable[..., Any]]) -> Any:
    """As Megatron's schedules take a function of each chunk: alone where there is one chunk."""
    listed = list(functions)
    return listed[0] if len(listed) == 1 else listed


def host_batches(workload: Workload) -> Iterator[dict[str, torch.Tensor]]:
    """What a data loader collates in host memory: (micro-batch, sequence) tensors, maybe a mask."""
    batch = workload.batch
    shape = (batch.micro_batch_size, batch.seq_length)
    generator = torch.Generator().manual_seed(1234)
    while True:
        tokens = torch.randint(workload.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        collated = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
            "position_ids": torch.arange(shape[1]).repeat(shape[0], 1),
        }
        if batch.create_attention_mask_in_dataloader:
            # Expanded: the square is made on the device alone.
            collated["attention_mask"] = torch.zeros(1, dtype=torch.bool).expand(shape[0], 1, shape[1], shape[1])
        if workload.packed_lengths:
            collated |= _packed(workload.packed_lengths)
        yield collated


def _packed(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """What tells the sequences of a sample apart (`SFTDataset`): their ends are padded to one more than its tokens."""
    rows = sum(lengths)
    ends = torch.full((1, rows + 1), rows, dtype=torch.int32)
    ends[0, : len(lengths) + 1] = torch.tensor([0, *accumulate(lengths)])
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seqlens": ends,
        "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
    }


def get_batch(host: Iterator[dict[str, torch.Tensor]], chunk: Any) -> dict[str, torch.Tensor | None]:
    """A micro-batch on the device.

    The first tensor-parallel rank copies the host's batch, the others make room for it; a stage then lets go of what
    it does not need. Stages between the first and the last read nothing but where packed sequences end. A
    context-parallel rank goes on with its two of the 2 x cp chunks, of each packed sequence its own two.
    """
    arguments = global_vars.get_args()
    first, last, stage = (get_attr_wrapped_model(chunk, name) for name in ("pre_process", "post_process", "vp_stage"))
    predicts = mtp_on_this_rank(
        chunk.config.pipeline_model_parallel_layout, arguments.mtp_num_layers, ignore_virtual=False, vp_stage=stage
    )
    reads = first or last or predicts
    if not (reads or arguments.sft):
        return dict.fromkeys(_BATCH)
    rank = parallel_state.get_tensor_model_parallel_rank()
    collated = next(host) if rank == 0 else {}
    batch: dict[str, torch.Tensor | None] = dict.fromkeys(_PACKED)
    batch |= {name: tensor.cuda(non_blocking=True) for name, tensor in collated.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=arguments.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=arguments.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=arguments.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=arguments.micro_batch_size,
        seq_length=arguments.seq_length,
        mtp_on_this_rank=predicts,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not reads:
        return batch
    return get_batch_on_this_cp_rank(  # type: ignore[no-any-return]
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )


def _packed_parameters(batch: dict[str, torch.Tensor | None], *, hybrid: bool) -> PackedSeqParams | None:
    """Where the packed sequences of a micro-batch end; None: nothing is packed.

    Mamba's layers want the number of each token's sequence, which is made where the count of tokens is given.
    """
    ends, longest = batch.get("cu_seqlens"), batch.get("max_seqlen")
    if ends is None or longest is None:
        return None
    arguments, most = global_vars.get_args(), int(longest[0].item())
    training.update_seqlen_stats_from_cu_seqlens(ends[0])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[0],
        max_seqlen_q=most,
        max_seqlen_kv=most,
        total_tokens=arguments.seq_length if hybrid else None,
    )


def _forward(
    host: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = get_batch(host, model)
    # Where two micro-batches take turns (`--overlap-moe-expert-parallel-comm`) the schedule runs the layers itself.
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    losses = run(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packed_parameters(batch, hybrid=global_vars.get_args().hybrid_layer_pattern is not None),
    )
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(loss_mask: Any, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses that count, how many count, both for the report)."""
    arguments = global_vars.get_args()
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    if arguments.check_for_nan_in_loss_and_grad:
        for rejected, message in ((torch.isnan, "found NaN in local forward loss"), (torch.isinf, "found Inf")):
            get_rerun_state_machine().validate_result(
                result=total, rejection_func=rejected, message=message, tolerance=0.0, fatal=True
            )
    count = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), count.view(1)])
    return total, count, {"lm loss": report}
