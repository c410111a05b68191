"""Megatron-FSDP: what stays between steps, when its optimizer state appears, and the stated version's habits."""

from collections.abc import Callable
from functools import cache

import pytest

from labkit import Workload
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.ledger import Row
from labkit.workload import Launch
from tests.small import small

VOCABULARY, HIDDEN = 1024, 256
SHARDED = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
NORMED = (*SHARDED, "--log-params-norm")
ROOTS = VOCABULARY * HIDDEN + HIDDEN
"""Elements outside of transformer layers: the embedding, which the head shares, and the weight of the last norm."""


def sharded(version: str, *arguments: str) -> Workload:
    """A dense model of two layers over two data-parallel ranks."""
    workload = small(
        model={
            "name": "dense",
            "num_layers": 2,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 512,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "untie_embeddings_and_output_weights": False,
        },
        parallelism={"world_size": 2},
        batch={"seq_length": 256, "global_batch_size": 4},
        training={
            "data_parallel": {
                "use_distributed_optimizer": True,
                "average_in_collective": False,
                "grad_reduce_in_fp32": True,
            },
            "kernels": {"gradient_accumulation_fusion": False},
        },
    )
    software = workload.training.software.model_copy(update={"megatron_core": version})
    training = workload.training.model_copy(update={"software": software})
    return workload.model_copy(update={"training": training, "launch": Launch(arguments=arguments)})


type Run = Callable[..., Trace]


@pytest.fixture(scope="module")
def run(server: TraceServer) -> Run:
    """Each workload traced once."""

    @cache
    def traced(version: str, *arguments: str) -> Trace:
        return server.run(sharded(version, *arguments))

    return traced


def between(trace: Trace, kinds: tuple[str, ...] = ()) -> int:
    """Tensor bytes alive between steps."""
    return sum(row.bytes for row in trace.ledger.between_steps().rows if not kinds or row.kind in kinds)


def parameters(trace: Trace) -> int:
    """Elements of the model."""
    count = trace.measurement.ranks[0].parameters
    assert count is not None
    return count


def moments(trace: Trace) -> list[Row]:
    """Adam's two moments, each a tensor per shard of a parameter."""
    return [row for row in trace.ledger.rows if row.tensor == "_initialize_state"]


def test_the_norm_of_parameters_frees_what_was_gathered_but_the_roots(run: Run) -> None:
    plain, normed = (run("0.19.2", *arguments) for arguments in (SHARDED, NORMED))
    layers = parameters(plain) - ROOTS
    assert between(plain) - between(normed) == pytest.approx(2 * layers, rel=0.001)  # padded to the ranks


def test_versions_keep_what_their_code_keeps(run: Run) -> None:
    old, next_, newest = (run(version, *NORMED) for version in ("0.18.0rc0", "0.18.0", "0.19.2"))
    assert between(next_) - between(old) == pytest.approx(2 * ROOTS, rel=0.001)
    # The shard of the gradients: fp32 because they are reduced in fp32, or in the parameters' bf16.
    assert between(next_) - between(newest) == pytest.approx((4 - 2) * parameters(old) / 2, rel=0.001)


def test_megatron_017_gathers_layers_ahead_in_every_forward(run: Run) -> None:
    def ahead(version: str) -> int:
        rows = run(version, *NORMED).ledger.rows
        return sum("final_layernorm" in row.module and row.tensor == "_alloc_storage" for row in rows)

    layers = 2
    assert ahead("0.18.0rc0") == layers  # in the first forward of all
    assert ahead("0.17.1") == 4 * layers  # two micro-batches in each of two steps


def test_looking_for_a_checkpoint_makes_the_optimizer_state(run: Run) -> None:
    late, early, left = (
        run("0.19.2", *SHARDED, *more) for more in ((), ("--load nowhere",), ("--load nowhere", "--no-load-optim"))
    )
    shard = parameters(late) / 2
    assert {row.phase for row in moments(late)} == {row.phase for row in moments(left)} == {"optimizer"}
    assert {row.phase for row in moments(early)} == {"setup"}
    assert sum(row.bytes for row in moments(early)) == pytest.approx(8 * shard, rel=0.02)  # small ones fill 512 bytes
    first = [trace.measurement.ranks[0].phases[1] for trace in (late, early)]
    assert {(each.iteration, each.phase) for each in first} == {(1, "forward")}
    peaks = [each.peak_allocated_bytes for each in first]
    assert peaks[1] - peaks[0] == pytest.approx(8 * shard, rel=0.05)
    assert between(late) == between(early)


def test_older_versions_are_known_for_megatron_fsdp_alone() -> None:
    mapping = sharded("0.17.1", *SHARDED).model_dump(mode="json")
    assert Workload.from_mapping(mapping).training.software.megatron_core == "0.17.1"
    with pytest.raises(InputError, match=r"'0.17.1' keeps in memory is not known here"):
        Workload.from_mapping(mapping | {"launch": None})
