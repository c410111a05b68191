"""What every part of a workload has in common: frozen, strict, hashable, unknown keys refused."""

from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Part(BaseModel):
    """A frozen, strictly typed part of a `Workload`; its field names are Megatron Core's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, not validated; what was derived from the old ones is not copied along."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


type Many[T: Hashable] = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A tuple that also accepts the list YAML and JSON have for it."""
