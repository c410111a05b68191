"""How long decisions take, and the failure that admission is for: `python -m benchmarks.admission [--replay]`.

The decision is timed for 64 requests of several kinds on a prepared template: Qwen3.8-27B, LoRA, TP 4, trees, 80 GB.
`--replay` prints the decision on the call that once was admitted at 5.894 GB and ran out of memory above 107.192 GB at
TP 2 and 119.289 GB at TP 4, and under full recompute peaks at 41 GiB (TP 2) and 22 GiB (TP 4), measured on H200
(`data/published/README.md`): 27B dense, 32,710 packed tokens, label `core_attn`.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence

from labkit.admission import Admission, Decision, Request
from labkit.workload import Workload
from labkit.workload.gpu import GIB

COUNT = 64
LENGTHS, PREFIX = (19_221, 19_222), 5_733
"""Of the failing call: 32,710 tokens with the prefix once, 38,443 without."""
MEASURED_FULL_GIB = {2: 41, 4: 22}
OLD_HEURISTIC_GB = 5.894


def template(tensor_ranks: int) -> Workload:
    """The failing call's runtime: LoRA on a frozen base, eight H200."""
    shipped = Workload.load("qwen3.8-27b-lora").model_dump(exclude_unset=True)
    shipped["parallelism"]["tensor_model_parallel_size"] = tensor_ranks
    shipped["batch"] |= {"global_batch_size": 8 // tensor_ranks}
    shipped["training"]["lora"] = {"rank": 1, "compile_layers": False, "optimizer_step": False}
    return Workload.from_mapping(shipped)


def failure(tensor_ranks: int) -> Decision:
    """The decision on it."""
    together = [Request(length=each, group="call", prefix="prompt", shared_prefix=PREFIX) for each in LENGTHS]
    return Admission(template(tensor_ranks), "h200-141gb").decide(together)


def kinds() -> dict[str, list[Request]]:
    """64 requests each."""
    some = random.Random(3)  # noqa: S311 (no secret)
    return {
        "that all fit together": [Request(length=some.randint(20, 200)) for _ in range(COUNT)],
        "short ones": [Request(length=some.randint(50, 600)) for _ in range(COUNT)],
        "long and short ones": [Request(length=some.randint(500, 6000)) for _ in range(COUNT)],
        "eight groups": [Request(length=some.randint(300, 800), group=f"g{at // 8}") for at in range(COUNT)],
        "eight prefixes": [
            Request(length=1500 + some.randint(100, 3000), prefix=f"p{at // 8}", shared_prefix=1500)
            for at in range(COUNT)
        ],
        "one too large": [Request(length=100_000), *(Request(length=300) for _ in range(COUNT - 1))],
    }


def timed(
    admission: Admission, requests: Sequence[Request], times: int = 25
) -> tuple[list[float], list[float], Decision]:
    """Milliseconds of decisions, of the clock and of the processor, the first left out."""
    decision = admission.decide(requests)
    wall, busy = [], []
    for _ in range(times):
        started, worked = time.perf_counter(), time.process_time()
        decision = admission.decide(requests)
        wall.append((time.perf_counter() - started) * 1e3)
        busy.append((time.process_time() - worked) * 1e3)
    return wall, busy, decision


def replay() -> None:
    """The failing call, decided, beside what was measured."""
    for tensor_ranks, measured in MEASURED_FULL_GIB.items():
        decision = failure(tensor_ranks)
        full = next(each for each in decision.remedies if each.change.startswith("full recompute"))
        print(f"TP {tensor_ranks} (the old heuristic: {OLD_HEURISTIC_GB} GB, admitted)\n{decision}")
        print(f"measured under full recompute: {measured} GiB; predicted {full.peak_bytes / GIB:.1f}\n")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Time admission decisions.")
    parser.add_argument("--replay", action="store_true", help="decide on the failure that admission is for instead")
    if parser.parse_args().replay:
        replay()
        return
    admission = Admission(Workload.load("qwen3.8-27b-lora"), "80GB")
    print(f"prepared in {admission.prepare():.1f} s; {COUNT} requests each, target 5 ms; load {os.getloadavg()[0]:.1f}")
    for name, requests in kinds().items():
        wall, busy, decision = timed(admission, requests)
        found = (
            f"{decision.outcome}, {len(decision.micro_batches)} micro-batches (at least {decision.least_micro_batches})"
        )
        print(f"{name:24} {statistics.median(wall):5.1f} ms, {statistics.median(busy):5.1f} ms of a processor  {found}")


if __name__ == "__main__":
    main()
