"""A step of the `lora` runtime: passes over packed sequences that hand out hidden states, and their caller's loss."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import fused_a2a
from megatron.core.utils import unwrap_model
from torch import Tensor

from labkit.drivers.lora.tree import Tree
from labkit.workload import Workload

PhaseCallback = Callable[[int, str], None]
"""See `labkit.drivers.step`."""


class LoraStep:
    """A rank's adapted model, ready to step. Iterations count from 1.

    `optimizer` is None where forward and backward run alone: then gradients of adapters are dropped as they come.
    """

    def __init__(
        self,
        workload: Workload,
        arguments: argparse.Namespace,
        chunk: Any,
        tree: Tree,
        optimizer: MegatronOptimizer | None,
        phase: PhaseCallback,
    ) -> None:
        self.arguments = arguments
        self.iteration = 0
        self._workload, self._tree, self._phase = workload, tree, phase
        self._microbatches = arguments.global_batch_size // arguments.micro_batch_size // arguments.data_parallel_size
        self._chunk, self._model, self._optimizer = chunk, unwrap_model(chunk), optimizer
        self._anchor = torch.zeros((), device=tree.tokens.device, requires_grad=True)
        # Of the tokens' positions; alike in every layer and step.
        angles = self._model.rotary_pos_emb.get_freqs_non_repeated(tree.rows)
        self._angles = torch.cat((angles, angles), -1)[tree.positions, None, None]
        self._model.train()
        if workload.training.kernels.moe_token_dispatcher_type == "flex":
            _make_buffer(workload, tree)
        if optimizer is None:
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def run(self) -> None:
        """Take one step."""
        self.iteration += 1
        if self._optimizer is not None:
            self._chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
        validation = get_rerun_state_machine()
        while validation.should_run_forward_backward(None):
            for _ in range(self._microbatches):
                self._pass()
            if self._optimizer is not None:
                self._phase(self.iteration, "grad_sync")
                finalize_model_grads([self._chunk])
        if self._optimizer is not None:
            self._phase(self.iteration, "optimizer")
            self._optimizer.step()

    def _pass(self) -> None:
        """Forward, and the caller's loss and backward."""
        differentiates = self._workload.training.differentiates
        self._phase(self.iteration, "forward")
        with torch.set_grad_enabled(differentiates):
            states = self._forward()
        self._phase(self.iteration, "backward")
        if differentiates:
            torch.autograd.backward(self._loss(states))

    def _forward(self) -> Tensor:
        """Hidden states of every token of every sequence: (logical rows, hidden)."""
        model, tree = self._model, self._tree
        hidden = _Differentiable.apply(model.embedding(tree.tokens[None], tree.positions[None]), self._anchor)
        hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=self._angles)
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states: Tensor = hidden.squeeze(1).index_select(0, tree.outputs)
        return states

    def _loss(self, states: Tensor) -> Tensor:
        """The mean square of each sequence's outputs, summed."""
        losses = [part.float().square().mean() for part in states.split(self._tree.lengths)]
        return torch.stack(losses).sum()


class _Differentiable(torch.autograd.Function):
    """A frozen embedding's output as a tensor that needs a gradient, or checkpoints would keep no graph.

    `anchor` needs one in its place: a leaf of this size would live on, with its gradient, in the graphs that
    dispatchers keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004 (autograd's call)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004 (autograd's call)
        return None, None


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _make_buffer(workload: Workload, tree: Tree) -> None:
    """HybridEP's, for the tokens of all tensor-parallel ranks: a batch's router may send one rank all of them."""
    moe = workload.model.mixture_of_experts
    if moe is not None:
        local = moe.num_moe_experts // workload.parallelism.ep
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        fused_a2a.init_hybrid_ep_buffer(group, workload.model.hidden_size, tree.rows, local)
