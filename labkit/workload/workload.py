"""`Workload`: the one value that describes what is run."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError

from labkit.errors import InputError, nearest
from labkit.workload.base import Part
from labkit.workload.batch import Batch
from labkit.workload.files import is_study, load_mapping, model_mapping, workload_file
from labkit.workload.finding import Finding
from labkit.workload.launch import Launch
from labkit.workload.launched import launched
from labkit.workload.model import Model
from labkit.workload.parallelism import Parallelism
from labkit.workload.recompute import Recompute
from labkit.workload.routing import Routing
from labkit.workload.rules import findings
from labkit.workload.training import Training


class Workload(Part):
    """A model, a parallel layout, a batch, a recompute choice and a training setup.

    Frozen and hashable. Build one from keywords, with `from_mapping`, or with `load` from YAML; the last two
    accept a model's name or file in place of its mapping and raise `InputError` (one sentence) for anything wrong.
    The constructor raises pydantic's `ValidationError` for wrong types; `checked()` applies the rules.

    >>> workload = Workload.load("data/workloads/moonlight-16b.yaml")
    >>> workload.parallelism.tp
    2
    """

    model_config = ConfigDict(title="Workload")

    model: Model
    parallelism: Parallelism
    batch: Batch
    recompute: Recompute = Field(default=Recompute())
    training: Training = Field(default=Training())
    routing: Routing | None = None
    """How the router spreads tokens; None is not stated: priced as balanced, and given as a range up to the worst."""
    launch: Launch | None = None
    """What Megatron-LM is told beyond all this."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a workload from a YAML file; the name of one in `data/workloads` will do.

        Raises:
            InputError: the file cannot be read, is not YAML, or describes no workload that can run.
        """
        path = workload_file(Path(path))
        mapping = load_mapping(path)
        if is_study(mapping):
            raise InputError(
                f"{path}: is a study, not a workload; labkit check, study, report and profile learn take one, here "
                "give a workload such as its base"
            )
        return cls.described(mapping, path).checked(str(path), of_file=True)

    @classmethod
    def described(cls, mapping: Mapping[str, Any], path: Path) -> Self:
        """What the mapping in a file says, without the rules; a model in another file is named from its folder.

        Raises:
            InputError: unknown or missing keys, or wrong types.
        """
        data = dict(mapping)
        if isinstance(data.get("model"), str):
            data["model"] = model_mapping(data["model"], str(path), path.parent)
        return cls.unchecked(data, source=str(path))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "workload") -> Self:
        """Build a workload that can run from plain data; `source` names it in errors.

        Raises:
            InputError: unknown or missing keys, wrong types, or a broken rule.
        """
        return cls.unchecked(mapping, source).checked(source)

    @classmethod
    def unchecked(cls, mapping: Mapping[str, Any], source: str = "workload") -> Self:
        """The same without the rules: what the mapping describes may not run.

        Raises:
            InputError: unknown or missing keys, or wrong types.
        """
        data = dict(mapping)
        if isinstance(data.get("model"), str):
            data["model"] = model_mapping(data["model"], source, Path())
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(f"{source}: {first_problem(cls, error)}") from None

    def checked(self, source: str = "workload", *, of_file: bool = False) -> Self:
        """Itself, if every rule allows it to run; of a file, others can be pointed to.

        Raises:
            InputError: the first rule it breaks, with reason and remedy, and how many there are.
        """
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if errors:
            others = f" (the first of {len(errors)} errors{'; `labkit check` lists them' if of_file else ''})"
            raise InputError(f"{source}: {errors[0]}{others if len(errors) > 1 else ''}")
        return self

    @property
    def can_run(self) -> bool:
        """Whether it breaks no rule."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Broken rules and idle choices (`labkit.workload.rules`)."""
        return findings(self)

    def with_recompute(self, **fields: Any) -> Self:
        """The same workload under another recompute choice, checked; what it leaves open stays open."""
        return self.from_mapping({**self.model_dump(exclude_unset=True), "recompute": fields})

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary as Megatron pads it (`megatron.training.vocab_utils.calculate_padded_vocab_size`)."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallelism.tp
        return -(-self.model.vocab_size // multiple) * multiple

    @property
    def packed_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that Megatron packs into the row; what pads the row belongs to the last one.

        Empty where it packs none; the `lora` runtime goes by the tree that its sequences are.
        """
        packed = self.batch.packed
        if packed is None or self.training.runtime == "lora":
            return ()
        return (*packed.lengths[:-1], self.batch.seq_length - sum(packed.lengths[:-1]))

    @property
    def chunks(self) -> int:
        """Model chunks of a pipeline rank as Megatron works them out: what marks stages says how many there are."""
        stages = self.parallelism.marked_stages
        if self.model.hybrid_layer_pattern is not None:
            stages = self.model.pattern_stages
        return max(1, len(stages) // self.parallelism.pp) if stages else self.parallelism.vpp

    @property
    def fp8_recipe(self) -> str:
        """Megatron's `--fp8-recipe`, whether or not anything runs in FP8."""
        return launched(self.launch).fp8_recipe or self.training.optimizer.fp8_recipe or "delayed"

    @property
    def stated_flex_backend(self) -> str:
        """Megatron's `--moe-flex-dispatcher-backend`."""
        own = "deepep" if self.model.mixture_of_experts is None else self.training.kernels.moe_flex_dispatcher_backend
        return launched(self.launch).moe_flex_dispatcher_backend or own

    @property
    def flex_backend(self) -> str:
        """The same under its former name too."""
        return "deepep" if launched(self.launch).moe_enable_deepep else self.stated_flex_backend

    @property
    def fuses_activation(self) -> bool:
        """Megatron's `bias_activation_fusion`; `--quick-geglu` is fused where there are biases (`validate_args`)."""
        quick = launched(self.launch).quick_geglu
        return self.training.fuses_activation and (self.model.add_bias_linear or not quick)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches a data-parallel rank runs in one step."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallelism.dp)

    @property
    def distinct_microbatches(self) -> int:
        """As many micro-batches of a step as show all that a step with all of them holds.

        Without pipelining the second is like all later ones. A stage that takes forward and backward in turn has at
        most `pp` under way, and one more shows a turn in the midst of it. Interleaved stages run a group through one
        chunk after the other: 2 (pp - 1) + (vpp - 1) group forward passes of a chunk come before the first backward
        (`get_pp_rank_microbatches`), and a full round after them shows every turn.
        """
        layout = self.parallelism
        if layout.vpp == 1:
            return min(self.num_microbatches, layout.pp + 1)
        group = layout.microbatch_group
        enough = 2 * group + -(-2 * layout.pp // layout.vpp)
        # The last group stays as short as it is.
        enough += (self.num_microbatches - enough) % group
        return min(self.num_microbatches, enough)

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of everything in it: equal workloads have equal hashes, in every process."""
        return content_hash(self.model_dump(mode="json"))


def content_hash(plain: object) -> str:
    """SHA-256 (hex) of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_ELSEWHERE = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "head_dim": "kv_channels",
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "rope_theta": "rotary_base",
    "hidden_act": "activation_func",
}
"""What Hugging Face's configurations call fields of the model."""


def first_problem(model: type[Part], error: ValidationError) -> str:
    """The first validation problem in one sentence, with the nearest valid name for an unknown key or value."""
    # A misspelt key also leaves the right one missing: the key is what to mend.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    location = [
        str(part)[:80] for part in problem["loc"] if not str(part).startswith(("function-", "tuple[", "constrained"))
    ]
    where = ".".join(location) or "the document"
    if problem["type"] == "extra_forbidden":
        valid = _fields_at(model, location[:-1])
        meant = _ELSEWHERE.get(location[-1])
        return f"unknown key {where!r}{f'; Megatron says {meant!r}' if meant else nearest(location[-1], valid)}"
    if problem["type"] == "missing":
        return f"{where!r} is missing"
    if problem["type"] == "tuple_type":
        return f"{where}: should be a list (got {shown(problem['input'])})"
    if problem["type"] == "literal_error":
        expected = [part.strip(" '") for part in problem["ctx"]["expected"].replace(" or ", ", ").split(",")]
        given = problem["input"]
        close = nearest(given[:80] if isinstance(given, str) else "", expected)
        return f"{where}: {shown(given)} is not allowed{close}"
    if problem["type"] in ("dict_type", "model_type"):
        return f"{where}: should be a mapping of keys to values (got {shown(problem['input'])})"
    said = problem["msg"].removeprefix("Value error, ")
    hint = _number_meant(problem["input"]) if problem["type"] in ("int_type", "float_type") else ""
    return f"{where}: {said[0].lower()}{said[1:]} (got {shown(problem['input'])}{hint})"


_EXPONENT = re.compile(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?[eE][-+]?[0-9]{1,2}")


def _number_meant(value: object) -> str:
    """What to write for `5e5`, a text in YAML 1.1, or `5.0e+5`, which is no whole number."""
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return f", which is text in YAML; write {float(value):.17g}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"; write {value:.0f}"
    return ""


def shown(value: object) -> str:
    """A value from a file in at most 80 characters."""
    # Not repr of the whole: aliases let a few lines of YAML stand for more than memory holds, digits can be too many.
    if isinstance(value, dict | list | tuple):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 256 bits"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(model: type[Part], path: list[str]) -> list[str]:
    """Valid field names of the part that `path` leads to."""
    current: Any = model
    for name in path:
        field = current.model_fields.get(name)
        if field is None:
            return []
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        parts = [option for option in options if isinstance(option, type) and issubclass(option, Part)]
        if not parts:
            return []
        current = parts[0]
    return list(current.model_fields)
