"""Rules of packed sequences under Megatron's own runtime; the grid's family `packed` has what they allow."""

from typing import Any

import pytest

from labkit.errors import InputError
from labkit.workload.attention_backends import attention_backend
from tests.memory.grid import changed, packed

CONTEXT = {"parallelism.context_parallel_size": 2, "batch.seq_length": 16384}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch.micro_batch_size": 2}, "batch.micro_batch_size: packed sequences lie in one row"),
        ({"batch.packed.shared_prefix": 64}, "batch.packed.shared_prefix: Megatron computes every sequence whole"),
        ({"batch.packed.busiest_rank_rows": 8192}, "batch.packed.busiest_rank_rows: every context-parallel rank gets"),
        ({"batch.packed.lengths": [8000, 193]}, "batch.seq_length: the packed sequences have 8193 tokens; set it to"),
        ({"batch.create_attention_mask_in_dataloader": True}, "packed sequences come without a mask; leave it out"),
        (CONTEXT | {"batch.packed.lengths": [1002, 64]}, "batch.packed.lengths: each of 2 .* of 1002 tokens too; pad"),
        ({"training.kernels.attention_backend": "unfused"}, "unfused attention of packed sequences is not supported"),
        ({"training.precision": "fp32", "training.kernels.attention_backend": "auto"}, "use fused or flash, in bf16"),
        (CONTEXT | {"parallelism.cp_comm_type": "all_gather"}, "parallelism.cp_comm_type: gathered keys of packed"),
        (packed.SPREAD | {"batch.packed.lengths": [4] * 2048}, "batch.packed.lengths: 2048 sequences, turned one by"),
        ({"launch.arguments": ["--cuda-graph-impl local"]}, "--cuda-graph-impl captures no layers with packed"),
    ],
)
def test_refusals_name_the_field_and_a_remedy(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        changed(packed.BASE, changes, "packed")


def test_what_pads_the_row_belongs_to_the_last_sequence() -> None:
    case = changed(packed.BASE, {"batch.packed.lengths": [100, 50], "batch.seq_length": 160}, "packed")
    assert case.packed_lengths == (100, 60)


def test_many_scores_keep_a_deterministic_backward_from_the_fused_kernel_on_hopper() -> None:
    deterministic = {"training.kernels.attention_backend": "auto", "training.kernels.deterministic_attention": True}
    many = deterministic | {"batch.packed.lengths": [16384, 16384], "batch.seq_length": 32768}
    assert attention_backend(changed(packed.BASE, deterministic, "few")) == "fused"
    assert attention_backend(changed(packed.BASE, many, "many")) == "flash"
    assert attention_backend(changed(packed.BASE, many | {"training.gpu": "b200-180gb"}, "Blackwell")) == "fused"
