"""Tables of `torch.cuda.memory_summary()`, whole or abbreviated (`torch/cuda/memory.py`)."""

import re

from labkit.diagnose.facts import Evidence, MemorySummary
from labkit.diagnose.lines import Line

TITLE = re.compile(r"PyTorch CUDA memory summary, device ID (\d{1,4})")
LONGEST = 60
"""Lines of a table, that of torch 2.14 has 48."""
_COUNTS = re.compile(r"CUDA OOMs: {0,20}(\d{1,18}) {0,20}\| {0,20}cudaMalloc retries: {0,20}(\d{1,18})")
_CELL = r" {0,20}(\d{1,20}) (B|KiB|KB|MiB|MB|GiB|GB|TiB|TB|PiB|PB) {0,4}"
_ROW = re.compile(rf"\| {{0,8}}([A-Z][A-Za-z -]{{3,24}}?) {{0,24}}\|{_CELL}\|{_CELL}\|")
_UNITS = {"B": 1} | {f"{letter}{infix}B": 1024**power for power, letter in enumerate("KMGTP", 1) for infix in ("i", "")}
"""`KB` to `PB` until torch 1.13, of 1024 all the same."""
_FIELDS = {
    "Allocated memory": ("allocated", "max_allocated"),
    "GPU reserved memory": ("reserved", "max_reserved"),
    "Non-releasable memory": ("not_releasable", ""),
    "Requested memory": ("requested", ""),
}


class Table:
    """A table as it is read, from its title on."""

    def __init__(self, line: Line, source: str, device: int) -> None:
        self._source = source
        self._title = line
        self._device = device
        self._counts = (0, 0)
        self._bytes: dict[str, int] = {}
        self._evidence = Evidence.quote(source, line.number, line.text)
        self.left = LONGEST
        """Lines that may still belong to it."""

    def see(self, line: Line) -> bool:
        """Take a line in; whether the table goes on."""
        self.left -= 1
        if found := _COUNTS.search(line.text):
            self._counts = (int(found[1]), int(found[2]))
        elif found := _ROW.search(line.text):
            name, current, unit, peak, peak_unit = found.groups()
            for field, number, scale in zip(
                _FIELDS.get(name.strip(), ()), (current, peak), (unit, peak_unit), strict=False
            ):
                self._bytes[field] = min(int(number) * _UNITS[scale], 2**63 - 1)
            if name.strip() == "GPU reserved memory":
                self._evidence = Evidence.quote(self._source, line.number, line.text)
        return self.left > 0 and "Oversize GPU segments" not in line.text

    def finished(self, rank: int | None, iteration: int | None) -> MemorySummary | None:
        """What it said; None if it has no row."""
        values = {name: value for name, value in self._bytes.items() if name}
        if not values:
            return None
        failures, retries = self._counts
        return MemorySummary(
            evidence=self._evidence,
            rank=rank,
            iteration=iteration,
            device=self._device,
            failures=failures,
            retries=retries,
            **values,
        )
