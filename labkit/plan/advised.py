"""What `labkit plan` says, as data and for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml
from pydantic import Field

from labkit.workload import Recompute, Workload
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB, GPUS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

_SHOWN_SHORT, _SHOWN_FITTING = 4, 6
_CANDIDATES = 5


class Option(Part):
    """One choice."""

    recompute: Recompute
    label: str
    setting: str
    """What else differs from the workload (`tensor_model_parallel_size 8`); empty where nothing does."""
    stage: int
    peak_phase: str
    peak_iteration: int
    peak_allocated_bytes: int
    covered_bytes: int
    """With the margin."""
    saved_bytes: int
    """Less than the workload as it is."""
    retained_bytes: int
    """What forward leaves for backward, in allocator blocks."""
    is_exact: bool
    """Its peak is that of `labkit estimate`; else of blocks of fresh segments, 1 % above to 2 % below."""
    fits: bool | None
    """None: it is too near the budget to say without its exact price."""
    on_front: bool
    """No other choice undercuts it in both peak and cost."""
    replay_seconds: float
    """Of a step: the least that running again takes."""
    replay_share: float
    """The same as a share of `Advice.step_seconds`."""
    replay_flops: int
    replay_communicated_bytes: int
    replay_regions: int
    """Regions that a micro-batch runs again."""


class LabelPrice(Part):
    """What a label saves and costs alone, against no recompute."""

    label: str
    retained_saved_bytes: int
    """Of tensors."""
    peak_saved_bytes: int
    replay_seconds: float
    replay_regions: int


class IdleLabel(Part):
    """A label that is not among the choices."""

    label: str
    reason: str


class Saving(Part):
    """Tensors that the first choice does not hold at its peak."""

    tensor: str
    bytes: int


class Advice(Part):
    """What to run next."""

    schema_name: Literal["labkit.plan/1"] = "labkit.plan/1"
    workload: Workload
    workload_hash: str
    budget_name: str
    budget_bytes: int
    step_seconds: float
    """The least that a step's forward and backward take on the GPU: every operation at the slowest of compute, memory
    and NVLink, at data-sheet speeds (`labkit.memory.replay`)."""
    considered: int
    """Choices that were priced, those in other settings included."""
    control: Option
    """The workload as it is."""
    first: Option | None
    """To be tried first; None where nothing fits."""
    labels: Option | None
    """Of lists of labels the first that fits; None where none does."""
    options: Many[Option]
    """All choices, cheapest first."""
    settings: Many[Option] = ()
    """Other layouts and micro-batches with the cheapest choice that fits each, nearest first."""
    alone: Many[LabelPrice] = ()
    """Each label by itself."""
    idle: Many[IdleLabel] = ()
    """Labels that cannot or need not be used."""
    savings: Many[Saving] = ()
    """Where the first choice's saving comes from, largest first."""
    sentences: Many[str]
    """The advice and its reasons."""
    remedies: Many[str] = ()
    """Those of the sentences that name something to try."""
    why_not_less: Many[str] = ()
    """Where the workload does not fit as it is: what the nearest choices lack that replay less than the first."""
    shows_all: bool = Field(default=False, exclude=True)
    """The table for people has every choice."""

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        layout = f"{self.workload.parallelism.world_size} x {GPUS[self.workload.training.gpu].name}"
        yield Text.assemble((self.workload.model.name, "bold"), f"  {layout}, {self.considered} choices priced")
        yield from map(Text, (*self.sentences, *self.why_not_less))
        width = options.max_width
        yield _options(self._shown(), self.control.label, self.first, width)
        if self.savings:
            assert self.first is not None
            yield Text(f"What {self.first.label} does not hold where {self.control.label} peaks:")
            yield from (Text(f"  {_gib(saving.bytes):>7} GiB  {saving.tensor}") for saving in self.savings)
        if self.alone:
            yield _labels(self.alone)
        if self.idle:
            yield Text(f"Not worth trying: {'; '.join(each.reason for each in self.idle)}.")
        if self.settings:
            yield _options(self.settings, "", None, width)

    def with_all_shown(self) -> Self:
        """The same, whose table has every choice."""
        return self.model_copy(update={"shows_all": True})

    def _around(self) -> "list[Option]":
        """The front around the budget: the nearest that do not fit, the cheapest that do, and the lowest."""
        others = [option for option in self.options if option.on_front and option.label != self.control.label]
        short = sorted((option for option in others if option.fits is False), key=lambda option: option.covered_bytes)
        fitting = [option for option in others if option.fits is not False]
        return [*short[:_SHOWN_SHORT], *fitting[:_SHOWN_FITTING], *fitting[_SHOWN_FITTING:][-1:]]

    def _shown(self) -> "list[Option]":
        """Those, or all if asked for, and the workload as it is, the cheapest first."""
        exact, listed = (self.control, self.labels, self.first), self.options if self.shows_all else self._around()
        shown = {option.label: option for option in (*listed, *exact) if option is not None}
        return sorted(shown.values(), key=lambda option: (option.replay_seconds, option.label))

    def study(self) -> dict[str, Any]:
        """A matched study file that would confirm it: the workload against the first choices."""
        chosen = [option for option in (self.first, self.labels, *self._around()) if option is not None]
        candidates = {option.label: option.recompute for option in chosen if option.label != self.control.label}
        stated = self.workload.model_dump(mode="json", exclude_unset=True)
        return {
            "name": f"{file_name(self.workload.model.name)}-plan",
            "title": f"Recompute choices for {self.workload.model.name}, proposed by labkit plan",
            "base": {name: part for name, part in stated.items() if name != "recompute"},
            "control": {"recompute": _plain(self.control.recompute)},
            "candidates": [{"recompute": _plain(each)} for each in list(candidates.values())[:_CANDIDATES]],
            "target": {"peak_allocated_bytes": self.budget_bytes},
        }

    @property
    def study_text(self) -> str:
        """The same as a file."""
        return yaml.safe_dump(self.study(), sort_keys=False, width=120, allow_unicode=True)


