"""May this micro-batch run: admit, split, or refuse with what would work."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from labkit.admission.decision import Decision, Refused, Spread
from labkit.admission.passes import Pass, kinds_of
from labkit.admission.requests import Request, items_of, requests_of
from labkit.admission.split import split
from labkit.errors import InputError
from labkit.memory.profiles import Profiles
from labkit.plan import Budget
from labkit.workload import Workload
from labkit.workload.gpu import GPUS


class Admission:
    """Decides, for one template and one budget, what of some requests may run together.

    Prepared once (seconds, when it first decides on a kind of pass), it then takes milliseconds a decision:

    >>> from labkit import Workload
    >>> from labkit.admission import Admission
    >>> admission = Admission(Workload.load("data/workloads/qwen3.8-27b-lora.yaml"), "80GB")
    >>> admission.decide([2048, 4096]).outcome
    'admit'

    What is priced is the busiest rank of one data-parallel replica, and one step of micro-batches like the one at hand.
    A caller that keeps more on the device beside that (another model, outputs of earlier passes) lowers the budget by
    it.

    Known limitations: a step whose micro-batches differ reserves other segments than one whose micro-batches are alike,
    which is all that the allowance for them is simulated on; with pipelining, micro-batches of other proportions under
    way at once may hold a little more than the fullest of them does by itself. What CUDA's context and NCCL take comes
    on top of the budget.
    """

    def __init__(
        self, template: Workload, budget: str | Budget | None = None, *, profiles: str | Path | Profiles | None = None
    ) -> None:
        """Of a template, whose batch says how it is packed, and no more.

        Args:
            template: As it trains; one of the `lora` runtime packs trees, one of the `megatron` runtime packs sequences
                where its batch is packed, and pads them to the longest otherwise.
            budget: What a rank may allocate: `80GB`, `74.5GiB`, a GPU's name; the template's GPU by default.
            profiles: A folder of measured peaks (`labkit profile`), which may only raise a price.

        Raises:
            InputError: the template is none or breaks a rule, or the budget is no amount of memory.
        """
        if not isinstance(template, Workload):
            raise InputError("the template: should be a Workload; Workload.load reads one from a file")
        if not isinstance(budget, str | Budget | None):
            raise InputError("the budget: should be a text such as 80GB, or a Budget")
        gpu = GPUS[template.training.gpu]
        self.template = template.checked("the template")
        if template.model.position_embedding_type == "learned_absolute":
            raise InputError(
                "the template: the table of learned positions grows with the batch, which admission does not price; "
                "use rope"
            )
        if budget is None:
            self.budget = Budget(gpu.name, gpu.total_memory_bytes)
        else:
            self.budget = Budget.read(budget) if isinstance(budget, str) else budget
        self._profiles = Profiles(Path(profiles)) if isinstance(profiles, str | Path) else profiles
        self._passes: dict[tuple[bool | None, Any], Pass] = {}

    def prepare(self, no_grad: bool | None = None, outputs: Any = None) -> float:
        """Make ready for a kind of pass; seconds that took."""
        started = time.perf_counter()
        self.run((no_grad, outputs)).prepare()
        return time.perf_counter() - started

    @property
    def damaged(self) -> tuple[str, ...]:
        """Profiles that could not be trusted."""
        return () if self._profiles is None else self._profiles.damaged

    def decide(self, requests: Iterable[Request | Mapping[str, Any] | SupportsIndex]) -> Decision:
        """What may run, in which micro-batches.

        Raises:
            InputError: a request is wrong, or the template has no such pass.
        """
        wanted = requests_of(requests)
        prefixes: dict[str, int] = {}
        for each in wanted:
            if each.prefix is not None and each.shared_prefix is not None:
                prefixes[each.prefix] = each.shared_prefix
        spreads: list[Spread] = []
        refused: list[Refused] = []
        for kind, positions in kinds_of(wanted).items():
            run = self.run(kind)
            found = split(run, items_of(wanted, positions), prefixes)
            spreads.append(Spread(run, found))
            refused += [Refused(run, each) for each in found.unfit]
        return Decision(self.budget, wanted, spreads, refused)

    def run(self, kind: tuple[bool | None, Any]) -> Pass:
        """The passes of a kind."""
        if kind not in self._passes:
            self._passes[kind] = Pass(self.template, kind, self.budget.bytes, self._profiles)
        return self._passes[kind]
