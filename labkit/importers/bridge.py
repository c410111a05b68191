"""`import_bridge`: a recipe of Megatron Bridge, or what a run has saved of its configuration, as a `Workload`.

A recipe is a mapping of sections (`ConfigContainer`): the model's provider, whose fields are Megatron's, and how it is
trained. Its defaults and what its names stand for are data (`data/megatron_bridge.yaml`); nothing that a recipe names
is imported or called. Fields become a workload through the same table as Megatron-LM's arguments
(`labkit.importers.fields`).

Source: Megatron Bridge 0.6.2, `training.config`, `training.mixed_precision`, `training.comm_overlap`, `training.setup`.
"""

from collections.abc import Mapping
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any

from labkit.errors import InputError, nearest
from labkit.importers.documents import source_name, text_from
from labkit.importers.fields import EXPRESSED, Arguments, fields
from labkit.importers.huggingface import config_file, count, load_config, model_name, read_config
from labkit.importers.imported import Imported, backend_note, checked
from labkit.importers.keys import Keys
from labkit.importers.recipe_values import (
    DTYPES,
    backend,
    coefficient,
    exchange,
    fields_of,
    layout,
    pattern,
    words,
)
from labkit.importers.silent import decides_no_memory
from labkit.workload import Model
from labkit.workload.files import data_directory, load_mapping, parse_mapping
from labkit.workload.gpu import GPUS
from labkit.workload.workload import shown

type Fields = dict[str, Any]

_PROVIDER, _LATENT, _HYBRID = "GPTModelProvider", "MLAModelProvider", "HybridModelProvider"
_PROVIDERS = (_PROVIDER, _LATENT, _HYBRID, "MambaModelProvider", "GPTModelConfig", "HybridModelConfig")
"""Classes whose defaults are known."""
_SECTIONS = {"ddp": "DistributedDataParallelConfig", "optimizer": "OptimizerConfig"}
"""Sections all of whose fields are looked at, beside the model's, and their classes."""
_READ = frozenset("train dataset tokenizer env_vars mixed_precision comm_overlap dist logger peft model".split())
_HERE = frozenset(
    """grad_reduce_in_fp32 average_in_collective share_embeddings_and_output_weights activation_func
    original_max_position_embeddings yarn_original_max_position_embeddings hybrid_layer_pattern hybrid_override_pattern
    mtp_hybrid_override_pattern store_param_remainders deallocate_pipeline_outputs transformer_layer_spec
    hybrid_stack_spec mamba_chunk_size""".split()
)
"""Fields that are read by name in this file."""
_SEVERAL = ("moe_layer_freq", "moe_aux_loss_coeff")
"""Numbers that may be lists."""
_BF16_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_MODEL_IDS = ("hf_model_id", "hf_path", "hf_model_name_or_path", "from_hf_pretrained")
_MAMBA_CHUNK = 128


@cache
def _tables() -> dict[str, Any]:
    return load_mapping(data_directory() / "megatron_bridge.yaml")


@cache
def _silent() -> frozenset[str]:
    return frozenset(name for names in _tables()["silent"].values() for name in names.split())


@cache
def _usual() -> Fields:
    """The model's fields where nothing is stated."""
    defaults = _tables()["defaults"]
    return {**defaults[_HYBRID], **defaults[_LATENT], **defaults[_PROVIDER]}


def import_bridge(
    path: Path | None, *, config: Path | None = None, world_size: int | None = None, gpu: str | None = None
) -> Imported:
    """Read a recipe; `path` None is standard input. `config` is the `config.json` of the model that it names.

    Raises:
        InputError: a file cannot be read, is no recipe, leaves out the model, or a rule of the workload refuses it.
    """
    source = source_name(path)
    if gpu is not None and gpu not in GPUS:
        raise InputError(f"--gpu {gpu[:80]}: no such GPU{nearest(gpu[:80], GPUS)}")
    recipe = _Recipe(parse_mapping(text_from(path), source), source)
    if config is not None:
        config = config_file(config)
        recipe.take_model(load_config(config), str(config))
    read = recipe.arguments(world_size)
    name = model_name(recipe.model_id, path)
    try:
        found = fields(read, name=name, gpu=gpu or "", environment=recipe.environment)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    found.mapping["training"]["optimizer"]["store_param_remainders"] = recipe.keeps_remainders
    workload = checked(found, source)
    assumed = [*recipe.assumed, *found.assumed, *backend_note(workload, "model.attention_backend")]
    if world_size is None:
        ranks = workload.parallelism.world_size
        assumed.append(
            f"world size: a recipe has none; the smallest that the layout allows, {ranks} (--world-size says another)"
        )
    if gpu is None:
        assumed.append(f"GPU: a recipe names none; {workload.training.gpu} (--gpu says another)")
    counted = [count(workload.model, workload.training.kernels)]
    return Imported(workload, found.not_priced, [*recipe.lost, *found.not_expressed], assumed, counted)


