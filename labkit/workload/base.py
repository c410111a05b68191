"""What every part of a workload has in common: frozen, strict, hashable, unknown keys refused."""

from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """A frozen, strictly typed part of a `Workload`; its field names are Megatron Core's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, not validated; what was derived from the old ones is not copied along."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


_LONGEST_LIST = 2**16
"""Entries: a few lines of YAML with aliases stand for more lists than can be gone through."""


def _as_tuple(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        raise PydanticCustomError("too_long", "should be a list of at most {most} entries", {"most": _LONGEST_LIST})
    return tuple(value) if isinstance(value, list) else value


type Many[T: Hashable] = Annotated[tuple[T, ...], FailFast(), BeforeValidator(_as_tuple)]
"""A tuple that also accepts the list YAML and JSON have for it."""
