"""What the estimate writes down for the allocator: a tensor that only changes its name keeps its block."""

import pytest

from labkit.memory.book import Book, Entry


def opened(book: Book, name: str, goes_on: int | None = None) -> int:
    return book.open(Entry(name, (256,), "bf16", 512, "", "pipeline"), goes_on)


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_tensor_with_another_name_keeps_its_block(closed_first: bool) -> None:
    book = Book()
    book.enter(1, "backward")
    first, other = opened(book, "received"), opened(book, "other")
    if closed_first:
        book.close(first)
        book.close(other)
    second = opened(book, "kept", first)
    if not closed_first:
        book.close(first)
        book.close(other)
    third = opened(book, "taken", second)
    for number in (second, third):
        book.close(number)
    assert book.events == [(first, 512), (other, 512), (-other, 0), (-first, 0)]
    rows = {row.tensor: row for row in book.rows(0, {first: 1024, other: 512})}
    assert [rows[name].block_bytes for name in ("received", "kept", "taken", "other")] == [1024, 1024, 1024, 512]
    assert all(row.dies is not None and row.dies > row.born for row in rows.values())