class _Recipe:
    """A recipe's sections, completed by what Megatron Bridge makes of them when a run is set up."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.source = source
        self.assumed: list[str] = []
        self.lost: list[str] = []
        self.keys = Keys(data, source)
        if isinstance(data.get("batch"), dict) and "parallelism" in data:
            raise InputError(f"{source}: is a workload of labkit's already, no recipe of Megatron Bridge")
        if not any(name in data for name in ("model", "train", "optimizer", "ddp", "mixed_precision")):
            raise InputError(f"{source}: no recipe of Megatron Bridge: it has none of model, train, optimizer, ddp")
        stated = self.keys.part("model")
        self.target = str(stated.plain("_target_", ""))[:200]
        inner = stated.part("transformer")
        self.stated = {**fields_of(stated), **fields_of(inner)}
        self.stated.pop("transformer", None)
        self.from_config: Fields = {}
        self.bridge: Fields = {}

    @property
    def model_id(self) -> str:
        """The model of Hugging Face's that it names, if any."""
        places = [self.stated, self.keys.mapping, self.keys.part("tokenizer").mapping]
        for mapping in places:
            for name in (*_MODEL_IDS, "tokenizer_model"):
                if isinstance(value := mapping.get(name), str) and value.strip():
                    return value.strip()[:200]
        return ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the recipe sets."""
        values = self.keys.part("env_vars").mapping
        return {name[:200]: str(value)[:1000] for name, value in values.items() if isinstance(value, str | int | float)}

    @property
    def keeps_remainders(self) -> bool:
        """`OptimizerConfig.store_param_remainders`."""
        return self.keys.part("optimizer").flag("store_param_remainders", True)

    def take_model(self, config: Mapping[str, Any], source: str) -> None:
        """The model of a `config.json`, as a family's `provider_bridge` makes a provider of it."""
        found = read_config(config, source)
        model = Model.model_validate({"name": "config", **found.model}).model_dump(mode="json", exclude={"name"})
        flat = {name: value for name, value in model.items() if not isinstance(value, dict)}
        for part in model.values():
            flat |= part if isinstance(part, dict) else {}
        flat["share_embeddings_and_output_weights"] = not flat.pop("untie_embeddings_and_output_weights")
        flat["multi_latent_attention"] = model["multi_latent_attention"] is not None
        flat["experimental_attention_variant"] = "gated_delta_net" if model["gated_delta_net"] else None
        for name in ("gated_delta_net", "mamba", "mixture_of_experts"):
            flat.pop(name, None)
        flat.pop("make_vocab_size_divisible_by")
        self.from_config = {name: value for name, value in flat.items() if value is not None}
        self.stated = {
            name: value for name, value in self.stated.items() if value is not None or name not in self.from_config
        }
        self.bridge = dict(_tables()["bridges"].get(found.kind, {}))
        if isinstance(overlap := config.get("moe_shared_expert_overlap"), bool):
            self.bridge["moe_shared_expert_overlap"] = overlap
        self.lost += [f"{Path(source).name}: {note}" for note in found.not_expressed]
        self.assumed += found.assumed

    def arguments(self, world_size: int | None) -> Arguments:
        """The recipe as what Megatron's parser and configuration would have."""
        precision, model = self._precision(), self._model()
        ddp, optimizer = (self._section(name, _common(name)) for name in _SECTIONS)
        for name, section in (("model", model), ("ddp", ddp), ("optimizer", optimizer)):
            self._set_by_precision(name, section, precision)
        ddp["use_distributed_optimizer"] |= optimizer["use_distributed_optimizer"]
        world = self._world(model, world_size)
        self._overlap(model, ddp, world)
        ddp["overlap_param_gather"] |= optimizer["overlap_param_gather"]
        given = self._given(model, ddp, optimizer)
        values = {**self._values(model, ddp, optimizer), "world_size": world}
        self._named()
        written = {name: said for name, value in given.items() if (said := words(name, value)) is not None}
        options = _Places({name: f"{section}.{name}" for section, name in self._places(model, ddp, optimizer)})
        return Arguments(values, given, options, self._config(model), written)

    def _set_by_precision(self, name: str, section: Fields, precision: Fields) -> None:
        """What a precision sets stands, whatever the section states (`MixedPrecisionConfig.setup`); which is said."""
        stated = self.stated if name == "model" else self.keys.part(name).mapping
        usual = _usual() if name == "model" else _tables()["defaults"][_SECTIONS[name]]
        for field in sorted(precision.keys() & section.keys()):
            value, own = precision[field], section[field]
            if field in stated and own not in (value, usual.get(field)) and not decides_no_memory(field):
                self.assumed.append(
                    f"{name}.{field} {shown(own)}: {'null' if value is None else shown(value)}, as mixed_precision "
                    "sets it in its place; state it there, or give mixed_precision: null"
                )
            section[field] = value

    def _places(self, model: Fields, ddp: Fields, optimizer: Fields) -> list[tuple[str, str]]:
        sections = {"optimizer": optimizer, "ddp": ddp, "model": model}
        return [(section, name) for section, found in sections.items() for name in found]

    def _model(self) -> Fields:
        """The provider's fields: stated, else of the `config.json`, else of the family, else of its class."""
        defaults = _tables()["defaults"]
        known = {**self.bridge, **self.from_config, **self.stated}
        provider = _provider(self.target, known, self.source)
        self._named_provider(provider)
        base = {**defaults[_PROVIDER], **({} if provider == _PROVIDER else defaults[provider])}
        found = {**base, **known}
        found.pop("_target_", None)
        self._typed("model", found, base)
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if not found.get(name) and not (name == "num_layers" and provider == _HYBRID):
                raise InputError(f"{self.source}: model.{name} is missing{self._where_from()}")
        found["multi_latent_attention"] = bool(found["multi_latent_attention"]) or provider == _LATENT
        return found

    def _named_provider(self, provider: str) -> None:
        """Say where a class of another name, of an older Bridge or the user's own, may have other defaults."""
        name = self.target.rpartition(".")[2]
        if name and name not in _PROVIDERS and not self.from_config:
            self.assumed.append(
                f"model: {name[:80]} has defaults of its own; what the file leaves out is taken as {provider}'s"
            )

    def _where_from(self) -> str:
        """What would complete the model."""
        named = self.model_id or self.target.rpartition(".")[2]
        whose = f"that of {named}" if named else "the model's"
        return f"; give its config.json by --config ({whose}), or write the model's fields into the file"

    def _section(self, name: str, common: Fields) -> Fields:
        """A section's fields: stated, else of its class where it is a whole one, else of the common recipe."""
        base = _tables()["defaults"][_SECTIONS[name]]
        stated = fields_of(self.keys.part(name))
        whole = stated.pop("_target_", None) is not None
        if not whole and name not in self.keys.mapping:
            self.assumed.append(f"{name}: not given; as in Megatron Bridge's common recipe of pretraining")
        found = {**base, **({} if whole else common), **stated}
        self._typed(name, found, base)
        return found

    def _typed(self, section: str, found: Fields, base: Mapping[str, Any]) -> None:
        """Refuse values of another type than their default's, where they decide something."""
        for name, value in found.items():
            default = None if name in _silent() or decides_no_memory(name) else base.get(name)
            if isinstance(default, bool):
                expected, right = "true or false", isinstance(value, bool)
            elif isinstance(default, int | float):
                several = name in _SEVERAL and isinstance(value, list)
                number = isinstance(value, int | float) and not isinstance(value, bool)
                expected, right = "a number", number or several or value is None
            else:
                continue
            if not right:
                raise InputError(f"{self.source}: {section}.{name[:80]}: should be {expected} (got {shown(value)})")

    def _precision(self) -> Fields:
        """What `MixedPrecisionConfig` sets in model, gradients and optimizer; nothing where there is none."""
        tables = _tables()
        stated = self.keys.plain("mixed_precision")
        if stated is None and "mixed_precision" in self.keys.mapping:
            return {}
        if stated is None:
            stated = tables["common"]["mixed_precision"]
            self.assumed.append(f"mixed_precision: not given; {stated}, as in Megatron Bridge's common recipe")
        base = tables["defaults"]["MixedPrecisionConfig"]
        if isinstance(stated, str):
            name = stated.replace("-", "_")
            recipes = tables["mixed_precision"]
            if name not in recipes:
                raise InputError(
                    f"{self.source}: mixed_precision: {shown(stated)} is not known{nearest(name[:80], recipes)}"
                )
            return {**base, **recipes[name]}
        if not isinstance(stated, dict):
            raise InputError(f"{self.source}: mixed_precision: should be a name or a mapping (got {shown(stated)})")
        found = fields_of(self.keys.part("mixed_precision"))
        if found.pop("_target_", None) is None:
            base = {**base, **tables["mixed_precision"][tables["common"]["mixed_precision"]]}
        found = {**base, **found}
        self._typed("mixed_precision", found, base)
        return found

    def _world(self, model: Fields, stated: int | None) -> int:
        """Ranks: what is asked for, or the fewest for the layout."""
        keys = Keys(model, self.source, "model.")
        tensor, pipeline, context, expert = (
            keys.integer(f"{name}_parallel_size", 1, most=2**20)
            for name in ("tensor_model", "pipeline_model", "context", "expert_model")
        )
        if model["num_moe_experts"] and model["expert_tensor_parallel_size"] is None and expert > 1:
            model["expert_tensor_parallel_size"] = 1  # `_set_moe_expert_tensor_parallel_default`
        expert_tensor = keys.integer("expert_tensor_parallel_size", tensor, most=2**20)
        dense, experts = tensor * pipeline * context, expert_tensor * expert * pipeline
        return stated or (lcm(dense, experts) if model["num_moe_experts"] else dense)

    def _overlap(self, model: Fields, ddp: Fields, world: int) -> None:
        """`CommOverlapConfig.setup`."""
        keys = self.keys.part("comm_overlap")
        if "comm_overlap" not in self.keys:
            return
        ranks = model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"]
        replicas = world // (ranks * model["context_parallel_size"])
        if ddp["use_distributed_optimizer"]:
            for name in ("overlap_grad_reduce", "overlap_param_gather"):
                ddp[name] = keys.flag(name, replicas > 1)
        for name in ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
            model[name] = keys.flag(name, False)
        if model["tensor_model_parallel_size"] == 1 or not model["sequence_parallel"]:
            model["tp_comm_overlap"] = False  # which it disables there, with a warning
        if "bucket_size" in keys:
            ddp["bucket_size"] = keys.integer("bucket_size")
        model["defer_embedding_wgrad_compute"] = keys.flag("defer_embedding_wgrad_compute", False)
        known = {"_target_", *_tables()["defaults"]["CommOverlapConfig"]}
        self.lost += keys.unknown(known | _silent())

    def _given(self, model: Fields, ddp: Fields, optimizer: Fields) -> Fields:
        """What differs from what labkit takes where nothing is stated, and nobody has judged yet."""
        defaults, taken = _tables()["defaults"], _usual()
        found: Fields = {}
        sections = {
            "optimizer": (optimizer, defaults[_SECTIONS["optimizer"]]),
            "ddp": (ddp, defaults[_SECTIONS["ddp"]]),
        }
        for section, (stated, known) in {**sections, "model": (model, taken)}.items():
            for name, value in stated.items():
                if name in _HERE or name in _silent() or name == "_target_":
                    continue
                if name in _BF16_ENDS and not model.get("first_last_layers_bf16"):
                    continue  # how many layers, where there are none
                if name not in known and name not in EXPRESSED and not decides_no_memory(name) and value is not None:
                    self.lost.append(f"{section}.{name[:80]} {shown(value)}: labkit does not know what it decides")
                elif name in known and value != known[name]:
                    found[name] = value
        return found

    def _named(self) -> None:
        """Sections and fields whose effect no field of a workload has."""
        known = set(_tables()["sections"]["silent"].split()) | _READ | set(_SECTIONS) | {"_target_", "mixed_precision"}
        for name in self.keys.left(known):
            if name not in _MODEL_IDS and name != "data_parallel_size":
                self.lost.append(f"{self.keys.named(name)}: labkit does not know what it decides")
        peft = self.keys.plain("peft")
        if peft is not None:
            self.lost.append("peft: adapters on a frozen base; taken as training of all parameters")
        dist = self.keys.part("dist")
        for name in ("use_megatron_fsdp", "use_torch_fsdp2", "disable_jit_fuser"):
            if dist.flag(name, False):
                self.lost.append(f"dist.{name} true: taken as Megatron's own data parallelism, with fused kernels")
        for section, name in (("logger", "log_num_zeros_in_grad"), ("train", "rampup_batch_size")):
            value = self.keys.part(section).plain(name)
            if value not in (None, False):
                self.lost.append(f"{section}.{name} {shown(value)}: not priced")

    def _values(self, model: Fields, ddp: Fields, optimizer: Fields) -> Fields:
        """Megatron-LM's arguments, as far as `labkit.importers.fields` reads them."""
        keys = Keys(model, self.source, "model.")
        train = self.keys.part("train")
        common = _tables()["common"]["train"]
        length = self._length(model)
        dtypes = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return {
            "decoder_num_layers": None,
            "hybrid_layer_pattern": pattern(keys),
            "untie_embeddings_and_output_weights": not keys.flag("share_embeddings_and_output_weights", True),
            "seq_length": length,
            "micro_batch_size": train.integer("micro_batch_size", common["micro_batch_size"]),
            "global_batch_size": train.integer("global_batch_size", common["global_batch_size"]),
            "create_attention_mask_in_dataloader": self._has_mask(),
            "sft": self._packs(),
            "dataloader_inter_document_masking": False,
            **self._vocabulary(keys),
            "position_embedding_type": keys.text("position_embedding_type"),
            "max_position_embeddings": length,
            "yarn_original_max_position_embeddings": keys.optional_integer("yarn_original_max_position_embeddings")
            or keys.optional_integer("original_max_position_embeddings"),
            "rotary_base": max(1, round(keys.number("rotary_base", 10000.0))),
            "rotary_percent": keys.number("rotary_percent", 1.0, most=1.0),
            "pipeline_model_parallel_layout": layout(keys),
            "transformer_impl": keys.text("transformer_impl", "transformer_engine"),
            "use_distributed_optimizer": ddp["use_distributed_optimizer"],
            "overlap_grad_reduce": ddp["overlap_grad_reduce"],
            "overlap_param_gather": ddp["overlap_param_gather"],
            "accumulate_allreduce_grads_in_fp32": ddp["grad_reduce_in_fp32"],
            "ddp_average_in_collective": ddp["average_in_collective"],
            "num_distributed_optimizer_instances": ddp["num_distributed_optimizer_instances"],
            "optimizer": optimizer["optimizer"],
            "use_precision_aware_optimizer": optimizer["use_precision_aware_optimizer"],
            **{name: DTYPES.get(str(optimizer[name]), optimizer[name]) for name in dtypes},
            "fp8_recipe": optimizer["fp8_recipe"] or "delayed",
            "sgd_momentum": optimizer["sgd_momentum"],
            "clip_grad": optimizer["clip_grad"],
            "fp16": model["fp16"],
            "bf16": model["bf16"],
            "spec": None,
            "use_megatron_fsdp": False,
        }

    def _length(self, model: Fields) -> int:
        """Tokens of a sequence: model and data set say the same, or one of them alone does."""
        dataset = self.keys.part("dataset")
        stated = dataset.optional_integer("seq_length") or dataset.optional_integer("sequence_length")
        if "seq_length" in self.stated:
            return Keys(model, self.source, "model.").integer("seq_length")
        return stated or int(_tables()["common"]["dataset"]["seq_length"])

    def _has_mask(self) -> bool:
        return not self.keys.part("dataset").flag("skip_getting_attention_mask_from_dataset", True)

    def _packs(self) -> bool:
        dataset = self.keys.part("dataset")
        packing = ("enable_offline_packing", "enable_in_batch_packing")
        older = dataset.plain("packed_sequence_specs") or dataset.plain("offline_packing_specs")
        return older is not None or any(dataset.flag(name, False) for name in packing)

    def _vocabulary(self, model: Keys) -> Fields:
        """`_validate_and_set_vocab_size`: the tokenizer's, padded, or the model's as it is."""
        tokenizer = self.keys.part("tokenizer")
        divisor = model.integer("make_vocab_size_divisible_by", 128)
        stated, of_tokenizer = model.optional_integer("vocab_size"), tokenizer.optional_integer("vocab_size")
        null = tokenizer.text("tokenizer_type", "") == "NullTokenizer"
        asked = tokenizer.flag("use_tokenizer_vocab_size", False)
        if (asked or stated is None) and null and of_tokenizer is not None:
            if stated not in (None, of_tokenizer):
                self.assumed.append(
                    f"vocabulary: {of_tokenizer}, the tokenizer's (use_tokenizer_vocab_size), not the model's {stated}"
                )
            stated, padded = of_tokenizer, True
        elif stated is None:
            place = "model.vocab_size is missing: it is the tokenizer's, which is not known here"
            raise InputError(
                f"{self.source}: {place}; write it into the file, or give the model's config.json by --config"
            )
        else:
            padded = asked or model.flag("should_pad_vocab", False)
        return {
            "padded_vocab_size": None,
            "vocab_size": stated,
            "tokenizer_type": None,
            "make_vocab_size_divisible_by": divisor,
            "pad_vocab_size": padded,
        }

    def _config(self, model: Fields) -> Fields:
        """`TransformerConfig` after its `__post_init__`, as far as fields read it."""
        keys = Keys(model, self.source, "model.")
        layers = pattern(keys)
        found = {**model, "attention_backend": backend(keys), "cp_comm_type": exchange(keys)}
        found["num_layers"] = len(layers.partition("/")[0].replace("|", "")) if layers else model["num_layers"]
        found["activation_func"] = self._activation(keys)
        hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        found["ffn_hidden_size"] = keys.integer("ffn_hidden_size", 4 * hidden)
        found["num_query_groups"] = keys.integer("num_query_groups", heads)
        found["kv_channels"] = keys.optional_integer("kv_channels") or max(1, hidden // heads)
        if model["num_moe_experts"]:
            found["moe_ffn_hidden_size"] = keys.integer("moe_ffn_hidden_size", found["ffn_hidden_size"])
            found["moe_aux_loss_coeff"] = coefficient(keys)
        group = keys.integer("pipeline_model_parallel_size", 1)
        found["microbatch_group_size_per_vp_stage"] = keys.integer("microbatch_group_size_per_vp_stage", group)
        self._stays(keys)
        return found

    def _activation(self, model: Keys) -> str:
        name = model.text("activation_func", "gelu").rpartition(".")[2]
        if name == "quick_gelu" and model.flag("gated_linear_unit", False):
            self.lost.append(
                "model.activation_func quick_gelu: gated; taken as silu, which keeps the same where it is fused"
            )
            return "silu"
        return {"swish": "silu", "gelu_tanh": "gelu"}.get(name, name)

    def _stays(self, model: Keys) -> None:
        """Fields of the model whose other value costs memory that nothing here prices."""
        if model.integer("pipeline_model_parallel_size", 1) > 1 and not model.flag("deallocate_pipeline_outputs", True):
            self.lost.append("model.deallocate_pipeline_outputs false: outputs of stages stay; taken as freed")
        chunk = model.integer("mamba_chunk_size", _MAMBA_CHUNK)
        if chunk != _MAMBA_CHUNK:
            self.lost.append(f"model.mamba_chunk_size {chunk}: states of chunks; taken as {_MAMBA_CHUNK}")
        for name in ("transformer_layer_spec", "hybrid_stack_spec"):
            spec = model.plain(name)
            if isinstance(spec, str) and "." in spec and not spec.startswith("megatron."):
                self.lost.append(f"model.{name} {shown(spec)}: layers of your own; taken as Megatron's")


class _Places(dict[str, str]):
    """Where a recipe says a field; one that it does not have, by its name."""

    def __missing__(self, name: str) -> str:
        return {"quick_geglu": "model.activation_func", "sft": "dataset packing"}.get(name, name)


def _common(section: str) -> Fields:
    return dict(_tables()["common"].get(section, {}))


def _provider(target: str, known: Mapping[str, Any], source: str) -> str:
    """Which of the providers a model is of: by name, else by its fields."""
    name = target.rpartition(".")[2]
    if name.startswith("T5"):
        raise InputError(f"{source}: model: {name[:80]} is an encoder and a decoder; labkit has decoders")
    if known.get("hybrid_layer_pattern") or known.get("hybrid_override_pattern"):
        return _HYBRID
    if "Hybrid" in name or "Mamba" in name or "NemotronH" in name:
        return _HYBRID
    latent = ("MLA", "DeepSeek", "Deepseek", "Kimi", "Moonlight")
    if known.get("multi_latent_attention") or any(part in name for part in latent):
        return _LATENT
    return _PROVIDER
