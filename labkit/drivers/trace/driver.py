"""The trace driver: real Megatron Core and Transformer Engine steps over fake tensors, every storage accounted."""

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.drivers.trace import cuda_surface, megatron_patches, te_shapes
from labkit.drivers.trace.cublas import CublasWorkspaces
from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.patches import Replacement, installed
from labkit.drivers.trace.tracker import StorageTracker
from labkit.workload import Workload
from labkit.workload.gpu import GPUS


@contextlib.contextmanager
def fake_cuda(workload):
    def repl():
        yield from cuda_surface.replacements(GPUS[workload.training.gpu])
        yield from te_shapes.replacements()
        yield from megatron_patches.replacements(workload)
    with installed(repl()) as done:
        yield done

def trace_here(workload, rank=0, iterations=2):
    import time
    t=time.time()
    with fake_cuda(workload):
        from labkit.drivers import build, step
        print("imports", time.time()-t); t=time.time()
        os.environ["WORLD_SIZE"]=str(workload.parallelism.world_size)
        dist.init_process_group("fake", rank=rank, world_size=workload.parallelism.world_size, store=FakeStore())
        build.parallel_groups(workload)
        print("pg", time.time()-t); t=time.time()
        origin=Origin()
        ws=CublasWorkspaces(GPUS[workload.training.gpu])
        tracker=StorageTracker(origin)
        tracker.before=lambda op: ws.before_operator(tracker,op)
        with cuda_surface.CudaAsCpu(tracker), FakeTensorMode(allow_non_fake_inputs=True), tracker, installed(megatron_patches.sharing_storage(tracker.share)):
            tracker.phase(0,"setup")
            with origin.inside("model"):
                model=build.build_model(workload)
            print("model", time.time()-t, len(tracker.events)); t=time.time()
            with origin.inside("ddp"):
                ddp=build.wrap(workload, model)
            print("ddp", time.time()-t, len(tracker.events)); t=time.time()
            with origin.inside("optimizer"):
                opt=build.build_optimizer(workload, ddp)
            print("opt", time.time()-t, len(tracker.events)); t=time.time()
            with origin.watching(model.module):
                s=step.TrainingStep(workload, ddp, opt, tracker.phase)
                for i in range(iterations):
                    s.run()
                    print("step", time.time()-t, len(tracker.events)); t=time.time()
    return tracker
