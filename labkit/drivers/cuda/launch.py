"""torchrun under a watch: `python -m labkit.drivers.cuda.launch FOLDER MODULE PER_NODE NODES ENDPOINT`.

One for each node; of several nodes, Slurm says which one this is (`SLURM_NODEID`), and the first is at the endpoint.

It leaves as soon as its standard input ends, which happens when the driver dies, however that dies; its ranks leave
with it. How ranks ended that wrote no report, it says in `labkit.drivers.cuda.report.Exits`.
"""

import os
import select
import signal
import sys
import threading
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from labkit.drivers.cuda.leash import LAUNCHER
from labkit.drivers.cuda.report import Exits


def main(folder: Path, module: str, per_node: int, nodes: int, endpoint: str) -> int:
    """Run the ranks of one node; returns the exit code."""
    node = int(os.environ["SLURM_NODEID"]) if nodes > 1 else 0
    os.environ[LAUNCHER] = str(os.getpid())
    threading.Thread(target=_leave_with_the_driver, daemon=True).start()
    meeting = (
        ["--standalone"]
        if nodes == 1
        else ["--nnodes", str(nodes), "--node-rank", str(node), "--rdzv-backend", "static", "--rdzv-endpoint", endpoint]
    )
    arguments = [
        *meeting,
        *(
            "--nproc-per-node",
            str(per_node),
            "--max-restarts",
            "0",
            "--redirects",
            "3",
            "--log-dir",
            str(folder / "logs"),
        ),
        *("--module", module, str(folder)),
    ]
    try:
        run(get_args_parser().parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Exits(codes=codes).write(Exits.path(folder, node))
        return 1
    return 0


def _leave_with_the_driver() -> None:
    poll = select.poll()
    poll.register(0, 0)  # hang-ups are always reported; data is not asked for
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, module, per_node, nodes, endpoint = sys.argv[1:]
    sys.exit(main(Path(folder), module, int(per_node), int(nodes), endpoint))
