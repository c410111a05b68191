"""How the work is spread over ranks."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, StringConstraints

from labkit.workload.base import Part
from labkit.workload.pipeline_layout import layout_stages


def _layout(text: str) -> str:
    layout_stages(text)
    return text


class Parallelism(Part):
    """Parallel sizes, in Megatron Core's names; short forms are properties."""

    world_size: Annotated[int, Field(gt=0, le=2**20)]
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    """None is Megatron's default: `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    cp_comm_type: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """How context-parallel ranks exchange keys and values."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Model chunks of a pipeline rank; None: one, without interleaving, or those of the layout."""
    microbatch_group_size_per_vp_stage: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Micro-batches a chunk runs before the next chunk's turn; None is Megatron's default, the pipeline size."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """The head counts as a layer of the last stage."""

    pipeline_model_parallel_layout: Annotated[str, StringConstraints(min_length=1), AfterValidator(_layout)] | None = (
        None
    )
    """The stages one by one: `Et*3|(tt|)*6mL`."""

    @property
    def marked_stages(self) -> tuple[str, ...]:
        """Symbols of each stage of that layout, virtual ones included; none without it."""
        return layout_stages(self.pipeline_model_parallel_layout) if self.pipeline_model_parallel_layout else ()

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel ranks."""
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks of a pipeline rank: as stated, or as many as `pipeline_model_parallel_layout` has."""
        if self.virtual_pipeline_model_parallel_size is None and self.pipeline_model_parallel_layout is not None:
            return max(1, len(self.marked_stages) // self.pp)
        return self.virtual_pipeline_model_parallel_size or 1

    def first_rank(self, stage: int) -> int:
        """The first rank of a pipeline stage; its ranks follow each other."""
        return stage * (self.world_size // self.pp)

    @property
    def microbatch_group(self) -> int:
        """Micro-batches a model chunk runs in a row."""
        return self.microbatch_group_size_per_vp_stage or self.pp

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of the experts."""
        size = self.expert_tensor_parallel_size
        return self.tp if size is None else size

    @property
    def dp(self) -> int:
        """Data-parallel ranks of the dense parameters (context-parallel ranks not counted)."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel ranks of the expert parameters."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def sp(self) -> int:
        """Ranks the sequence is split over between tensor-parallel regions: tp or 1."""
        return self.tp if self.sequence_parallel else 1
