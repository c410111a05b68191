from labkit.allocator import simulate

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
