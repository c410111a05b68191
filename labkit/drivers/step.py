"""One training step as Megatron takes it, and where its phases begin.

Source: `megatron.training.training.train` and `train_step`, and `forward_step` of `pretrain_gpt.py`, Megatron 0.19.
The schedule is Megatron's own, told apart into phases by the timers it starts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

from labkit.drivers.build import aligned_param_gather
from labkit.workload import Workload

PhaseCallback = Callable[[int, str], None]
"""Called with (iteration, name of `labkit.ledger.PHASES`) when a phase begins."""

_PHASE_OF_TIMER = {"forward-compute": "forward", "backward-compute": "backward", "all-grads-sync": "grad_sync"}


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
    """A rank's pipeline chunks and their optimizer, ready to step. Iterations count from 1.

    `num_microbatches` is the workload's where time counts, and may be fewer where memory alone does.
    """

    def __init__(
        self,
        workload: Workload,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        phase: PhaseCallback,
        *,
        num_microbatches: int,
    ) -> None:
        self.workload = workload
        self.num_microbatches = num_microbatches
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.iteration = 0
        self._phase = phase
        self._reported = ""
        self._forward_backward = get_forward_backward_func()
        self._batches = [batches(workload, *_ends(chunk)) for chunk in self.chunks]
        self._config = config = self.chunks[0].config
        config.timers = _PhaseTimers(self._begin)
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        data_parallel = workload.training.data_parallel
        if data_parallel.overlap_grad_reduce:
            config.no_sync_func = _each(chunk.no_sync for chunk in self.chunks)
            config.grad_sync_func = _each(chunk.start_grad_sync for chunk in self.chunks)
        self._late_hooks = data_parallel.overlap_param_gather
        for chunk in self.chunks:
            if self._late_hooks:
                # The first step's parameters are in place already: Megatron gathers none before it.
                chunk.disable_forward_pre_hook(param_sync=False)
            chunk.train()

    def _begin(self, phase: str) -> None:
        if phase != self._reported:
            self._reported = phase
            self._phase(self.iteration, phase)

    def run(self) -> torch.Tensor | None:
        """Take one step; returns the mean loss over its micro-batches, a scalar on the device, where the head is."""
        # What zeroing frees (the optimizer's copies of the gradients) is the last step's: the new one begins after it.
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.iteration += 1
        self._begin("forward")
        losses = self._forward_backward(
            forward_step_func=_forward,
            data_iterator=self._batches,
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=self.workload.batch.seq_length,
            micro_batch_size=self.workload.batch.micro_batch_size,
            forward_only=False,
        )
        self._begin("optimizer")
        self.optimizer.step()
        if self._late_hooks and self.iteration == 1:
            self._gather_parameters_late()
        if not losses:
            return None
        total: torch.Tensor = torch.vstack([loss["lm loss"] for loss in losses]).sum(dim=0)
        return total[0] / total[1]

    def _gather_parameters_late(self) -> None:
        """From the second step on, forward gathers the parameters that the optimizer has updated."""
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()
        if aligned_param_gather(self.workload):
            self._config.param_sync_func = _each(chunk.start_param_sync for chunk in self.chunks)


def _each(functions: Iterable[Callable[..., Any]]) -> Any:
    """As Megatron's schedules take a function of each chunk: alone where there is one chunk."""
    listed = list(functions)
    return listed[0] if len(listed) == 1 else listed


def _ends(chunk: DistributedDataParallel) -> tuple[bool, bool]:
    """Whether the chunk begins with the embedding, and whether it ends with the head."""
    return get_attr_wrapped_model(chunk, "pre_process"), get_attr_wrapped_model(chunk, "post_process")


def batches(workload: Workload, first: bool, last: bool) -> Iterator[dict[str, torch.Tensor | None]]:
    """What `get_batch_on_this_tp_rank` leaves on the device: (micro-batch, sequence) tensors, no attention mask.

    A context-parallel rank then takes its two of the 2 x cp chunks.

    The host collates them and copies each to the device once; a stage then lets go of what it does not need. Stages
    between the first and the last read nothing.
    """
    embeds = first or (last and workload.model.mtp_num_layers is not None)
    needed = {"tokens": embeds, "labels": last, "loss_mask": last, "position_ids": embeds}
    shape = (workload.batch.micro_batch_size, workload.batch.seq_length)
    generator = torch.Generator().manual_seed(1234)
    if not any(needed.values()):
        yield from itertools.repeat(dict.fromkeys(needed))
    while True:
        tokens = torch.randint(workload.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
            "position_ids": torch.arange(shape[1]).repeat(shape[0], 1),
        }
        # A context-parallel rank goes on with its part of the sequences. No variable here keeps the tensors alive.
        yield get_batch_on_this_cp_rank(
            _kept({name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}, needed),
            is_hybrid_cp=False,
            cp_group=get_context_parallel_group(),
        )


def _kept(batch: dict[str, torch.Tensor], needed: dict[str, bool]) -> dict[str, torch.Tensor | None]:
    return {name: tensor if needed[name] else None for name, tensor in batch.items()}


def _forward(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses that count, how many count, both for the report)."""
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), count.view(1)])
    return total, count, {"lm loss": report}
