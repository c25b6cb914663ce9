"""fxlab : torch.fx in one process, medians of interleaved repeats, seconds of the one thread.

Each line is a ratio, torch.fx's time over fxlab's (more than 1: fxlab is faster), with its bar.
Run: `python tests/bench/bench_core.py` or `make bench`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import statistics
import sys
import time
import tracemalloc
import warnings

import torch
import torch.fx
from torch.fx.passes.split_module import split_module as torch_split

import fxlab
from fxlab.core import tracer as tracer_file
from fxlab.models import resnet50
from fxlab.passes import split_module

torch.set_num_threads(1)
warnings.simplefilter("ignore")
BOTH = (fxlab, torch.fx)


def pair(ours, theirs, repeats=9):
    """Median seconds of both, run in turns; of this thread, so others' work does not count."""
    times = ([], [])
    ours(), theirs()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for fn, out in ((ours, times[0]), (theirs, times[1])):
                start = time.thread_time()
                fn()
                out.append(time.thread_time() - start)
    finally:
        gc.enable()
    return statistics.median(times[0]), statistics.median(times[1])


def chain(module, n=8000):
    """A module with a graph of n operations: relu, add, relu, add, ..."""
    graph = module.Graph()
    x = graph.placeholder("x")
    for i in range(n // 2):
        x = graph.call_function(torch.add, (graph.call_function(torch.relu, (x,)), i))
    graph.output(x)
    return module.GraphModule(torch.nn.Module(), graph)


def build(module, n=100_000):
    graph = module.Graph()
    x = graph.placeholder("x")
    for _ in range(n):
        x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    return graph


def node_bytes(module, n=20_000):
    gc.collect()
    tracemalloc.start()
    graph = build(module, n)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del graph
    return size / n


def edits(module, gm, times=100):
    for i in range(times):
        node = list(gm.graph.nodes)[5 + i]
        node.args = tuple(node.args)
        gm.recompile()
    gm.forward  # noqa: B018 - makes sure that there is code


def pattern(x):
    return torch.add(torch.relu(x), 1)


def instead(x):
    return torch.neg(x)


def matches(module, n=8000):
    graph = module.Graph()
    x = graph.placeholder("x")
    for _ in range(n // 2):
        x = graph.call_function(torch.add, (graph.call_function(torch.relu, (x,)), 1))
    graph.output(x)
    return module.GraphModule(torch.nn.Module(), graph)


def rewrites(repeats=3):
    """Median seconds of replace_pattern: ours and torch.fx's on 8,000 nodes, ours on 64,000.

    Each run gets a new graph, since the pass edits it; the garbage collector is on, as in use.
    """
    times = ([], [], [])
    for _ in range(repeats):
        for (module, n), out in zip(((fxlab, 8000), (torch.fx, 8000), (fxlab, 64_000)), times,
                                    strict=True):  # fmt: skip
            gm = matches(module, n)
            gc.collect()
            out.append(seconds(lambda gm=gm, m=module: m.replace_pattern(gm, pattern, instead)))
    return [statistics.median(out) for out in times]


def seconds(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def show(name, ratio, bar, note=""):
    good = "" if bar is None else ("ok" if ratio >= bar else "BELOW")
    shown = "" if bar is None else f"bar {bar:g}x"
    print(f"{name:<52}{ratio:8.2f}x  {shown:<10}{good:<6}{note}", flush=True)


@contextlib.contextmanager
def without_provenance():
    """Replace the one function that finds the user's frames."""
    original = tracer_file.call_site
    tracer_file.call_site = lambda *args: ()
    try:
        yield
    finally:
        tracer_file.call_site = original


def main():
    """Print the table."""
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, 1 thread\n")
    model = resnet50().eval()
    ours, theirs = pair(
        lambda: fxlab.Tracer().trace(model), lambda: torch.fx.Tracer().trace(model), 25
    )
    show("trace ResNet-50", theirs / ours, 3, f"{ours * 1e3:.1f} ms : {theirs * 1e3:.1f} ms")

    def bare():
        with without_provenance():
            fxlab.Tracer().trace(model)

    full, less = pair(lambda: fxlab.Tracer().trace(model), bare, 25)
    show(
        "  provenance, share of torch.fx's trace", (full - less) / theirs, None, "bar 0.05 at most"
    )

    ours, theirs = pair(lambda: fxlab.symbolic_trace(model).forward,
                        lambda: torch.fx.symbolic_trace(model).forward, 15)  # fmt: skip
    show("symbolic_trace ResNet-50 and compile", theirs / ours, 2)
    gms = [module.symbolic_trace(model) for module in BOTH]
    ours, theirs = pair(*(lambda gm=gm: gm.graph.python_code("self") for gm in gms), 15)
    show("code generation, ResNet-50", theirs / ours, 1)
    ours, theirs = pair(
        *(lambda gm=gm, m=m: edits(m, gm) for m, gm in zip(BOTH, gms, strict=True)), 5
    )
    show("100 edits + recompile(), then one use", theirs / ours, 20)

    def one(gm):
        node = list(gm.graph.nodes)[5]
        node.args = tuple(node.args)
        gm.recompile()
        return gm.forward

    ours, theirs = pair(*(lambda gm=gm: one(gm) for gm in gms), 15)
    show("one edit + recompile + use", theirs / ours, 1.4)

    ours, theirs = pair(lambda: build(fxlab), lambda: build(torch.fx), 3)
    show("build 100,000 nodes", theirs / ours, 2)
    small = statistics.median(seconds(lambda: build(fxlab, 10_000)) for _ in range(5))
    print(f"{'  growth from 10,000 to 100,000 nodes':<52}{ours / small:8.2f}x  linear: 10x")
    a, b = node_bytes(fxlab), node_bytes(torch.fx)
    print(f"{'  bytes a node, fxlab / torch.fx':<52}{a / b:8.2f}   bar 0.85  {a:.0f} : {b:.0f}")

    gms = [chain(module) for module in BOTH]
    ours, theirs = pair(*(lambda gm=gm: copy.deepcopy(gm) for gm in gms), 3)
    show("deepcopy, 8,000 nodes", theirs / ours, 2)
    ours, theirs = pair(*(lambda gm=gm: pickle.loads(pickle.dumps(gm)) for gm in gms), 3)
    show("pickle round trip, 8,000 nodes", theirs / ours, 2)
    ours, theirs = pair(*(lambda gm=gm, m=m: m.Transformer(gm).transform()
                          for m, gm in zip(BOTH, gms, strict=True)), 3)  # fmt: skip
    show("Transformer, 8,000 nodes", theirs / ours, 2)

    def part(node, count=iter(range(10**9))):  # noqa: B008
        return int(node.name.split("_")[-1]) // 1000 if node.name[-1].isdigit() else 0

    ours, theirs = pair(lambda: split_module(gms[0], gms[0], part),
                        lambda: torch_split(gms[1], gms[1], part), 3)  # fmt: skip
    show("split into parts, 8,000 nodes", theirs / ours, 2)
    ours, theirs = pair(*(lambda gm=gm: gm.graph.lint() for gm in gms), 5)
    show("lint, 8,000 nodes", theirs / ours, 0.5)
    ours, theirs = pair(*(lambda gm=gm: gm.graph.eliminate_dead_code() for gm in gms), 5)
    show("dead-code elimination, 8,000 nodes", theirs / ours, 1)
    x = torch.zeros(1)
    ours, theirs = pair(*(lambda gm=gm, m=m: m.Interpreter(gm).run(x)
                          for m, gm in zip(BOTH, gms, strict=True)), 5)  # fmt: skip
    show("Interpreter, 8,000 nodes", theirs / ours, 1)

    ours, theirs, big = rewrites()
    show("replace_pattern, 4,000 matches in 8,000 nodes", theirs / ours, 10)
    print(f"{'  growth from 8,000 to 64,000 nodes':<52}{big / ours:8.2f}x  bar 9x at most")

    small_model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    gms = [module.symbolic_trace(small_model) for module in BOTH]
    y = torch.zeros(1, 4)
    with torch.no_grad():
        ours, theirs = pair(*(lambda gm=gm: [gm(y) for _ in range(2000)] for gm in gms), 9)
    show("call of a traced module (torch.fx / fxlab)", theirs / ours, 1)


if __name__ == "__main__":
    main()
