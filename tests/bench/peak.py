"""How fast could one program be on this machine at all?

A ratio over eager has a ceiling: the program's operations at the rate of the fastest float32 kernel
that is here, over eager's seconds. `bench_passes.py` and `bench_devices.py` time these kernels in
turns with their programs and print the ceiling beside the bar.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SIDE, CHANNELS, IMAGE = 1024, 256, 28
STREAMED = torch.ones(1 << 25)  # 134 MB, more than the caches hold


def kernels() -> dict[str, tuple[Callable[[], object], int]]:
    """Return each kernel's name -> (call, amount of work).

    The work is floating-point operations (multiply and add counted separately) of data that fit
    into the caches; of `"read"` it is the bytes that come from memory.
    """
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    product, convolution = 2 * SIDE**3, 2 * 9 * CHANNELS**2 * IMAGE**2
    found: dict[str, tuple[Callable[[], object], int]] = {
        "read": (lambda: torch.sum(STREAMED), STREAMED.nbytes),
        "torch.mm": (lambda: torch.mm(a, b), product),
    }
    if torch.backends.mkldnn.is_available():
        ops, last = torch.ops.mkldnn, ("none", [], "")
        packed = ops._reorder_linear_weight(b, SIDE)
        x = torch.randn(1, CHANNELS, IMAGE, IMAGE).contiguous(memory_format=torch.channels_last)
        geometry = ([1, 1], [1, 1], [1, 1], 1)
        weight = torch.randn(CHANNELS, CHANNELS, 3, 3)
        blocked = ops._reorder_convolution_weight(weight, *geometry, list(x.shape))
        found["oneDNN's matmul"] = (lambda: ops._linear_pointwise(a, packed, None, *last), product)
        convolve = ops._convolution_pointwise
        found["oneDNN's 3x3 convolution"] = (
            lambda: convolve(x, blocked, None, *geometry, *last),
            convolution,
        )
    return found


def ceiling(
    seconds: dict[str, float],
    flops: float,
    weight_bytes: int,
    eager: float,
    ours: float,
) -> str:
    """Say how near a program comes to the machine's peak, and what ratio the peak would give.

    Args:
        seconds: median seconds of each of `kernels()`.
        flops: operations of the program.
        weight_bytes: bytes of its weights, which every run reads.
        eager: seconds of the program in eager mode.
        ours: seconds of the fast one.
    """
    work = {name: amount for name, (_, amount) in kernels().items()}
    rates = {name: work[name] / time for name, time in seconds.items()}
    read = rates.pop("read")
    best = max(rates, key=lambda name: rates[name])
    peak = rates[best]
    return (
        f"  peak of this thread, f32: {peak / 1e9:.0f} GFLOP/s ({best}); eager reaches "
        f"{flops / eager / 1e9:.0f}, this {flops / ours / 1e9:.0f} "
        f"({flops / ours / peak:.0%} of the peak) and reads {weight_bytes / 1e6:.0f} MB of "
        f"weights ({weight_bytes / read * 1e3:.1f} ms at {read / 1e9:.0f} GB/s of "
        f"{ours * 1e3:.1f} ms); at the peak the ratio would be {eager * peak / flops:.2f}x"
    )
