"""Ratios of the passes: against eager, against torch.fx's own, with their bars.

Run as ``python tests/bench/bench_passes.py``. Everything is measured in turns in one process with
one thread; a ratio is that of two medians.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental.optimization as torch_optimization
from torch.fx.passes.shape_prop import ShapeProp as TorchShapeProp

import fxlab
from fxlab.models import TransformerBlock, resnet50
from fxlab.passes import (
    amp,
    calibrate,
    cost,
    cse,
    dce,
    fuse_conv_bn,
    optimize_for_inference,
    shape_prop,
)
from tests.bench import peak


def medians(candidates: dict[str, Callable[[], Any]], repeats: int = 9) -> dict[str, float]:
    """Return the median seconds of each candidate, measured in turns after one warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for work in candidates.values():
        work()
    for _ in range(repeats):
        for name, work in candidates.items():
            start = time.perf_counter()
            work()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in samples.items()}


def show(what: str, ratio: float, bar: str, met: bool) -> None:
    """Print one line of the table."""
    print(f"{what:<64} {ratio:>7.2f}   bar {bar:<12} {'met' if met else 'NOT MET'}")


def inference(batch: int) -> None:
    """Eager, torch.fx's optimize_for_inference and ours on ResNet-50, in one run."""
    model, x = resnet50().eval(), torch.randn(batch, 3, 224, 224)
    ours = optimize_for_inference(model, x)
    theirs = torch_optimization.optimize_for_inference(model)
    folded = fuse_conv_bn(fxlab.symbolic_trace(model))
    peaks = {name: work for name, (work, _) in peak.kernels().items()}
    with torch.no_grad():
        t = medians({"eager": lambda: model(x), "ours": lambda: ours(x), **peaks,
                     "theirs": lambda: theirs(x), "folded": lambda: folded(x)})  # fmt: skip
    name = f"ResNet-50, batch {batch}, 1 thread"
    show(f"{name}: optimize_for_inference over eager", t["eager"] / t["ours"], ">= 1.5",
         t["eager"] >= 1.5 * t["ours"])  # fmt: skip
    weights = sum(p.nbytes for p in model.parameters())
    flops = cost(fxlab.symbolic_trace(model), x).flops
    print(peak.ceiling({k: t[k] for k in peaks}, flops, weights, t["eager"], t["ours"]))
    show(f"{name}: ... over torch.fx's optimize_for_inference", t["theirs"] / t["ours"], ">= 1",
         t["theirs"] >= t["ours"])  # fmt: skip
    show(f"{name}: fuse_conv_bn alone over eager", t["eager"] / t["folded"], "-", True)


def analyses() -> None:
    """Shapes, fusion and clean-up beside torch.fx's; the prediction beside the clock."""
    model, x = resnet50().eval(), torch.randn(1, 3, 64, 64)
    gm, torch_gm = fxlab.symbolic_trace(model), torch.fx.symbolic_trace(model)
    with torch.no_grad():
        t = medians({"ours": lambda: shape_prop(gm, x),
                     "theirs": lambda: TorchShapeProp(torch_gm).propagate(x)}, 5)  # fmt: skip
        show("shape propagation, ResNet-50: torch.fx over ours", t["theirs"] / t["ours"], "-", True)
        t = medians({"ours": lambda: fuse_conv_bn(fxlab.symbolic_trace(model)),
                     "theirs": lambda: torch_optimization.fuse(model)}, 5)  # fmt: skip
        show("trace and fuse ResNet-50: torch.fx over ours", t["theirs"] / t["ours"], "-", True)
    x = torch.randn(1, 3, 224, 224)
    predicted = calibrate().predict(cost(gm, x)).seconds
    with torch.no_grad():
        samples = []
        for _ in range(5):
            start = time.process_time()  # one thread's own time, whoever else uses the machine
            gm(x)
            samples.append(time.process_time() - start)
    ratio = predicted / statistics.median(samples)
    show("predicted over measured time, ResNet-50", ratio, "0.5 to 2", 0.5 <= ratio <= 2)
    seconds = {}
    for size in (4000, 32000):
        for pass_ in (dce, cse):
            graph = fxlab.Graph()
            value = graph.placeholder("x")
            for i in range(size):
                value = graph.call_function(torch.add, (value, i))
            graph.output(value)
            chain = fxlab.GraphModule(torch.nn.Module(), graph)
            start = time.perf_counter()
            pass_(chain)
            seconds[pass_, size] = time.perf_counter() - start
    for pass_ in (dce, cse):
        ratio = seconds[pass_, 32000] / seconds[pass_, 4000]
        show(f"{pass_.__name__}: 32,000 nodes over 4,000", ratio, "<= 10", ratio <= 10)


def mixed_precision() -> None:
    """The pass beside autocast on the transformer block."""
    model, x = TransformerBlock(256, 8).eval(), torch.randn(8, 128, 256)
    gm = amp(fxlab.symbolic_trace(model), torch.bfloat16, x)

    def autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    with torch.no_grad():
        t = medians({"autocast": autocast, "ours": lambda: gm(x), "float32": lambda: model(x)})
    show("transformer in bfloat16: autocast over amp", t["autocast"] / t["ours"], "-", True)
    show("transformer in bfloat16: float32 over amp", t["float32"] / t["ours"], "-", True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    analyses()
    mixed_precision()
    for batch in (1, 8):
        inference(batch)
