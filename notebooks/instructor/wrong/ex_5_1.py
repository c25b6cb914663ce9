"""Plausible wrong answers to exercise 5.1; the sentence that each must show is in the registry."""

from fxlab.passes.quantize.observers import MinMaxObserver


class _Right:
    def __init__(self, quant_min=0, quant_max=255, symmetric=False):
        self.quant_min, self.quant_max, self.symmetric = quant_min, quant_max, symmetric
        self.low, self.high = float("inf"), float("-inf")

    def observe(self, x):
        self.low = min(self.low, float(x.min()))
        self.high = max(self.high, float(x.max()))

    def ends(self):
        return min(self.low, 0.0), max(self.high, 0.0)

    def steps(self):
        return self.quant_max - self.quant_min

    def whole(self, value):
        return round(value)

    def scale(self):
        low, high = self.ends()
        if self.symmetric:
            return max(-low, high) / self.quant_max or 1.0
        return (high - low) / self.steps() or 1.0

    def qparams(self):
        low, _ = self.ends()
        point = 0 if self.symmetric else self.whole(self.quant_min - low / self.scale())
        return self.scale(), point


class wrong_last_batch(_Right):
    """Keeps the range of the last batch."""

    def observe(self, x):
        self.low, self.high = float(x.min()), float(x.max())


class wrong_zero_outside(_Right):
    """Takes the range as it was seen, clamping the zero point to a code."""

    def ends(self):
        return self.low, self.high

    def whole(self, value):
        return min(max(round(value), self.quant_min), self.quant_max)


class wrong_counts_codes(_Right):
    """Divides by the number of codes."""

    def steps(self):
        return self.quant_max - self.quant_min + 1


class wrong_cuts_off(_Right):
    """Truncates the zero point."""

    def whole(self, value):
        return int(value)


class wrong_counts_from_0(_Right):
    """Forgets that the codes may begin below 0."""

    def qparams(self):
        low, _ = self.ends()
        return self.scale(), 0 if self.symmetric else round(-low / self.scale())


class wrong_divides_by_0(_Right):
    """Gives a range of no width the scale 0."""

    def qparams(self):
        low, high = self.ends()
        if low == high:
            return 0.0, self.quant_min if not self.symmetric else 0
        return super().qparams()


class wrong_width_if_symmetric(_Right):
    """Takes the width of the range for symmetric codes, too."""

    def scale(self):
        low, high = self.ends()
        return (high - low) / self.steps() or 1.0


class wrong_delegation:
    """Asks the kit's observer."""

    def __init__(self, quant_min=0, quant_max=255, symmetric=False):
        self.observer = MinMaxObserver(symmetric=symmetric, signed=quant_min < 0)

    def observe(self, x):
        self.observer(x)

    def qparams(self):
        q = self.observer.qparams()
        return q.scale, q.zero_point
