"""Bars of split, partition, lowering and scheduling: ratios of medians in one process, one thread.

Run by ``make bench``. Prints one line a bar: what was measured, the bar, and whether it holds here.
With a word as argument only the bars that contain it are run.
"""

from __future__ import annotations

import gc
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.fx
from torch import nn
from torch.fx.passes.split_module import split_module as torch_split_module

import fxlab
from fxlab.models import LearningToPaintActor, resnet50
from fxlab.passes import CapabilityBasedPartitioner, OperatorSupport, cost, split_module
from tests import slow_call
from tests.bench import peak


def seconds(run: Callable[[], object]) -> float:
    """Time one run, the garbage collector at rest."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    run()
    end = time.perf_counter()
    gc.enable()
    return end - start


def in_turns(repeats: int, *runs: Callable[[], object]) -> list[float]:
    """Return the median seconds of each program, all timed in turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            found.append(seconds(run))
    return [statistics.median(found) for found in times]


def line(what: str, value: float, bar: float, unit: str, at_least: bool) -> None:
    """Print one result beside its bar."""
    holds = value >= bar if at_least else value <= bar
    sign = ">=" if at_least else "<="
    print(f"{what:58} {value:8.2f} {unit:3} (bar {sign} {bar:g}) {'ok' if holds else 'MISSED'}")


def random_program(count: int) -> fxlab.GraphModule:
    """Sums of near-by values, 1 % of them through a sine."""
    pick = random.Random(0)
    graph = fxlab.Graph()
    values = [graph.placeholder("x")]
    for _ in range(count):
        a, b = (values[max(0, len(values) - 1 - pick.randrange(n))] for n in (5, 50))
        unsupported = pick.random() < 0.01
        values.append(
            graph.call_function(torch.sin, (a,))
            if unsupported
            else graph.call_function(operator.add, (a, b))
        )
    graph.output(values[-1])
    return fxlab.GraphModule({}, graph)


def bench_partition() -> None:
    """Propose and fuse 40,000 nodes; growth from 10,000."""
    support = OperatorSupport({operator.add: None})
    small, large = random_program(10_000), random_program(40_000)
    times = in_turns(
        5,
        lambda: CapabilityBasedPartitioner(small, support).partition_and_fuse(),
        lambda: CapabilityBasedPartitioner(large, support).partition_and_fuse(),
    )
    line("partition_and_fuse, 40,000 nodes, 1 % unsupported", times[1], 2.0, "s", False)
    line("its growth from 10,000 to 40,000 nodes", times[1] / times[0], 5.0, "x", False)


def bench_split() -> None:
    """Split 8,000 nodes into 80 parts, against torch.fx."""
    ours, theirs = fxlab.Graph(), torch.fx.Graph()
    for graph in (ours, theirs):
        value = graph.placeholder("x")
        for _ in range(8000):
            value = graph.call_function(operator.add, (value, 1))
        graph.output(value)
    a, b = fxlab.GraphModule({}, ours), torch.fx.GraphModule({}, theirs)
    place = {g: {n: i // 100 for i, n in enumerate(g.nodes)} for g in (ours, theirs)}
    times = in_turns(
        7,
        lambda: split_module(a, None, place[ours].__getitem__),
        lambda: torch_split_module(b, None, place[theirs].__getitem__),
    )
    line("split_module of 8,000 nodes over torch.fx's", times[1] / times[0], 2.0, "x", True)


def bench_lowering() -> None:
    """Eager over each runtime, one thread."""
    from fxlab.backends import available_backends, lower

    ready = available_backends()
    peaks = {name: work for name, (work, _) in peak.kernels().items()}
    entries = [
        ("ResNet-50", resnet50(), torch.randn(1, 3, 224, 224), {"f32": 2.0, "bf16": 3.7}),
        ("LearningToPaint", LearningToPaintActor(), torch.rand(1, 9, 128, 128),
         {"f32": 1.54, "bf16": 1.54}),
    ]  # fmt: skip
    for name, model, x, bars in entries:
        model = model.eval()
        for backend, precision in (
            ("onnxruntime", "f32"),
            ("openvino", "f32"),
            ("openvino", "bf16"),
        ):
            if ready[backend] is not None:
                print(f"{name}, {backend}: {ready[backend]}")
                continue
            try:
                fast = lower(model, [x], backend, precision=precision, threads=1)
            except fxlab.LoweringError as error:
                print(f"{name}, {backend} {precision}: {error.message}")
                continue
            with torch.inference_mode():
                model(x), fast(x)
                runs = (lambda m=model, x=x: m(x), lambda f=fast, x=x: f(x), *peaks.values())
                times = in_turns(15, *runs)
            what = f"{name}, batch {x.shape[0]}, {backend} {precision} over eager f32"
            line(what, times[0] / times[1], bars[precision], "x", True)
            if precision == "f32":
                weights = sum(p.nbytes for p in model.parameters())
                flops = cost(fxlab.symbolic_trace(model), x).flops
                kernels = dict(zip(peaks, times[2:], strict=True))
                print(peak.ceiling(kernels, flops, weights, *times[:2]))


def bench_call() -> None:
    """A lowered module against the bare runtime on a tiny program."""
    from fxlab.backends import available_backends, lower

    x = torch.randn(4, 8)
    gm = fxlab.symbolic_trace(nn.ReLU())
    for backend in ("onnxruntime", "openvino"):
        if available_backends()[backend] is not None:
            continue
        module = lower(gm, [x], backend, threads=1).device_0
        if backend == "onnxruntime":
            session, feed = module.engine.session, {module.inputs[0].name: x.numpy()}

            def bare(session: object = session, feed: dict = feed) -> None:
                session.run(None, feed)
        else:
            request = module.engine.compiled.create_infer_request()
            bare = request.infer
        for _ in range(50):
            bare(), module(x)
        pairs = [(time_of(bare), time_of(lambda m=module: m(x))) for _ in range(1000)]
        extra = statistics.median(b for _, b in pairs) - statistics.median(a for a, _ in pairs)
        line(f"a call of a lowered module over bare {backend}", extra * 1e6, 50, "us", False)


def bench_hoist_async() -> None:
    """A call of 20 ms in another process behind work of 20 ms: how much of it is hidden."""
    x = torch.eye(32)
    written, hoisted = slow_call.programs()
    with slow_call.server():
        runs = (lambda: written(x, 1.0), lambda: hoisted(x, 1.0), lambda: slow_call.ask(1.0))
        one_by_one, at_once, call = in_turns(25, *runs)
        shares = [slow_call.share_at_once(runs[1]) for _ in range(25)]
    line("hoist_async, share overlapped of a 20 ms call", statistics.median(shares), 0.9, "", True)
    print(
        f"  by the clock: {one_by_one * 1e3:.1f} ms one after the other, {at_once * 1e3:.1f} ms "
        f"hoisted, the call alone {call * 1e3:.1f} ms"
    )


def time_of(run: Callable[[], object]) -> float:
    """Time one short call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Run the bars."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    benches = (bench_partition, bench_split, bench_hoist_async, bench_call, bench_lowering)
    for bench in benches:
        if wanted in bench.__name__:
            bench()


if __name__ == "__main__":
    main()
