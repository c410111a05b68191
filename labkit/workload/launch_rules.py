"""Rules of what a launch says (see `labkit.workload.rules`): which options, and which values.

Source: `megatron.training.arguments`. What Megatron refuses of them is in the modules of rules beside this one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.launched import Launched, launched, unread
from labkit.workload.model import MixtureOfExperts, Model, MultiLatentAttention
from labkit.workload.parallelism import Parallelism
from labkit.workload.training import Kernels, Optimizer

if TYPE_CHECKING:
    from labkit.workload.base import Part
    from labkit.workload.workload import Workload

_AT = "launch.arguments"
_ARGUMENTS, _LABKIT = Authority.ARGUMENTS, Authority.LABKIT

SAID_BY_FIELDS = frozenset(
    f"--{name}"
    for name in """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split accumulate-allreduce-grads-in-fp32
    add-qkv-bias apply-query-key-layer-scaling attention-dropout attention-output-gate attention-softmax-in-fp32
    bf16 context-parallel-size cross-entropy-fusion-impl cross-entropy-loss-fusion ddp-average-in-collective
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers deterministic-mode disable-bias-linear
    exp-avg-dtype exp-avg-sq-dtype expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size
    global-batch-size grad-reduce-in-bf16 group-query-attention hidden-dropout hidden-size hybrid-layer-pattern
    kv-channels kv-lora-rank linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
    linear-num-value-heads linear-value-head-dim main-grads-dtype main-params-dtype make-vocab-size-divisible-by
    mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim micro-batch-size
    microbatch-group-size-per-virtual-pipeline-stage moe-aux-loss-coeff moe-expert-capacity-factor
    moe-ffn-hidden-size moe-grouped-gemm moe-latent-size moe-layer-freq moe-pad-expert-input-to-capacity
    moe-permute-fusion moe-router-enable-expert-bias moe-router-fusion moe-router-group-topk moe-router-num-groups
    moe-router-pre-softmax moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
    moe-shared-expert-gate moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type
    moe-token-drop-policy moe-z-loss-coeff mtp-num-layers multi-latent-attention no-bias-dropout-fusion
    no-bias-gelu-fusion no-bias-swiglu-fusion no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-masked-softmax-fusion no-persist-layer-norm no-rope-fusion normalization
    num-attention-heads num-distributed-optimizer-instances num-experts num-layers num-query-groups
    num-virtual-stages-per-pipeline-rank
    overlap-grad-reduce overlap-param-gather pipeline-model-parallel-layout pipeline-model-parallel-size q-lora-rank
    qk-head-dim qk-layernorm qk-pos-emb-head-dim recompute-granularity recompute-method recompute-modules
    recompute-num-layers rotary-base rotary-percent seq-length sequence-parallel sft squared-relu swiglu
    tensor-model-parallel-size transformer-impl untie-embeddings-and-output-weights use-distributed-optimizer
    use-fused-weighted-squared-relu use-precision-aware-optimizer v-head-dim vocab-size
    yarn-original-max-position-embeddings
    """.split()
)
"""Options whose values fields of a workload have (`drivers.arguments.arguments_of`)."""
OTHER_NAMES = {
    "--recompute-activations": "recompute",
    "--moe-layer-recompute": "recompute",
    "--padded-vocab-size": "model.vocab_size",
    "--hybrid-override-pattern": "model.hybrid_layer_pattern",
    "--mtp-hybrid-override-pattern": "model.hybrid_layer_pattern",
    "--num-layers-per-virtual-pipeline-stage": "parallelism.virtual_pipeline_model_parallel_size",
    "--use-rotary-position-embeddings": "model.position_embedding_type",
    "--no-position-embedding": "model.position_embedding_type",
    "--encoder-num-layers": "model.num_layers",
    "--encoder-seq-length": "batch.seq_length",
    "--use-flash-attn": "training.kernels.attention_backend",
}
"""Options of another name than the field that says the same."""
NO_PART_OF_A_STEP = frozenset(
    f"--{name}"
    for name in """
    help yaml-cfg config-logger-dir save tensorboard-dir wandb-project use-cpu-initialization
    result-rejected-tracker-filename nccl-communicator-config-path te-precision-config-file
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
    """.split()
)
"""Options that read or write files, end the program, leave the GPU, or make layers that differ by a file."""
MORE_VALUES_THAN_FIELDS: dict[str, "type[Part]"] = {
    "--attention-backend": Kernels,
    "--cp-comm-type": Parallelism,
    "--moe-router-dtype": MixtureOfExperts,
    "--moe-router-load-balancing-type": MixtureOfExperts,
    "--optimizer": Optimizer,
    "--position-embedding-type": Model,
    "--rope-type": MultiLatentAttention,
}
"""Options with a field of their name that has some of their values: with another, the launch holds."""


def launch_findings(workload: "Workload") -> Iterator[Finding]:
    """Options that no launch should have, and values that are none."""
    if workload.launch is None:
        return
    for option, values in workload.launch.options:
        yield from refuse(
            option in NO_PART_OF_A_STEP, _AT, f"{option} is no part of a training step", "leave it out", _LABKIT
        )
        yield from refuse(
            option in OTHER_NAMES, _AT, f"{option} is what {OTHER_NAMES.get(option)} says", "change it there", _LABKIT
        )
        stated = option in SAID_BY_FIELDS or _contradicts(workload, option, values)
        yield from refuse(stated, _AT, f"{option} is what a field of the workload says", "change it there", _LABKIT)
    for option, reason in unread(workload.launch):
        said = f"the value of {option}: {reason}"
        yield Finding("error", _AT, said, "change it or leave it out", _ARGUMENTS)
    yield from _attention_variant(launched(workload.launch))


def _contradicts(workload: "Workload", option: str, values: tuple[str, ...]) -> bool:
    """Whether a field could say what the launch says, and says otherwise."""
    if option not in MORE_VALUES_THAN_FIELDS or len(values) != 1:
        return False
    part, name = MORE_VALUES_THAN_FIELDS[option], option.removeprefix("--").replace("-", "_")
    accepted: Any = part.model_fields[name].annotation
    try:
        TypeAdapter(accepted).validate_python(values[0])
    except ValidationError:
        return False
    sections = (workload.training.kernels, workload.parallelism, workload.training.optimizer, workload.model)
    inner = (workload.model.mixture_of_experts, workload.model.multi_latent_attention)
    stated = next((section for section in (*sections, *inner) if isinstance(section, part)), None)
    return stated is None or getattr(stated, name) != values[0]


def _attention_variant(options: Launched) -> Iterator[Finding]:
    variant = options.experimental_attention_variant
    yield from refuse(
        variant == "gated_delta_net",
        _AT,
        "--experimental-attention-variant gated_delta_net is what model.gated_delta_net says",
        "give its sizes there",
        _LABKIT,
    )
    yield from refuse(
        variant == "dsa",
        _AT,
        "--experimental-attention-variant dsa (sparse attention) is not supported by this version of labkit",
        "leave it out",
        _LABKIT,
    )
