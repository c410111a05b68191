"""Two ledgers side by side: every byte is in one line, equal rows match, layers that are alike fold."""

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from labkit.comparison import Comparison, Line, compare, lines
from labkit.ledger import Ledger, Row
from tests.study.builder import ledger, row

MODULES = ("", "embedding", "decoder.layers.{}.mlp", "decoder.layers.{}.mlp.linear_fc1", "decoder.layers.{}.attention")


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found = []
    for _ in range(draw(st.integers(0, 14))):
        module, layer = draw(st.sampled_from(MODULES)), draw(st.integers(0, 3))
        found.append(tensor(module.format(layer), 512 * draw(st.integers(0, 4)), layer if "{}" in module else None))
    return found


def tensor(module: str, nbytes: int, layer: int | None, name: str = "t", **fields: Any) -> Row:
    return row(name, nbytes, 0, None, module=module, layer=layer, **fields)


def alone(found: list[Line]) -> list[tuple[str, str]]:
    return sorted((line.match, line.module) for line in found if line.match not in ("equal", "elsewhere"))


@given(rows(), rows())
def test_every_byte_of_both_sides_is_in_one_line(left: list[Row], right: list[Row]) -> None:
    found = lines(left, right)
    assert sum(line.estimate_bytes for line in found) == sum(each.bytes for each in left)
    assert sum(line.trace_bytes for line in found) == sum(each.bytes for each in right)
    paired = sum(line.count for line in found if line.estimate_tensor and line.trace_tensor)
    assert sum(line.count for line in found) + paired == len(left) + len(right)


@given(rows(), st.randoms())
def test_a_ledger_equals_itself_in_any_order(found: list[Row], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert {line.match for line in lines(found, shuffled)} <= {"equal"}


@given(rows(), rows())
def test_sides_change_places(left: list[Row], right: list[Row]) -> None:
    there, back = lines(left, right), lines(right, left)
    assert sorted(line.difference_bytes for line in there) == sorted(-line.difference_bytes for line in back)


@given(rows(), rows())
def test_a_row_is_alone_only_if_the_other_side_has_nothing_like_it(left: list[Row], right: list[Row]) -> None:
    found = lines(left, right)
    ours = {(line.module, line.dtype) for line in found if line.match == "estimate only"}
    theirs = {(line.module, line.dtype) for line in found if line.match == "trace only"}
    outside = {key for key in ours & theirs if "*" not in key[0]}
    assert not outside


def test_layers_that_are_alike_are_one_line() -> None:
    left = [tensor(f"decoder.layers.{layer}.mlp", 1024, layer) for layer in range(27)]
    right = [tensor(f"decoder.layers.{layer}.mlp", 2048 if layer else 1024, layer) for layer in range(27)]
    differing, same = lines(left, right)
    assert (differing.match, differing.module, differing.count) == ("differs", "decoder.layers.*.mlp", 26)
    assert differing.layers == tuple(range(1, 27))
    assert differing.difference_bytes == -26 * 1024
    assert (same.match, same.layers) == ("equal", (0,))


def test_names_and_shapes_do_not_matter_bytes_and_dtype_do() -> None:
    left = [tensor("m", 1024, None, "norm_output", shape=(4, 128))]
    assert [line.match for line in lines(left, [tensor("m", 1024, None, "rmsnorm_fwd", shape=(4, 1, 128))])] == [
        "equal"
    ]
    other = lines(left, [tensor("m", 1024, None, dtype="fp32")])
    assert alone(other) == [("estimate only", "m"), ("trace only", "m")]


def test_the_same_bytes_in_another_module_of_the_layer_are_no_difference() -> None:
    (line,) = lines([tensor("decoder.layers.1.mlp.shared", 512, 1)], [tensor("decoder.layers.1.mlp", 512, 1)])
    assert (line.match, line.module, line.trace_module) == (
        "elsewhere",
        "decoder.layers.*.mlp.shared",
        "decoder.layers.*.mlp",
    )
    assert alone(lines([tensor("decoder.layers.1.mlp", 512, 1)], [tensor("decoder.layers.2.mlp", 512, 2)])) == [
        ("estimate only", "decoder.layers.*.mlp"),
        ("trace only", "decoder.layers.*.mlp"),
    ]


def test_a_group_of_tensors_matches_them_one_by_one() -> None:
    group = [tensor("optimizer", 3 * 512, None, "scales", count=3)]
    (line,) = lines(group, [tensor("optimizer", 512, None, "ones") for _ in range(3)])
    assert (line.match, line.count, line.estimate_bytes, line.trace_bytes) == ("equal", 3, 1536, 1536)


def test_three_moments_and_the_peak_in_the_phase_of_each_side() -> None:
    ours, theirs = ledger(), ledger(saved=10**6)
    assert [section.moment for section in compare(ours, theirs)] == [
        "between steps",
        "retained",
        "peak in backward of iteration 2",
    ]
    retained = compare(ours, theirs)[1]
    assert retained.difference_bytes == 10**6 == sum(line.difference_bytes for line in retained.lines)
    # With so little retained the trace's peak moves to the optimizer.
    moved = compare(ours, ledger(saved=6 * 10**6))
    assert [section.moment for section in moved[2:]] == [
        "peak in optimizer of iteration 1",
        "peak in backward of iteration 2",
    ]
    for section in moved:
        assert sum(line.difference_bytes for line in section.lines) == section.difference_bytes


def test_a_phase_that_one_side_lacks_is_left_out() -> None:
    ours = ledger()
    shorter = Ledger(ours.rows, [moment for moment in ours.moments if moment.phase in ("forward", "backward")])
    assert len(compare(shorter, ours)) == 3


def test_the_table_shows_totals_then_what_differs_and_no_markup() -> None:
    ours, theirs = ledger(), ledger()
    mischief = tensor("decoder.layers.0.[red]x[/red]", 5 * 10**6, 0, "[bold]y", phase="forward")
    theirs = Ledger([*theirs.rows, mischief], theirs.moments)
    comparison = Comparison(workload="w", workload_hash="h", sections=compare(ours, theirs)).only_differences()
    out = io.StringIO()
    Console(file=out, width=160).print(comparison)
    text = out.getvalue()
    assert text.index("between steps") < text.index("rows that differ")
    assert "[red]x[/red]" in text
    assert "[bold]y" in text
    assert "-5,000,000" in text
    assert "retained: the same rows on both sides" in text
    assert all(line.match == "trace only" for section in comparison.sections for line in section.lines)
