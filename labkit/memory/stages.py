"""Which layers a pipeline rank runs: stages, and the chunks of an interleaved schedule."""

from itertools import accumulate

from labkit.workload import Workload


def stage_layers(workload: Workload, stage: int) -> list[range]:
    """Decoder layers of each model chunk of pipeline rank `stage`, in the order of the chunks.

    Sources: Megatron Core `transformer_block.get_num_layers_to_build`,
    `transformer_layer.get_transformer_layer_offset`: chunk c of every stage comes before chunk c + 1 of any.
    """
    layout, marked = workload.parallelism, workload.model.pattern_stages
    if len(marked) > 1:
        # `hybrid_layer_allocation.select_pipeline_segment`
        ends = [0, *accumulate(map(len, marked))]
        indices = range(stage, len(marked), layout.pp)
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
