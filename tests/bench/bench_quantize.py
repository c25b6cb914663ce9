"""How much faster is int8 here, how close, and how do torch's own passes do in the same run?

Prints one table for DeepRecommender (Figure 6), one for ResNet-50 and LearningToPaint, and the
cost of the conversion, each beside its bar; ends with status 1 if a bar is missed. Programs are
timed in turns, a few calls each (the first of a turn brings weights into the cache and does not
count, as in a server that runs one model), and medians are compared.

Two bounds of the gain are measured in the same turns, so that a bar can be told from what this
machine gives: "read" is the float program's time over the time to read as many bytes as the int8
weights have, once, by the fastest reading operation of torch; "products" is the float program's
time over that of the int8 products alone, codes in and codes out, each layer on the faster library.

    OMP_NUM_THREADS=1 python tests/bench/bench_quantize.py [--threads 2] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fxlab
from fxlab.models import (
    DeepRecommender,
    LearningToPaintActor,
    randomize_batch_norms,
    resnet50,
)
from fxlab.passes.quantize import convert, prepare, quantize_static, sqnr
from fxlab.passes.quantize.kernels import Codes, available_engines
from fxlab.passes.quantize.modules import Int8Linear

BARS = {1: 4.5, 16: 4.5, 64: 4.5, 256: 3.5}
BARS_TWO_THREADS = {1: 3.0, 16: 3.0, 64: 3.0}
failures: list[str] = []


def held(what: str, value: float, least: float) -> str:
    """Return "ok" or "MISSED", and remember what was missed."""
    if value >= least:
        return "ok"
    failures.append(f"{what}: {value:.2f}, bar {least}")
    return "MISSED"


clock = time.perf_counter


def medians(programs: dict, x: torch.Tensor, turns: int, calls: int = 6) -> dict:
    """Return the median seconds of a call of each program on ``x``.

    Each turn has another order: a program should not always follow the one that fills the cache.
    """
    seconds = {name: [] for name in programs}
    order, shuffler = list(programs), random.Random(0)
    for _ in range(turns):
        shuffler.shuffle(order)
        for name in order:
            program = programs[name]
            program(x)
            for _ in range(calls):
                start = clock()
                program(x)
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def torchs_own(model: torch.nn.Module, batches: list, engine: str = "fbgemm") -> torch.nn.Module:
    """Return what ``prepare_fx`` and ``convert_fx`` make of ``model``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        torch.backends.quantized.engine = engine
        prepared = prepare_fx(model, get_default_qconfig_mapping(engine), (batches[0],))
        for batch in batches:
            prepared(batch)
        return convert_fx(prepared)


def steps_of_quantization(gm: torch.nn.Module) -> str:
    """Return how many quantize and dequantize operations a call runs."""
    names = [f"{n.target}" for n in gm.graph.nodes if n.op != "placeholder"]
    kinds = {"Quantize", "Dequantize"}
    mine = sum(
        n.op == "call_module"
        and (
            type(gm.get_submodule(n.target)).__name__ in kinds
            or getattr(gm.get_submodule(n.target), "reads_float", False)
        )
        for n in gm.graph.nodes
    )
    theirs = sum("quantize_per_tensor" in n or n == "dequantize" for n in names)
    return f"{mine + theirs}"


def products_alone(quantized: torch.nn.Module, batch: int) -> dict:
    """Return programs that multiply the codes of each linear layer, and do nothing else."""
    programs = {}
    for path, layer in quantized.named_modules():
        if isinstance(layer, Int8Linear):
            codes = torch.randint(0, 256, (batch, layer.weight.shape[1])).to(torch.uint8)
            only = Int8Linear(
                layer.weight, layer.weight_scale, layer.bias, layer.input, Codes(1.0, 128)
            )
            for engine in available_engines()[:-1]:
                run = only.bind(engine)
                programs[path, engine] = lambda x, run=run, codes=codes: run(codes)
    return programs


