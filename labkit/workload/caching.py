"""PyTorch's allocator settings, as `PYTORCH_ALLOC_CONF` (formerly `PYTORCH_CUDA_ALLOC_CONF`) has them."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from labkit.workload.base import Part
from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_UNIT = 512
"""`kMinBlockSize`."""
_INTERVALS = 16
"""`kRoundUpPowerOfTwoIntervals`: requests up to 2 MiB, up to 4 MiB, ... and from 32 GiB on."""

_BLANK = re.compile(r"[ \t\n\v\f\r]")
_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_INTEGER = re.compile(r"\+?[0-9]{1,19}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
_LIST = re.compile(r"\[(([0-9]{1,8}|>):[0-9]{1,8}(,(?!\])|,?(?=\])))*\]")
_OF_NO_SIZE = ("pinned_", "release_lock_on_", "graph_capture_record_stream_reuse", "throw_on_")

_Megabytes = Annotated[int, Field(gt=0, lt=2**24)]


def _number_or_list(value: object) -> object:
    if value is None or type(value) is int or (isinstance(value, str) and _LIST.fullmatch(value)):
        return value
    raise PydanticCustomError("divisions", "should be a power of two, or a text such as '[256:2,512:4,>:8]'")


class AllocatorSettings(Part):
    """Names and defaults of PyTorch 2.14 (`c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`)."""

    expandable_segments: bool = False
    large_segment_size_mb: Annotated[int, Field(gt=10, lt=2**24)] = 20
    """Of what requests from 1 to 10 MiB are cut, and of an expandable segment's pages for large requests."""
    max_split_size_mb: _Megabytes | None = None
    """Blocks from this size on are not split; None: all may be."""
    max_non_split_rounding_mb: _Megabytes = 20
    """How much larger than a request such a block may be."""
    roundup_power2_divisions: Annotated[int | str | None, BeforeValidator(_number_or_list)] = None
    """Into how many steps the sizes from a power of two to the next are divided: a power of two, or PyTorch's list
    for sizes from so many MiB on, `[256:2,512:4,>:8]`; None: requests are rounded to 512 bytes."""
    garbage_collection_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Share of the memory allowed above which unused segments go back to the device; None: never."""
    per_process_memory_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the device's memory that is allowed."""

    @classmethod
    def read(cls, text: str) -> Self:
        """The settings of `PYTORCH_ALLOC_CONF`; what decides no size (`backend:native`, `pinned_*`) is passed over.

        >>> AllocatorSettings.read("expandable_segments:True,roundup_power2_divisions:[256:2,>:8]").label
        'expandable_segments:True,roundup_power2_divisions:[256:2,>:8]'

        Raises:
            ValueError: the text is none that PyTorch takes, or asks for another allocator, in one sentence.
        """
        stated: dict[str, object] = {}
        for name, value in _settings(text):
            if name in ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"):
                stated[name] = int(_leading(_INTEGER, name, value))
            elif name == "roundup_power2_divisions":
                stated[name] = value if value.startswith("[") else int(_leading(_INTEGER, name, value))
            elif name in ("garbage_collection_threshold", "per_process_memory_fraction"):
                stated[name] = float(_leading(_DECIMAL, name, value))
            elif name == "expandable_segments" and value in ("True", "False"):
                stated[name] = value == "True"
            elif (name, value) != ("backend", "native") and not name.startswith(_OF_NO_SIZE):
                raise ValueError(f"PyTorch has no setting {name[:80]}:{value[:80]}")
        return cls.model_validate(stated)

    def rounded(self, nbytes: int) -> int:
        """`nbytes` (at least 1) as the allocator looks for them (`round_size`)."""
        divisions = self._divisions(nbytes)
        if divisions > 1 and nbytes > _UNIT * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor // divisions
            return -(-nbytes // step) * step
        return -(-nbytes // _UNIT) * _UNIT

    @property
    def label(self) -> str:
        """What differs from PyTorch's defaults, as `PYTORCH_ALLOC_CONF` says it."""
        stated = self.model_dump(exclude_defaults=True)
        return ",".join(f"{name}:{value}" for name, value in stated.items()) or "default settings"

    def _divisions(self, nbytes: int) -> int:
        table = _divisions(self.roundup_power2_divisions)
        return table[min(max(nbytes.bit_length() - 1 - 20, 0), _INTERVALS - 1)]


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Names and values as PyTorch finds them: it passes over what stands where a colon or a comma should be.

    `ConfigTokenizer` and `AcceleratorAllocatorConfig::parseArgs` (`c10/core/AllocatorConfig.h`).
    """
    tokens = _TOKEN.findall(_BLANK.sub("", text))
    at = 0
    while at < len(tokens):
        name, start = tokens[at], at + 2
        try:
            end = tokens.index("]", start) if tokens[start] == "[" else start
        except (IndexError, ValueError):
            raise ValueError(
                f"no value follows {name[:80]}; settings are name:value, with commas between them"
            ) from None
        yield name, "".join(tokens[start : end + 1])
        at = end + 2


def _leading(number: re.Pattern[str], name: str, value: str) -> str:
    """The number that a value begins with, which is as far as `stoull` and `stod` read."""
    found = number.match(value)
    if found is None:
        raise ValueError(f"{name}:{value[:80]} is no number")
    return found.group()


DEFAULT = AllocatorSettings()


@lru_cache(maxsize=16)
def _divisions(stated: int | str | None) -> tuple[int, ...]:
    """Of each interval (`parseRoundUpPower2Divisions`)."""
    if not isinstance(stated, str):
        return (stated or 0,) * _INTERVALS
    table, last = [0] * _INTERVALS, None
    for start, divisions in _entries(stated):
        if start is None:
            first = 0 if last is None else last + 1
            table[first:] = [divisions] * (_INTERVALS - first)
            continue
        index = min(start.bit_length() - 1, _INTERVALS - 1)
        if last is None:
            table[:index] = [divisions] * index
        table[index], last = divisions, index
    return tuple(table)


def _entries(stated: str) -> Iterator[tuple[int | None, int]]:
    """(MiB from which on, or None for `>`; divisions)."""
    for entry in filter(None, stated.strip("[]").split(",")):
        start, _, divisions = entry.partition(":")
        yield (None if start == ">" else int(start)), int(divisions)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def allocator_findings(workload: "Workload") -> Iterator[Finding]:
    """PyTorch's own rules (`c10/core/AllocatorConfig.cpp`), and what does nothing."""
    settings, prefix = workload.training.allocator, "training.allocator"
    for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        stated: int | None = getattr(settings, name)
        if stated is not None and stated < settings.large_segment_size_mb:
            reason = f"PyTorch takes no {stated} below the large_segment_size_mb of {settings.large_segment_size_mb}"
            yield Finding(
                "error", f"{prefix}.{name}", reason, f"use at least {settings.large_segment_size_mb}", Authority.PYTORCH
            )
    yield from _roundup(settings, f"{prefix}.roundup_power2_divisions")
    if settings.garbage_collection_threshold is not None:
        # `malloc` collects where `set_fraction`, which `DeviceCachingAllocator` sets for fractions below 1.
        field = f"{prefix}.garbage_collection_threshold"
        if settings.per_process_memory_fraction == 1:
            reason = "PyTorch collects no garbage unless per_process_memory_fraction is below 1"
            yield Finding("warning", field, reason, "leave it out, or limit the process", Authority.PYTORCH)
        elif settings.expandable_segments:
            reason = "PyTorch collects no garbage from expandable segments"
            yield Finding("warning", field, reason, "leave one of the two out", Authority.PYTORCH)


def _roundup(settings: AllocatorSettings, field: str) -> Iterator[Finding]:
    stated = settings.roundup_power2_divisions
    if isinstance(stated, int) and not _is_power_of_two(stated):
        yield Finding(
            "error", field, f"{stated} is not a power of two", "use a power of two, or leave it out", Authority.PYTORCH
        )
    if not isinstance(stated, str):
        return
    for start, divisions in _entries(stated):
        if divisions and not _is_power_of_two(divisions):
            yield Finding(
                "error", field, f"{divisions} divisions are neither a power of two nor 0", "use one", Authority.PYTORCH
            )
        if start is not None and not _is_power_of_two(start):
            yield Finding(
                "error", field, f"an interval from {start} MiB on is not a power of two", "use one", Authority.PYTORCH
            )
