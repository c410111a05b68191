"""Rules of mixture-of-experts layers: what Megatron refuses is refused in one sentence, what it runs is not."""

import pytest

from labkit.errors import InputError
from tests.small import small

MOE = "model__mixture_of_experts__"
KERNELS = "training__kernels__"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{MOE}moe_pad_expert_input_to_capacity": True}, "nothing to pad to"),
        ({f"{KERNELS}moe_shared_expert_overlap": True, f"{KERNELS}moe_token_dispatcher_type": "allgather"}, "alone"),
        ({f"{KERNELS}moe_shared_expert_overlap": True, f"{MOE}moe_latent_size": 64}, "latent width"),
        (
            {
                f"{MOE}moe_expert_capacity_factor": 4.5,
                f"{MOE}moe_pad_expert_input_to_capacity": True,
                f"{KERNELS}moe_permute_fusion": False,
            },
            "more than all tokens",
        ),
        ({"model__activation_func": "gelu"}, "kernel for gated silu alone"),
        ({f"{MOE}moe_expert_capacity_factor": -1.0}, "greater than 0"),
        ({"parallelism__expert_tensor_parallel_size": 3}, "does not divide moe_ffn_hidden_size"),
    ],
)
def test_what_megatron_does_not_run_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        small(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MOE}moe_expert_capacity_factor": 4.5, f"{MOE}moe_pad_expert_input_to_capacity": True},
        {f"{MOE}moe_expert_capacity_factor": 0.5, f"{KERNELS}moe_token_dispatcher_type": "flex"},
        {f"{KERNELS}moe_shared_expert_overlap": True, f"{KERNELS}moe_token_dispatcher_type": "flex"},
        {f"{KERNELS}moe_token_dispatcher_type": "allgather", f"{MOE}moe_latent_size": 64},
        {f"{MOE}moe_router_load_balancing_type": "global_aux_loss", f"{MOE}moe_z_loss_coeff": 0.001},
        {"model__activation_func": "gelu", f"{KERNELS}bias_activation_fusion": False},
        {f"{MOE}moe_shared_expert_gate": True, f"{KERNELS}moe_shared_expert_overlap": True},
        {"parallelism__expert_tensor_parallel_size": 2, "parallelism__expert_model_parallel_size": 2},
    ],
)
def test_what_megatron_runs_is_not_refused(changes: dict[str, object]) -> None:
    small(**changes)