def reading(quantized: torch.nn.Module) -> dict:
    """Return programs that read as many bytes as the int8 weights have, and do nothing else."""
    layers = [m for m in quantized.modules() if isinstance(m, Int8Linear)]
    words = torch.ones(sum(layer.weight.numel() for layer in layers) // 8 * 2)
    whole = words.view(torch.int64)
    reads = {"dot": lambda x: words.dot(words), "max": lambda x: words.max()}
    return {**reads, "sum": lambda x: words.sum(), "integer sum": lambda x: whole.sum()}


def recommender(threads: int, turns: int) -> None:
    """Measure Figure 6's model at its batch sizes."""
    model = DeepRecommender().eval()
    batches = [torch.randn(64, 17768)]
    ours = quantize_static(model, batches)
    torchs = {e: torchs_own(model, batches, e) for e in ("fbgemm", "x86")}
    programs = {"float": model, "fxlab": ours, **torchs}
    x = torch.randn(64, 17768)
    quality = {name: sqnr(model(x), program(x)) for name, program in programs.items()}
    print(
        f"DeepRecommender 17,768, {threads} thread(s); quantize + dequantize steps: "
        f"fxlab {steps_of_quantization(ours)}, torch {steps_of_quantization(torchs['fbgemm'])}"
    )
    print(
        f"SQNR: fxlab {quality['fxlab']:.1f} dB "
        f"{held('recommender SQNR', quality['fxlab'], 30)}, torch {quality['fbgemm']:.1f} dB"
    )
    bars = BARS if threads == 1 else BARS_TWO_THREADS
    for batch in (1, 16, 64, 128, 256):
        x = torch.randn(batch, 17768)
        count = max(4, min(turns, turns * 32 // batch))
        products, reads = products_alone(ours, batch), reading(ours)
        ms = medians({**programs, **reads, **products}, x, count)
        least: dict[str, float] = {}
        for path, engine in products:
            least[path] = min(least.get(path, 9e9), ms[path, engine])
        bound = ms["float"] / sum(least.values())
        read = ms["float"] / min(ms[name] for name in reads)
        ratio = {name: ms["float"] / ms[name] for name in programs}
        best = min(ms[e] for e in torchs) / ms["fxlab"]
        verdict = held(f"batch {batch}", ratio["fxlab"], bars.get(batch, 0))
        against = held(f"batch {batch} against torch", best, 1.0)
        print(
            f"  batch {batch:3}: float {ms['float'] * 1e3:8.3f} ms, fxlab "
            f"{ms['fxlab'] * 1e3:7.3f} ms = {ratio['fxlab']:5.2f}x (bar {bars.get(batch, '-')}: "
            f"{verdict}), torch fbgemm {ratio['fbgemm']:5.2f}x, x86 {ratio['x86']:5.2f}x "
            f"(never slower: {against}); bounds: read {read:.2f}x, products {bound:.2f}x",
            flush=True,
        )


def images(threads: int, turns: int) -> None:
    """Measure the two convolutional models of the paper."""
    for name, model, shape in (
        ("ResNet-50", resnet50(), (3, 224, 224)),
        ("LearningToPaint", LearningToPaintActor(), (9, 128, 128)),
    ):
        randomize_batch_norms(model)
        model.eval()
        ours = quantize_static(model, [torch.randn(4, *shape)])
        for batch in (1, 8):
            x = torch.randn(batch, *shape)
            ms = medians({"float": model, "fxlab": ours}, x, max(3, turns // 4 // batch), 3)
            ratio = ms["float"] / ms["fxlab"]
            quality = sqnr(model(x), ours(x))
            print(
                f"{name}, batch {batch}, {threads} thread(s): float {ms['float'] * 1e3:.1f} ms, "
                f"fxlab {ms['fxlab'] * 1e3:.1f} ms = {ratio:.2f}x "
                f"(bar 2: {held(name, ratio, 2)}), SQNR {quality:.1f} dB "
                f"(bar 20: {held(name + ' SQNR', quality, 20)})",
                flush=True,
            )


def allocated() -> int:
    """Return the bytes of memory this process has filled, pages of libraries' code apart."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def conversion() -> None:
    """Measure time and peak memory of converting the 17,768 model."""
    model = DeepRecommender().eval()
    weights = sum(p.numel() * 4 for p in model.parameters())
    start = time.perf_counter()
    prepared = prepare(model)
    prepare_seconds = time.perf_counter() - start
    start = time.perf_counter()
    prepared(torch.randn(64, 17768))
    calibrate_seconds = time.perf_counter() - start
    gc.collect()
    base, peak, done = allocated(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], allocated())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    quantized = convert(prepared)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    total = (weights + peak[0] - base) / weights
    print(
        f"prepare {prepare_seconds * 1e3:.0f} ms, calibrate {calibrate_seconds * 1e3:.0f} ms, "
        f"convert {seconds * 1e3:.0f} ms (bar 1000: "
        f"{held('seconds of conversion', 1 / seconds, 1)}); memory, float weights included, "
        f"{total:.2f}x the float weights (bar 1.6: {held('memory', 1.6 / total, 1)})"
    )
    for batch in (64, 1):
        start = time.perf_counter()
        quantized(torch.randn(batch, 17768))
        print(
            f"first call with {batch} rows {(time.perf_counter() - start) * 1e3:.0f} ms; memory "
            f"then {(weights + allocated() - base) / weights:.2f}x the float weights"
        )


def main() -> int:
    """Run all measurements and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the calling thread's CPU seconds: for one thread on a machine that is busy",
    )
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.thread_time
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    vnni = torch.cpu._is_vnni_supported()
    print(
        f"torch {torch.__version__}, fxlab {fxlab.__version__}, VNNI {vnni}, "
        f"AMX {torch.cpu._is_amx_tile_supported()}"
    )
    turns = 8 if options.quick else 24
    with torch.inference_mode():
        conversion()
        recommender(options.threads, turns)
        if options.threads == 1:
            images(options.threads, turns)
    for failure in failures:
        print("MISSED", failure)
    return int(bool(failures) and vnni)


if __name__ == "__main__":
    raise SystemExit(main())
