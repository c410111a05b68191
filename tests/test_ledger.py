"""A peak is a query over the ledger: checked against counting every moment."""

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.ledger import Ledger, Moment, Row, rounded

CLOCKS = 30
MOMENTS = (Moment(0, 0, "setup"), Moment(10, 1, "forward"), Moment(20, 1, "backward"))


def row(born: int, dies: int | None, nbytes: int) -> Row:
    return Row(
        0, "setup", None, "parameters", "m", "t", (nbytes,), "uint8", 1, nbytes, 2 * nbytes, "state", "exact", None,
        born, dies,
    )  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found = []
    for _ in range(draw(st.integers(0, 12))):
        born = draw(st.integers(0, CLOCKS - 1))
        dies = draw(st.none() | st.integers(born + 1, CLOCKS))
        found.append(row(born, dies, draw(st.integers(0, 1000))))
    return found


def alive(found: list[Row], clock: int) -> int:
    return sum(each.bytes for each in found if each.born <= clock and (each.dies is None or each.dies > clock))


@settings(deadline=None)
@given(rows())
def test_phase_peaks_are_the_largest_live_sums(found: list[Row]) -> None:
    ledger = Ledger(found, MOMENTS)
    starts = [moment.clock for moment in MOMENTS] + [CLOCKS + 1]
    for peak, start, end in zip(ledger.phase_peaks(blocks=False), starts, starts[1:], strict=False):
        before = alive(found, start - 1) if start else 0
        assert peak.bytes == max([before, *(alive(found, clock) for clock in range(start, end))])
    assert ledger.peak(blocks=True).bytes == 2 * ledger.peak(blocks=False).bytes


@settings(deadline=None)
@given(rows())
def test_a_phase_that_comes_back_has_one_peak(found: list[Row]) -> None:
    alternating = (*MOMENTS, Moment(23, 1, "forward"), Moment(26, 1, "backward"), Moment(28, 1, "grad_sync"))
    once = {
        (peak.clock, peak.bytes)
        for peak in Ledger(found, [m._replace(iteration=m.clock) for m in alternating]).phase_peaks()
    }
    ledger = Ledger(found, alternating)
    peaks = ledger.phase_peaks()
    assert [peak.phase for peak in peaks] == ["setup", "forward", "backward", "grad_sync"]
    assert {(peak.clock, peak.bytes) for peak in peaks} <= once
    assert ledger.peak().bytes == max(nbytes for _, nbytes in once)
    assert (ledger.end(1, "forward"), ledger.end(1, "backward"), ledger.end(1, "grad_sync")) == (26, 28, None)


@settings(deadline=None)
@given(rows())
def test_at_the_peak_the_live_rows_sum_to_it(found: list[Row]) -> None:
    ledger = Ledger(found, MOMENTS)
    peak = ledger.peak(blocks=False)
    if alive(found, peak.clock) == peak.bytes:
        assert ledger.at(peak.clock).total() == peak.bytes
    else:
        # The phase began with more than any of its own moments holds.
        assert peak.clock in {moment.clock for moment in MOMENTS}


@settings(deadline=None)
@given(rows())
def test_frame_round_trips(found: list[Row]) -> None:
    ledger = Ledger(found, MOMENTS)
    assert Ledger.from_frame(ledger.frame, MOMENTS).rows == ledger.rows


def test_bytes_are_rounded_to_the_allocators_unit() -> None:
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