_DROPPED = ((110, "saved"), (100, "regions"), (92, "peak in"))
"""Below so many columns of the terminal the table goes without."""


def _options(shown: "Sequence[Option]", control: str, first: Option | None, width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    caption = "~ within 1 or 2 %; replay and step: the least that running again takes; regions: of a micro-batch"
    table = Table(caption=caption, caption_justify="left")
    table.add_column("recompute", overflow="fold", min_width=14)
    setting = any(option.setting for option in shown)
    if setting:
        table.add_column("setting", overflow="fold")
    dropped = {name for least, name in _DROPPED if width < least}
    for name in _FIGURES:
        if name not in dropped:
            text = name in ("peak in", "fits")
            table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for option in shown:
        named = f"{option.label} (as it is)" if option.label == control else option.label
        figures = dict(zip(_FIGURES, _figures(option), strict=True))
        table.add_row(
            Text(named, style="bold" if first is not None and option.label == first.label else ""),
            *([Text(option.setting)] if setting else []),
            *(figure for name, figure in figures.items() if name not in dropped),
        )
    return table


_FIGURES = ("peak GiB", "with margin", "saved", "replay ms", "step", "regions", "peak in", "fits")


def _figures(option: Option) -> "tuple[str | Text, ...]":
    from rich.text import Text

    about = "" if option.is_exact else "~"
    return (
        f"{about}{_gib(option.peak_allocated_bytes)}",
        f"{about}{_gib(option.covered_bytes)}",
        _gib(option.saved_bytes),
        f"{option.replay_seconds * 1e3:.2f}",
        f"+{option.replay_share:.1%}",
        str(option.replay_regions),
        option.peak_phase.replace("_", " "),
        {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("near")}[option.fits],
    )


def _labels(prices: "Sequence[LabelPrice]") -> "Table":
    from rich.table import Table

    table = Table(title="Each label alone, against none (tensors)", title_justify="left")
    table.add_column("label")
    for name in ("retained GiB saved", "peak GiB saved", "replay ms", "regions"):
        table.add_column(name, justify="right")
    for price in prices:
        table.add_row(
            price.label,
            _gib(price.retained_saved_bytes),
            _gib(price.peak_saved_bytes),
            f"{price.replay_seconds * 1e3:.2f}",
            str(price.replay_regions),
        )
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:z.2f}"


def _plain(recompute: Recompute) -> dict[str, Any]:
    # Each says all four, since a study lays it over the control's.
    return recompute.model_dump(mode="json")


def file_name(name: str) -> str:
    """A name as studies and files may have it."""
    kept = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "-" for each in name)
    return kept[:50].lstrip("._-") or "workload"
