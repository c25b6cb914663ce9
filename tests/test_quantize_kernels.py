"""Claims about the int8 kernels: each agrees with plain integer arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxlab.passes.quantize import kernels
from fxlab.passes.quantize.kernels import Codes
from fxlab.passes.quantize.modules import Int8Add, Int8Cat, Int8Conv, Int8Linear, Table
from fxlab.passes.quantize.observers import QParams

ENGINES = [e for e in kernels.available_engines() if e != "reference"]


def random_codes(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def random_weight(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scale = torch.rand(shape[0], generator=generator) * 1e-2 + 1e-4
    return weight, scale, torch.randn(shape[0], generator=generator)


def differ(a, b):
    """The largest difference in codes, and the fraction of codes that differ."""
    gap = (a.int() - b.int()).abs()
    return int(gap.max()), float((gap > 0).double().mean())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("zero_point", [0, 37, 255])
@pytest.mark.parametrize("shape", [(1, 7, 5), (5, 64, 33), (70, 301, 130)])
def test_a_linear_kernel_equals_integer_arithmetic_but_for_ties(engine, relu, zero_point, shape):
    rows, width, out = shape
    weight, scale, bias = random_weight(out, width)
    layer = Int8Linear(weight, scale, bias, Codes(0.013, zero_point), Codes(0.4, 99), relu)
    x = random_codes(rows, width)
    worst, fraction = differ(layer.run(x, engine), layer.run(x, "reference"))
    # The libraries multiply in float32, the reference in float64: ties may fall to either side.
    assert worst <= 1
    assert fraction < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_integer_sums_are_exact_bit_for_bit(engine):
    """Scales that are powers of two leave nothing to round, so that codes show the sums."""
    weight, _, _ = random_weight(16, 40)
    x = random_codes(9, 40) % 4
    layer = Int8Linear(weight % 3, torch.ones(16), None, Codes(1.0, 1), Codes(1.0, 128))
    assert torch.equal(layer.run(x, engine), layer.run(x, "reference"))


def test_the_float_output_of_a_linear_kernel_is_right_to_float32():
    weight, scale, bias = random_weight(50, 200)
    layer = Int8Linear(weight, scale, bias, Codes(0.02, 128), None)
    x = random_codes(20, 200)
    out = layer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, layer.run(x, "reference"), rtol=1e-5, atol=1e-4)


def test_products_that_would_overflow_16_bits_do_not():
    """Bytes times bytes, added in pairs in 16 bits, saturate on old kernels."""
    weight = torch.full((8, 64), 127, dtype=torch.int8)
    x = torch.full((3, 64), 255, dtype=torch.uint8)
    layer = Int8Linear(weight, torch.full((8,), 1.0), None, Codes(1.0, 0), Codes(16384.0, 0))
    for engine in ENGINES:
        assert torch.equal(layer.run(x, engine), layer.run(x, "reference"))


def geometry(stride, padding, dilation, groups=1):
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


CONVS = [
    ((2, 3, 17), (8, 3, 5), geometry((2,), (1,), (1,))),
    ((2, 8, 11, 13), (6, 8, 3, 3), geometry((1, 2), (1, 0), (1, 1))),
    ((1, 8, 12, 12), (8, 2, 3, 3), geometry((1, 1), (2, 2), (2, 2), 4)),
    ((1, 8, 9, 9), (8, 1, 3, 3), geometry((1, 1), (1, 1), (1, 1), 8)),
    ((1, 4, 6, 7, 5), (3, 4, 2, 3, 3), geometry((1,) * 3, (1,) * 3, (1,) * 3)),
]


@pytest.mark.parametrize(("shape", "kernel", "options"), CONVS)
@pytest.mark.parametrize("zero_point", [0, 60])
@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_equals_integer_arithmetic_but_for_ties(
    shape, kernel, options, zero_point, relu
):
    weight, scale, bias = random_weight(*kernel)
    layer = Int8Conv(weight, scale, bias, Codes(0.02, zero_point), Codes(0.3, 90), relu, **options)
    x = random_codes(*shape)
    worst, fraction = differ(layer(x), layer.run(x, "reference"))
    assert worst <= 1
    assert fraction < 2e-3


@pytest.mark.parametrize("relu", [False, True])
def test_a_fused_addition_equals_integer_arithmetic_and_leaves_its_input_alone(relu):
    weight, scale, bias = random_weight(16, 8, 3, 3)
    layer = Int8Conv(
        weight,
        scale,
        bias,
        Codes(0.02, 3),
        Codes(0.3, 90),
        relu,
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        other=Codes(0.1, 50),
    )
    x, other = random_codes(2, 8, 10, 10), random_codes(2, 16, 10, 10, seed=5)
    before = other.clone()
    worst, fraction = differ(layer(x, other), layer.run(x, "reference", other))
    assert worst <= 1
    assert fraction < 2e-3
    assert torch.equal(other, before)
    layer.output = None
    want = layer.run(x, "reference", other)
    torch.testing.assert_close(layer(x, other), want, rtol=1e-5, atol=1e-4)


def test_quantizing_gives_the_codes_of_the_formula():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    codes = Codes(0.0137, 93)
    q = QParams(torch.tensor(codes.scale), torch.tensor(codes.zero_point), 0, 255)
    assert torch.equal(kernels.quantize(x, codes), q.quantize(x))
    assert torch.equal(kernels.dequantize(kernels.quantize(x, codes), codes), q.fake_quantize(x))


@pytest.mark.parametrize("value", [1e30, -1e30, float("inf"), float("-inf")])
def test_values_beyond_the_range_saturate(value):
    out = kernels.quantize(torch.tensor([value]), Codes(0.1, 100))
    assert int(out) == (255 if value > 0 else 0)


@pytest.mark.parametrize("function", [F.selu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish])
def test_a_table_gives_exactly_what_computing_would(function):
    source, target = Codes(0.03, 120), Codes(0.02, 60)
    x = random_codes(33, 5)
    values = function(kernels.dequantize(x, source))
    assert torch.equal(Table.of("f", function, source, None)(x), values)
    assert torch.equal(Table.of("f", function, source, target)(x), kernels.quantize(values, target))


@pytest.mark.parametrize("size", [10, kernels.CHUNK * 5 + 3])
def test_looking_up_keeps_shape_and_memory_format(size):
    table = torch.randn(256)
    flat = random_codes(size)
    assert torch.equal(kernels.look_up(table, flat), table[flat.long()])
    x = random_codes(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    out = kernels.look_up(table, x)
    assert torch.equal(out, table[x.long()])
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(kernels.look_up(table, x[:, :, ::2]), table[x[:, :, ::2].long()])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shapes", [((4, 9), (4, 9)), ((4, 9), (1, 9))])
def test_an_addition_equals_integer_arithmetic_but_for_ties(relu, shapes):
    add = Int8Add(Codes(0.1, 20), Codes(0.23, 140), Codes(0.2, 90), relu)
    a, b = random_codes(*shapes[0]), random_codes(*shapes[1], seed=3)
    worst, _ = differ(add(a, b), kernels.add_reference(a, b, add))
    assert worst <= 1


def test_concatenation_brings_all_parts_to_one_scale():
    first, second = Codes(0.1, 20), Codes(0.2, 90)
    cat = Int8Cat([first, second], second, dim=1)
    a, b = random_codes(2, 3), random_codes(2, 4, seed=2)
    out = cat([a, b])
    assert torch.equal(out[:, 3:], b)
    assert torch.equal(out[:, :3], kernels.quantize(kernels.dequantize(a, first), second))


def test_the_engine_is_chosen_by_measuring_and_named():
    for few in (True, False):
        assert kernels.choose_engine(few) in kernels.available_engines()


@pytest.mark.parametrize("rows", [20, 70])
def test_a_layers_engine_is_measured_once_for_its_shape_and_no_other_weights_stay(rows):
    weight, scale, bias = random_weight(256, 160)
    x = random_codes(rows, 160)
    kernels._measured.cache_clear()
    layer = Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99))
    out = layer(x)
    (chosen,) = kernels._measured().values()
    assert set(layer.packed.by_engine) == {chosen}
    assert torch.equal(layer.run(x, chosen), out)
    other = next(e for e in ENGINES if e != chosen)
    for key in kernels._measured():
        kernels._measured()[key] = other  # what a second layer of this shape goes by
    second = Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99))
    second(x)
    assert set(second.packed.by_engine) == {other}
    kernels._measured.cache_clear()


def test_a_small_layer_runs_on_the_same_engine_for_any_rows_without_measuring():
    weight, scale, bias = random_weight(48, 80)
    kernels._measured.cache_clear()
    kernels.choose_engine.cache_clear()
    layer = Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99))
    for rows in (1, 20, 70):
        layer(random_codes(rows, 80))
    assert list(layer.packed.by_engine) == [kernels.engine_of(layer, 1)]
    assert not kernels._measured()
    assert kernels.choose_engine.cache_info().misses == 0


CHANGES = {
    "input": Codes(0.05, 7),
    "output": Codes(0.9, 12),
    "relu": True,
    "weight": random_weight(33, 64, seed=9)[0],
    "bias": None,
    "engine": "reference",
    "reads_float": True,
}


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_measuring_and_packing_at_the_first_call_are_hidden_from_whoever_counts(rows):
    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    weight, scale, bias = random_weight(256, 160)
    layer = Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99))
    x = random_codes(rows, 160)
    kernels._measured.cache_clear()
    kernels.choose_engine.cache_clear()
    counts = []
    for _ in range(2):
        seen = []
        with Counter():
            layer(x)
        counts.append(seen)
    assert counts[0] == counts[1]
    assert 0 < len(counts[0]) < 10
    kernels._measured.cache_clear()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_ran_goes_by_what_is_set_on_it_afterwards(name, engine):
    weight, scale, bias = random_weight(33, 64)
    x = random_codes(5, 64)

    def make():
        return Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99), engine=engine)

    layer, fresh = make(), make()
    layer(x)
    for one in (layer, fresh):
        setattr(one, name, CHANGES[name])
    given = x.float() if name == "reads_float" else x
    assert torch.equal(layer(given), fresh(given))


def test_scales_that_are_loaded_into_a_layer_that_ran_are_used():
    weight, scale, bias = random_weight(33, 64)
    x = random_codes(5, 64)
    layer = Int8Linear(weight, scale, bias, Codes(0.02, 3), Codes(0.4, 99))
    other = Int8Linear(weight.flip(0), scale * 2, bias, Codes(0.03, 5), Codes(0.5, 90))
    assert not torch.equal(layer(x), other(x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("output", [None, Codes(0.4, 99)])
@pytest.mark.parametrize("reads_float", [False, True])
def test_inputs_in_any_memory_layout_give_the_same(output, reads_float):
    weight, scale, bias = random_weight(33, 64)
    for engine in (*ENGINES, "reference"):
        layer = Int8Linear(weight, scale, bias, Codes(0.02, 3), output, engine=engine)
        layer.reads_float = reads_float
        x = torch.randn(64, 9) if reads_float else random_codes(64, 9)
        assert torch.equal(layer(x.t()), layer(x.t().contiguous()))
        assert torch.equal(layer(x.t().view(3, 3, 64)), layer(x.t()).view(3, 3, 33))


@pytest.mark.parametrize("quant_max", [255, 127])
@pytest.mark.parametrize("reads_float", [False, True])
def test_without_onednn_a_layer_from_codes_to_float_is_still_right(
    monkeypatch, quant_max, reads_float
):
    weight, scale, bias = random_weight(33, 64)
    layer = Int8Linear(weight, scale, bias, Codes(0.02, quant_max // 2, quant_max), None)
    layer.reads_float = reads_float
    x = torch.randn(5, 64) if reads_float else random_codes(5, 64) // 2
    want = layer(x)
    kernels.choose_engine.cache_clear()
    monkeypatch.setattr(kernels, "available_engines", lambda: ("fbgemm", "reference"))
    try:
        for engine in ("auto", "fbgemm"):
            layer.engine = engine
            torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-4)
    finally:
        kernels.choose_engine.cache_clear()


def test_a_convolution_packs_its_weights_for_the_size_of_the_images_and_keeps_two():
    weight, scale, bias = random_weight(8, 4, 3, 3)
    codes = Codes(0.02, 3), Codes(0.3, 90)
    layer = Int8Conv(weight, scale, bias, *codes, **geometry((1, 1), (1, 1), (1, 1)))
    for size in (9, 5, 9, 12):
        for images in (1, 3):
            x = random_codes(images, 4, size, size)
            assert differ(layer(x), layer.run(x, "reference"))[0] <= 1
    assert list(layer.packed.by_engine) == [(5, 5), (12, 12)]


def test_dequantizing_multiplies_exactly_as_the_formula_says_in_any_memory_layout():
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(256).to(torch.uint8)
    for _ in range(200):
        scale = float(torch.rand((), generator=generator) + 1e-6)
        codes = Codes(scale, int(torch.randint(0, 256, (), generator=generator)))
        assert torch.equal(kernels.dequantize(every.repeat(3), codes), codes.values().repeat(3))
    x = random_codes(2, 3, 4, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    for view in (x, last, x[:, :, ::2], x.permute(3, 1, 0, 2), x[:, :1].expand(2, 7, 4, 6)):
        assert torch.equal(kernels.dequantize(view, codes), codes.values()[view.long()])
    assert kernels.dequantize(last, codes).is_contiguous(memory_format=torch.channels_last)


def test_codes_of_weights_do_not_depend_on_the_rows_coded_at_a_time():
    weight = torch.randn(3000, 700)
    scale = weight.abs().amax(1) / 127
    codes = kernels.weight_codes(weight, scale, -127, 127)
    wanted = torch.round(weight * (1 / scale)[:, None]).clamp(-127, 127).to(torch.int8)
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("output", [None, Codes(0.4, 99)])
@pytest.mark.parametrize("quant_max", [255, 127])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_layer_that_quantizes_its_own_input_gives_what_two_steps_do(output, quant_max, rows):
    weight, scale, bias = random_weight(33, 64)
    source = Codes(0.02, quant_max // 2, quant_max)
    x = torch.randn(rows, 64)
    for engine in (*ENGINES, "reference"):
        layer = Int8Linear(weight, scale, bias, source, output, engine=engine)
        want = layer(kernels.quantize(x, source))
        layer.reads_float = True
        got = layer(x)
        if output is None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(got, want)
        assert torch.equal(layer(x.double()), got)
    with pytest.raises(RuntimeError):
        layer(torch.randn(rows, 63))
