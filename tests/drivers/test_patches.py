import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.drivers.trace.patches import Replacement, installed


class Base:
    word = "base"


class Derived(Base):
    own = 1


def test_everything_is_as_before_afterwards() -> None:
    table = {"kept": 1}
    before = dict(vars(Derived))
    with installed(
        [
            Replacement(Derived, "own", 2, "nothing"),
            Replacement(Derived, "own", 3, "nothing"),
            Replacement(Derived, "word", "derived", "nothing"),
            Replacement(table, "kept", 2, "nothing"),
            Replacement(table, "new", 3, "nothing"),
        ]
    ) as done:
        assert (Derived.own, Derived.word, Base.word) == (3, "derived", "base")
        assert table == {"kept": 2, "new": 3}
        assert len(done) == 5
    assert dict(vars(Derived)) == before
    assert table == {"kept": 1}


def test_what_was_installed_before_an_error_is_taken_back() -> None:
    def failing() -> object:
        yield Replacement(Derived, "own", 2, "nothing")
        assert Derived.own == 2, "a replacement is in force before the next is asked for"
        raise RuntimeError("import failed")

    with pytest.raises(RuntimeError, match="import failed"), installed(failing()):  # type: ignore[arg-type]
        pass
    assert Derived.own == 1


_SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from labkit.drivers.trace.surface import fake_cuda
from labkit.workload.gpu import GPUS

names = "is_available device_count current_device get_device_properties Stream Event stream current_stream".split()
before = {name: getattr(torch.cuda, name) for name in names}
tensor_before = dict(vars(torch.Tensor))
compile_before = torch.compile
with fake_cuda(GPUS["h200-141gb"]) as done:
    inside = [torch.cuda.is_available(), torch.cuda.get_device_properties(0).total_memory]
    import fused_weight_gradient_mlp_cuda
    main, other = torch.cuda.current_stream(), torch.cuda.stream(torch.cuda.Stream())
    streams = []
    for _ in range(2):
        with other:
            streams.append(torch.cuda.current_stream() == main)
        streams.append(torch.cuda.current_stream() == main)
    silent = [str(replacement[:2]) for replacement in done if not replacement.allocates]
print(json.dumps({
    "inside": inside,
    "silent": silent,
    "streams": streams,
    "installed": len(done),
    "changed": [name for name in names if getattr(torch.cuda, name) is not before[name]],
    "tensor": [name for name, value in vars(torch.Tensor).items() if tensor_before.get(name) is not value]
        + [name for name in tensor_before if name not in vars(torch.Tensor)],
    "compile": torch.compile is compile_before,
    "dynamo": "torch._dynamo" in sys.modules,
    "available": torch.cuda.is_available(),
}))
"""


def test_fake_cuda_restores_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["inside"] == [True, int(139.81 * 2**30)]
    assert found["installed"] > 40
    assert found["streams"] == [False, True] * 2, "a stream's context is entered as often as one likes"
    assert found["silent"] == [], "a replacement does not say what the real thing allocates"
    assert (found["changed"], found["tensor"], found["compile"], found["dynamo"]) == ([], [], True, False)
    assert found["available"] is False
