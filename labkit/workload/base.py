"""What every part of a workload has in common: frozen, strict, hashable, unknown keys refused."""

from collections.abc import Hashable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Part(BaseModel):
    """A frozen, strictly typed part of a `Workload`; its field names are Megatron Core's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


type Many[T: Hashable] = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A tuple that also accepts the list YAML and JSON have for it."""
