"""What kernels decide by lengths."""

from labkit.workload.kernels import flash_splits, softmax_kernel_takes

H100 = 132


def test_flash_attention_splits_keys_where_queries_would_leave_the_gpu_idle() -> None:
    # 2 x 4 x 512/64 = 64 blocks of queries for 264 places: four of keys fill them.
    assert flash_splits(2, 4, (512, 512), 96, H100) == 4
    # Three splits of four key blocks are no better than two; 264 blocks of queries are enough.
    assert flash_splits(1, 32, (512, 512), 128, H100) == 1
    assert flash_splits(1, 4, (4096, 4096), 128, H100) == 1
    assert flash_splits(1, 1, (64, 64), 128, H100) == 1


def test_transformer_engines_softmax_takes_multiples_of_eight_and_four_heads() -> None:
    assert softmax_kernel_takes(2, 2, 512)
    assert not softmax_kernel_takes(2, 2, 500)
    assert not softmax_kernel_takes(1, 2, 512)
    assert not softmax_kernel_takes(2, 2, 16384)
