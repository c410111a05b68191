from typing import get_args

from labkit.workload.gpu import GPUS, MIB
from labkit.workload.training import Software, Training


def test_a_workload_may_name_every_gpu() -> None:
    assert get_args(Training.model_fields["gpu"].annotation) == tuple(GPUS)


def test_workspaces_follow_the_compute_capability_and_the_environment() -> None:
    assert Training().workspaces == (32 * MIB + 1024, 32 * MIB)
    assert Training(gpu="gb200-186gb").workspaces == Training().workspaces
    for torch, on_blackwell in (("2.11.0", 8 * MIB + 128 * 1024), ("2.12.0", 32 * MIB), ("2.13.0", 32 * MIB)):
        software = Software(torch=torch)
        assert Training(software=software).workspaces.cublas == 32 * MIB
        assert Training(gpu="gb200-186gb", software=software).workspaces.cublas == on_blackwell
    assert Training(gpu="a100-40gb").workspaces == (4 * MIB, 8 * MIB + 128 * 1024)
    assert Training(gpu="a100-40gb", cublas_workspace_config=":4096:8").workspaces.cublas == 32 * MIB
    assert Training(cublas_workspace_config=":4096:2:16:8").workspaces.cublas == 8 * MIB + 128 * 1024
