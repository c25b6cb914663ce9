"""What recording costs: time over the bare pass, and bytes a step.

Processor seconds. Run: `python tests/bench/bench_record.py` or `make bench`. Bars: 3x on a pass
without tensor work
(relu by gelu, 4,000 of 8,000 nodes), 1.3x on ResNet-50's fold, 1.5 KB a step.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import resnet50
from fxlab.passes import fuse_conv_bn

torch.set_num_threads(1)


def chain(pairs=4000):
    """A module with a graph of relu, neg, relu, neg, ..."""
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    for _ in range(pairs):
        x = graph.call_function(torch.neg, (graph.call_function(torch.relu, (x,)),))
    graph.output(x)
    return fxlab.GraphModule(nn.Module(), graph)


def relu_to_gelu(gm):
    """Edit in place: call gelu instead of relu, by a new node each."""
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.gelu, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)


def timed(build, pass_, recorded):
    """Seconds of one pass on a fresh module, and its timeline."""
    gm, timeline = build(), None
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        if recorded:
            with fxlab.record(gm) as timeline:
                pass_(gm)
        else:
            pass_(gm)
        return time.process_time() - start, timeline
    finally:
        gc.enable()


def ratio(build, pass_, repeats=9):
    """Medians of both and the median of the ratios of neighbours, run in turns."""
    bare, recorded = [], []
    for _ in range(repeats):
        bare.append(timed(build, pass_, False)[0])
        recorded.append(timed(build, pass_, True)[0])
    pairs = zip(recorded, bare, strict=True)
    ratios = statistics.median(a / b for a, b in pairs)
    return statistics.median(bare), statistics.median(recorded), ratios


def main():
    """Print one line a measurement."""
    model = resnet50().eval()
    for name, build, pass_, bar in (
        ("relu by gelu, 4,000 of 8,000 nodes", chain, relu_to_gelu, 3.0),
        ("ResNet-50's fold", lambda: fxlab.symbolic_trace(model), fuse_conv_bn, 1.3),
    ):
        bare, recorded, times = ratio(build, pass_)
        timeline = timed(build, pass_, True)[1]
        steps = len(timeline)
        size = len(timeline.to_json()) / steps
        print(
            f"record {name}: {bare * 1e3:.0f} ms bare, {recorded * 1e3:.0f} ms recorded, "
            f"{times:.2f}x (bar {bar}x); {steps} steps, {size:.0f} bytes of JSON a step (bar 1500)"
        )
    gm = chain()
    gc.collect()
    tracemalloc.start()
    with fxlab.record(gm) as timeline:
        relu_to_gelu(gm)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] / len(timeline.recorder.events)
    tracemalloc.stop()
    start = time.process_time()
    steps = timeline.steps
    written = time.process_time() - start
    start = time.process_time()
    assert steps[-1].well_formed
    checked = time.process_time() - start
    print(
        f"record memory: {held:.0f} bytes a step while recording, the new nodes included; "
        f"{len(steps)} steps written in {written:.2f} s, checked in {checked:.2f} s"
    )


if __name__ == "__main__":
    main()
