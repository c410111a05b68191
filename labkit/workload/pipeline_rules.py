"""Rules of pipelines: how layers divide over stages and chunks, how micro-batches over an interleaved schedule.

Sources: Megatron Core `TransformerConfig.__post_init__`, `parallel_state.initialize_model_parallel`,
`schedules.forward_backward_pipelining_with_interleaving`, `transformer_block.get_num_layers_to_build`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_PP, _VPP = "parallelism.pipeline_model_parallel_size", "parallelism.virtual_pipeline_model_parallel_size"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_TAKEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def pipeline_findings(workload: "Workload") -> Iterator[Finding]:
    """Rules a pipelined workload breaks."""
    layout = workload.parallelism
    if layout.world_size % (layout.tp * layout.pp * layout.cp):
        return
    stated = [getattr(layout, name) for name in _ENDS]
    taken = any(getattr(layout, name) for name in _TAKEN)
    if any(number is not None for number in stated) and taken:
        reason = "an uneven split and places for the embedding or the loss exclude each other"
        field = f"parallelism.{_ENDS[stated[0] is None]}"
        yield Finding("error", field, reason, "give one of the two", Authority.CONFIG)
    elif layout.marked_stages:
        yield from _placed(workload)
    elif any(number is not None for number in stated):
        yield from _uneven(workload)
    elif taken or len(workload.model.pattern_stages) == 1:  # those of a hybrid pattern: `labkit.workload.mixer_rules`
        yield from _even(workload)
    if workload.chunks > 1 or layout.vpp > 1:
        if layout.pp == 1 and workload.chunks > 1:
            reason = "model chunks need a pipeline to interleave in"
            yield Finding(
                "error", _VPP, reason, "raise pipeline_model_parallel_size or leave it out", Authority.ARGUMENTS
            )
        elif layout.pp > 1:
            yield from _micro_batches(workload)


def _placed(workload: "Workload") -> Iterator[Finding]:
    """`PipelineParallelLayerLayout.validate_layer_layout`, `megatron.training.arguments.validate_args`."""
    layout, field, model = workload.parallelism, "parallelism.pipeline_model_parallel_layout", workload.model
    stages, depths = layout.marked_stages, model.mtp_num_layers or 0
    whole, predicting = "".join(stages), [index for index, stage in enumerate(stages) if "m" in stage]
    early = any(index < len(stages) - layout.pp for index in predicting)
    broken = {
        "it excludes other ways to split the layers": any(getattr(layout, name) for name in (*_ENDS, *_TAKEN)),
        f"it has {len(stages)} stages, {layout.pp} pipeline ranks of {layout.vpp} chunks have another number": (
            len(stages) != layout.pp * layout.vpp
        ),
        "it should begin with its one E and end in its one L": (
            whole[:1] + whole[-1:] != "EL" or whole.count("E") + whole.count("L") != 2
        ),
        f"it places {whole.count('t')} layers, num_layers is {model.num_layers}": whole.count("t") != model.num_layers,
        f"it places {whole.count('m')} layers of multi-token prediction, not {depths}": whole.count("m") != depths,
        "no layer may stand behind multi-token prediction": "t" in whole.partition("m")[2],
        "multi-token prediction should stand in one stage, its rank's last chunk": len(predicting) > 1 or early,
    }
    for reason, is_broken in broken.items():
        if is_broken:
            yield Finding("error", field, reason, "change it or leave it out", Authority.CONFIG)
            break
    if model.hybrid_layer_pattern is not None:
        reason = "a hybrid pattern marks its stages itself"
        yield Finding("error", field, reason, "leave it out", Authority.ARGUMENTS)
    if predicting and predicting[-1] != len(stages) - 1:
        reason = "multi-token prediction in a stage before the last is priced as if it were in the last, and not traced"
        yield Finding("warning", field, reason, "put it beside L where the figures matter", Authority.LABKIT)


def _even(workload: "Workload") -> Iterator[Finding]:
    layout = workload.parallelism
    places = workload.model.num_layers + sum(getattr(layout, name) for name in _TAKEN)
    what = "num_layers" if places == workload.model.num_layers else "num_layers with embedding and loss"
    chunks, authority = workload.chunks, Authority.CONFIG
    if places == workload.model.num_layers:
        authority = Authority.ARGUMENTS if chunks == 1 else Authority.STAGES
        authority = authority if workload.model.hybrid_layer_pattern is None else Authority.HYBRID
    if places % layout.pp:
        reason = f"{layout.pp} stages do not divide {what} ({places})"
        yield Finding("error", _PP, reason, "use a divisor, or give the layers of the first or last stage", authority)
    elif places // layout.pp % chunks:
        reason = f"{chunks} chunks do not divide the {places // layout.pp} layers of a stage"
        yield Finding("error", _VPP, reason, "use a divisor", authority)


def _uneven(workload: "Workload") -> Iterator[Finding]:
    layout, chunks = workload.parallelism, workload.chunks
    left, stages = workload.model.num_layers, layout.pp
    for name in _ENDS:
        layers = getattr(layout, name)
        if layers is not None:
            left -= layers
            stages -= 1
            if layers % chunks:
                reason = f"{chunks} chunks do not divide the stage's {layers} layers"
                yield Finding("error", f"parallelism.{name}", reason, f"use a multiple of {chunks}", Authority.CONFIG)
    # Megatron's arithmetic takes fewer than no layers, or stages, for a remainder like any other.
    remains = bool(left) != bool(stages) or bool(stages and left % stages)
    authority = Authority.CONFIG if remains else Authority.STAGES
    if layout.pp == 1 and (left or stages < 0):
        named = next(name for name in _ENDS if getattr(layout, name) is not None)
        reason = f"without a pipeline one stage has all {workload.model.num_layers} layers"
        remedy = "leave it out or raise pipeline_model_parallel_size"
        yield Finding("error", f"parallelism.{named}", reason, remedy, authority)
    elif left < 0 or bool(left) != bool(stages):
        reason = f"{left} layers are left for {stages} other stages"
        if left < 0 or not stages:
            layers = workload.model.num_layers
            reason = f"the stages named have {layers - left} layers, the model {layers}"
        yield Finding("error", _PP, reason, "let the stages' layers add up to num_layers", authority)
    elif stages and left % stages:
        reason = f"{stages} other stages do not divide the {left} layers left for them"
        yield Finding("error", _PP, reason, "let the layers of the other stages be equal", authority)
    if stages and not remains and left // stages % chunks:
        reason = f"{chunks} chunks do not divide the {left // stages} layers of the other stages"
        yield Finding("error", _VPP, reason, "use a divisor", Authority.CONFIG)


def _micro_batches(workload: "Workload") -> Iterator[Finding]:
    layout, number = workload.parallelism, workload.num_microbatches
    group, field = layout.microbatch_group, "parallelism.microbatch_group_size_per_vp_stage"
    if not layout.pp <= group <= number:
        reason = f"{group} micro-batches in a row must be at least the {layout.pp} stages and at most all {number}"
        yield Finding("error", field, reason, "change it, or raise batch.global_batch_size", Authority.SCHEDULES)
    elif 0 < number % group < layout.pp:
        reason = f"of {number} micro-batches {number % group} are left over, fewer than the {layout.pp} stages"
        yield Finding("error", field, reason, "let it divide the micro-batches", Authority.SCHEDULES)
