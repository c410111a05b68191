"""What backward replays instead of keeping: Megatron Core's four recompute fields."""

from typing import Literal, get_args

from pydantic import PositiveInt

from labkit.workload.base import Many, Part

RecomputeModule = Literal[
    "core_attn",
    "gdn_norm_out",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
]
RECOMPUTE_MODULES: tuple[str, ...] = get_args(RecomputeModule)
"""The labels Megatron Core 0.19 accepts (`TransformerConfig.__post_init__`)."""


class Recompute(Part):
    """The recompute choice. `granularity: selective` with an empty list is a valid control."""

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_modules: Many[RecomputeModule] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: PositiveInt | None = None

    @property
    def modules(self) -> frozenset[str]:
        """The labels in force: none unless selective; Megatron's default is `core_attn`."""
        if self.recompute_granularity != "selective":
            return frozenset()
        return frozenset(("core_attn",) if self.recompute_modules is None else self.recompute_modules)

    @property
    def without_granularity(self) -> tuple[str, ...]:
        """Fields that are given and do nothing, as nothing is recomputed."""
        if self.recompute_granularity is not None:
            return ()
        names = ("recompute_method", "recompute_num_layers", "recompute_modules")
        return tuple(name for name in names if getattr(self, name))

    @property
    def label(self) -> str:
        """Short name for tables and charts: `none`, `[]`, `[layernorm, moe_act]`, `full uniform 1`."""
        if self.recompute_granularity is None:
            return "none"
        if self.recompute_granularity == "full":
            return f"full {self.recompute_method} {self.recompute_num_layers}"
        return f"[{', '.join(sorted(self.modules))}]"

    @property
    def said(self) -> str:
        """The label within a sentence, where the names of nothing (`none`, `[]`) would not read."""
        nothing = self.recompute_granularity != "full" and not self.modules
        return "nothing recomputed" if nothing else self.label
