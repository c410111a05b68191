from labkit.allocator import EMPTY_CACHE, simulate

MIB = 2**20


def test_a_block_is_reused_on_its_own_stream_only() -> None:
    events = [(1, 4 * MIB), (-1, 0), (2, 4 * MIB)]
    same = simulate(events, [0, 0])
    apart = simulate(events, [0, 1])
    assert [reserved for _, reserved in same.reserved] == [20 * MIB]
    assert apart.reserved == [(0, 20 * MIB), (2, 40 * MIB)]
    assert same.block_bytes == apart.block_bytes == {1: 4 * MIB, 2: 4 * MIB}


def test_growth_of_the_streams_adds_up_in_the_order_of_events() -> None:
    events = [(1, MIB), (2, 30 * MIB), (3, 30 * MIB), (4, 50 * MIB)]
    simulated = simulate(events, [0, 1, 0, 1])
    assert simulated.reserved == [(0, 2 * MIB), (1, 32 * MIB), (2, 62 * MIB), (3, 112 * MIB)]


def test_emptying_the_cache_leaves_the_pools_of_graphs() -> None:
    events = [(1, 30 * MIB), (-1, 0), (2, 40 * MIB), (-2, 0), EMPTY_CACHE, (3, 60 * MIB)]
    assert simulate(events, [0, 0, 0]).reserved == [(0, 30 * MIB), (2, 70 * MIB)]
    # The second block is of a graph's pool: 40 MiB stay reserved where 30 go back to the device.
    assert simulate(events, [0, -1, 0]).reserved == [(0, 30 * MIB), (2, 70 * MIB), (5, 100 * MIB)]


def test_a_graphs_pool_is_used_again_by_its_own_graphs_alone() -> None:
    events = [(1, 30 * MIB), (-1, 0), (2, 30 * MIB), (-2, 0), (3, 30 * MIB)]
    assert simulate(events, [-1, 0, -1]).reserved == [(0, 30 * MIB), (2, 60 * MIB)]
