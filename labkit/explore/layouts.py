"""A layout to start a published model from: the fewest GPUs on which its weights leave room for the rest."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from labkit.memory.margin import margin_over
from labkit.memory.outline import block, outline
from labkit.memory.units import chunks
from labkit.memory.weights import weights
from labkit.workload import Batch, Kernels, Model, Parallelism, Recompute, Training, Workload
from labkit.workload.gpu import GPUS
from labkit.workload.stages import fullest_stages

_SEQ_LENGTH = 4096
_FEWEST_GPUS, _MOST_GPUS = 8, 2048
_MOST_TENSOR_RANKS = 8
"""Of one node."""
_MOST_PIPELINE_RANKS = 16
_SHARE = 0.55
"""Of the memory that weights, gradients and optimizer state may take."""
_BYTES = 2 + 2
"""Of a weight and its gradient in bf16."""
_SHARDED_BYTES = 4 + 4 + 4
"""Of its main parameter and two moments in fp32, spread over data-parallel ranks."""
_NO_LABELS = Recompute(recompute_granularity="selective", recompute_modules=())
_EVERY_LAYER = Recompute(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def first_layout(mapping: Mapping[str, Any]) -> Workload:
    """A workload of the model that breaks no rule: no recompute if that fits the GPU, else that of every layer."""
    model = Model.model_validate(mapping)
    dense, expert = _weights(model)
    memory = GPUS["h100-80gb"].total_memory_bytes
    layouts = list(_layouts(model))
    possible = next(filter(None, (_that_run(model, layouts, training) for training in _trainings())))
    roomy = (case for case in possible if _state_bytes(case.parallelism, dense, expert) <= _SHARE * memory)
    case = next(roomy, possible[-1])
    if all(_needs(case, stage) <= memory for stage in fullest_stages(case)):
        return case
    full = case.model_copy(update={"recompute": _EVERY_LAYER})
    return full if full.can_run else case


def _weights(model: Model) -> tuple[int, int]:
    """Elements of all weights outside of the experts, and of all the experts'."""
    whole = Workload(
        model=model, parallelism=Parallelism(world_size=1), batch=Batch(seq_length=_SEQ_LENGTH, global_batch_size=1)
    )
    counted = [0, 0]
    for found in (each for chunk in chunks(whole, 0) for each in weights(chunk)):
        for part in found.flat:
            counted[".experts." in part.parameter.name] += part.numel * len(part.numbers) * len(found.repeats)
    return counted[False], counted[True]


def _layouts(model: Model) -> Iterator[Parallelism]:
    """From the fewest GPUs on, and on so many with the fewest pipeline and tensor ranks first."""
    moe = model.mixture_of_experts
    for world in _doubled(_FEWEST_GPUS, _MOST_GPUS):
        for pipeline in _doubled(1, min(_MOST_PIPELINE_RANKS, world // _MOST_TENSOR_RANKS)):
            for tensor in _doubled(1, _MOST_TENSOR_RANKS):
                ranks = (
                    1
                    if moe is None
                    else next(
                        each
                        for each in reversed(list(_doubled(1, world // pipeline)))
                        if moe.num_moe_experts % each == 0
                    )
                )
                yield Parallelism(
                    world_size=world,
                    tensor_model_parallel_size=tensor,
                    sequence_parallel=tensor > 1,
                    pipeline_model_parallel_size=pipeline,
                    expert_model_parallel_size=ranks,
                    expert_tensor_parallel_size=None if moe is None else 1,
                )


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _trainings() -> Iterator[Training | None]:
    """Every fusion, then without those that some activations and biases have no kernel for."""
    yield None
    for activation, dropout in ((False, True), (True, False), (False, False)):
        yield Training(kernels=Kernels(bias_activation_fusion=activation, bias_dropout_fusion=dropout))


def _that_run(model: Model, layouts: Iterable[Parallelism], training: Training | None) -> list[Workload]:
    """The workload in each layout that it can run in; None leaves the training open."""
    found = []
    for layout in layouts:
        batch = Batch(seq_length=_SEQ_LENGTH, micro_batch_size=1, global_batch_size=max(layout.world_size, 128))
        case = Workload(model=model, parallelism=layout, batch=batch, recompute=_NO_LABELS)
        if training is not None:
            case = case.model_copy(update={"training": training})
        if case.can_run:
            found.append(case)
    return found


def _state_bytes(layout: Parallelism, dense: int, expert: int) -> float:
    """A rank's weights, gradients and optimizer state, about."""
    parts = (
        (dense, layout.tp * layout.pp, layout.dp * layout.cp),
        (expert, layout.etp * layout.ep * layout.pp, layout.edp),
    )
    return sum(count / ranks * (_BYTES + _SHARDED_BYTES / copies) for count, ranks, copies in parts)


def _needs(case: Workload, stage: int) -> int:
    found = outline(case, stage, block)
    return found.peak_bytes + margin_over(case, found.phases, found.set_up_bytes)
