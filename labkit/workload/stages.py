"""Which layers a pipeline rank runs: stages, and the chunks of an interleaved schedule."""

from itertools import accumulate

from labkit.workload import Workload
from labkit.workload.routing import busiest_share


def stage_layers(workload: Workload, stage: int) -> list[range]:
    """Decoder layers of each model chunk of pipeline rank `stage`, in the order of the chunks.

    Sources: Megatron Core `transformer_block.get_num_layers_to_build`,
    `transformer_layer.get_transformer_layer_offset`: chunk c of every stage comes before chunk c + 1 of any.
    """
    layout, marked = workload.parallelism, workload.model.pattern_stages
    placed = [each.count("t") for each in layout.marked_stages]
    if placed or len(marked) > 1:
        # `PipelineParallelLayerLayout`; `hybrid_layer_allocation.select_pipeline_segment`
        ends = [0, *accumulate(placed or map(len, marked))]
        indices = range(stage, len(ends) - 1, layout.pp)
        return [range(ends[index], ends[index + 1]) for index in indices]
    counts = [_layers_of_stage(workload, each) // layout.vpp for each in range(layout.pp)]
    found = []
    for chunk in range(layout.vpp):
        first = chunk * sum(counts) + sum(counts[:stage])
        length = counts[stage]
        # A place in the split that the embedding or the loss takes.
        if layout.account_for_embedding_in_pipeline_split:
            first = first if (stage, chunk) == (0, 0) else first - 1
            length -= (stage, chunk) == (0, 0)
        if layout.account_for_loss_in_pipeline_split:
            length -= (stage, chunk) == (layout.pp - 1, layout.vpp - 1)
        found.append(range(first, first + length))
    return found


def _layers_of_stage(workload: Workload, stage: int) -> int:
    """Places for layers in all chunks of a stage, those taken by embedding and loss included."""
    layout, layers = workload.parallelism, workload.model.num_layers
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        taken = layout.account_for_embedding_in_pipeline_split + layout.account_for_loss_in_pipeline_split
        return (layers + taken) // layout.pp
    if stage == 0 and first is not None:
        return first
    if stage == layout.pp - 1 and last is not None:
        return last
    middle = layout.pp - (first is not None) - (last is not None)
    return (layers - (first or 0) - (last or 0)) // middle


def warmup_passes(workload: Workload, stage: int) -> int:
    """Forward passes of a stage before its first backward (`schedules.get_pp_rank_microbatches`)."""
    layout, after = workload.parallelism, workload.parallelism.pp - stage - 1
    if layout.vpp == 1:
        return min(after, workload.num_microbatches)
    passes = 2 * after + (layout.vpp - 1) * layout.microbatch_group
    return min(passes, workload.num_microbatches * layout.vpp)


def differing_stages(workload: Workload) -> list[tuple[int, ...]]:
    """The pipeline stages, those together that hold the same: middle ones with like layers and as much under way."""
    alike = dict[object, list[int]]()
    for stage in range(workload.parallelism.pp):
        alike.setdefault((_layers_like(workload, stage), warmup_passes(workload, stage)), []).append(stage)
    return [tuple(together) for together in alike.values()]


def fullest_stages(workload: Workload) -> list[int]:
    """The pipeline stages that can be the fullest: of middle ones with like layers that with most under way."""
    first = dict[object, int]()
    for stage in range(workload.parallelism.pp):
        first.setdefault(_layers_like(workload, stage), stage)  # `warmup_passes` falls from stage to stage
    return list(first.values())


def _layers_like(workload: Workload, stage: int) -> object:
    """What a stage's layers are; at the ends, and where arguments may divide them in a way no field has, its number."""
    layout = workload.parallelism
    ends = stage in (0, layout.pp - 1) or workload.launch is not None
    layers = [[_kind(workload, layer) for layer in chunk] for chunk in stage_layers(workload, stage)]
    # Marks also say where layers of multi-token prediction are.
    return stage if ends else None, str(layers), layout.marked_stages[stage :: layout.pp]


def _kind(workload: Workload, layer: int) -> object:
    """What decides the size of a decoder layer."""
    kind = workload.model.layers[layer]
    return kind, busiest_share(workload, layer) if kind.mlp == "moe" else None
