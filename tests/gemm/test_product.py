"""Products with per-tensor factors in one GEMM, against torch's own float32 and float64 products.

Sums of whole numbers are exact in any order, so their bits are compared; of others the order is the library's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hqsweep.formats.inputs import draw
from hqsweep.gemm.product import _multiply as multiply_into
from hqsweep.gemm.product import add_product, has_products, lie_of, product, takes

SHAPES = [(64, 48, 80), (33, 70, 77), (1, 5, 7), (9, 1, 24), (16, 16, 8192), (512, 256, 1024)]
FACTORS = [
    (None, None, 0.25),
    (0.3, None, 1.0),
    (None, 7.1, 1.0),
    (0.3, 7.1, 1 / 2688),
    (3.7, 0.013, 1 / (36 * 448**2)),
]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("shape", "stride", "lie"),
    [
        ((4, 6), (6, 1), (6, 0, False)),
        ((4, 6), (8, 1), (8, 0, False)),
        ((4, 6), (1, 4), (4, 0, True)),
        ((4, 6), (1, 9), (9, 0, True)),
        ((1, 6), (99, 1), (6, 0, False)),
        ((1, 6), (1, 5), (5, 0, True)),
        ((4, 1), (1, 1), (1, 0, False)),
        ((4, 1), (3, 7), (3, 0, False)),
        ((3, 4, 6), (24, 6, 1), (6, 24, False)),
        ((3, 4, 6), (0, 1, 4), (4, 0, True)),
        ((4, 6), (12, 2), None),
        ((4, 6), (0, 1), None),
        ((4, 6), (1, 0), None),
    ],
)
def test_how_matrices_lie(shape, stride, lie):
    assert lie_of(torch.empty_strided(shape, stride)) == lie


def test_a_cpu_has_no_such_products():
    a = torch.ones(4, 8, dtype=torch.bfloat16)
    assert not takes(a, a, torch.float32)


@pytest.mark.parametrize("head", [(), (3,)], ids=["one", "several"])
def test_products_of_traced_graphs_have_the_shapes_of_real_ones(head):
    with torch._subclasses.FakeTensorMode():
        a, b = (torch.empty(*head, rows, 16, dtype=torch.bfloat16, device="cuda") for rows in (4, 6))
        factor = torch.empty(1, 1, device="cuda")
        result = torch.ops.hqsweep.product(a, b, factor, None, 1.0, torch.float32)
    assert (result.shape, result.dtype, result.device.type) == ((*head, 4, 6), torch.float32, "cuda")


# ---- CUDA ------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


def whole_numbers(*shape, seed):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def on_gpu(factor):
    return None if factor is None else torch.full((1, 1), factor, device="cuda")


def alpha_of(factor_a, factor_b, constant):
    """In torch's float32 operators, on the CPU."""
    alpha = torch.tensor(1.0)
    for factor in (factor_a, factor_b, constant):
        alpha = alpha if factor is None else alpha * torch.tensor(factor)
    return alpha.cuda()


def lies(x):
    """The same matrix by rows, turned, and with gaps between its lines."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return x, x.mT.contiguous().mT, wide[..., : x.shape[-1]]


def exact_sum(a, b):
    return (a.double().cpu() @ b.double().cpu().mT).float().cuda()


@gpu
def test_the_library_is_there():
    assert has_products()


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_the_sum_is_scaled_in_float32_and_rounded_once(shape, factors):
    (m, n, k), (factor_a, factor_b, constant) = shape, factors
    a, b = whole_numbers(m, k, seed=0), whole_numbers(n, k, seed=1)
    scaled = exact_sum(a, b) * alpha_of(*factors)
    for dtype in DTYPES:
        for left in lies(a):
            for right in lies(b):
                result = product(left, right, on_gpu(factor_a), on_gpu(factor_b), constant, dtype)
                assert result.is_contiguous()
                assert torch.equal(result, scaled.to(dtype))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_products_share_their_factors(dtype):
    a, b = whole_numbers(5, 24, 80, seed=0), whole_numbers(5, 40, 80, seed=1)
    scaled = (exact_sum(a, b) * alpha_of(0.3, 7.1, 0.5)).to(dtype)
    for left in (*lies(a), a[:1].expand(5, -1, -1)):
        own = scaled if left.stride(0) else (exact_sum(left, b) * alpha_of(0.3, 7.1, 0.5)).to(dtype)
        for right in lies(b):
            assert torch.equal(product(left, right, on_gpu(0.3), on_gpu(7.1), 0.5, dtype), own)


@gpu
@pytest.mark.parametrize("shape", [(256, 128, 1024), (2048, 2304, 768), (768, 3072, 4096), (72, 40, 200)], ids=str)
def test_beside_the_float32_product_and_its_scaling(shape):
    """The bits of two passes, but for the order of sums, which matters where a sum is near a tie."""
    m, n, k = shape
    a, b = draw("normal", m, k, 1).cuda(), draw("normal", n, k, 2).cuda()
    factors = (0.3, 7.1, 1 / 2688)
    scaled = torch.mm(a, b.t(), out_dtype=torch.float32) * alpha_of(*factors)
    slack = scaled.abs().mean() * 1e-5
    low, high = ((scaled + d).bfloat16() for d in (-slack, slack))
    result = product(a, b, on_gpu(0.3), on_gpu(7.1), 1 / 2688, torch.bfloat16)
    assert ((low <= result) & (result <= high)).all()
    wide = product(a, b, on_gpu(0.3), on_gpu(7.1), 1 / 2688, torch.float32).double()
    exact = a.double() @ b.double().t() * alpha_of(*factors).double()
    assert (wide - exact).norm() / exact.norm() < max(2e-6, 2e-9 * k)


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_added_in_float32(shape):
    m, n, k = shape
    a, b = whole_numbers(m, k, seed=0), whole_numbers(n, k, seed=1)
    start = whole_numbers(m, n, seed=2).float()
    for left in lies(a):
        for right in lies(b):
            plain, scaled = start.clone(), start.clone()
            add_product(plain, left, right, None, None, 1.0)
            add_product(scaled, left, right, on_gpu(0.5), on_gpu(4.0), 0.25)
            assert torch.equal(plain, start + exact_sum(a, b))
            assert torch.equal(scaled, start + 0.5 * exact_sum(a, b))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_was_in_memory_before_is_not_read(shape, dtype):
    m, n, k = shape
    a, b = whole_numbers(m, k, seed=0), whole_numbers(n, k, seed=1)
    for factor in (on_gpu(0.5), None):
        out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        written = multiply_into(out, a, b, (factor, None), 1.0, False)
        expected = (exact_sum(a, b) * (0.5 if factor is not None else 1.0)).to(dtype)
        assert torch.equal(out, expected) if written else k % 8 or 1 in (m, n), "the library takes whole 16 bytes"


@gpu
def test_not_a_number_and_infinity_pass():
    a, b = whole_numbers(32, 64, seed=0), whole_numbers(16, 64, seed=1)
    assert product(a, b, on_gpu(torch.nan), None, 1.0, torch.bfloat16).isnan().all()
    a[3, 5], a[7, 9], b[:, 9] = torch.nan, torch.inf, 2.0
    result = product(a, b, on_gpu(0.5), on_gpu(2.0), 1.0, torch.bfloat16)
    assert result[3].isnan().all() and (result[7] == torch.inf).all()
    assert result[[i for i in range(32) if i not in (3, 7)]].isfinite().all()


@gpu
def test_two_calls_have_the_same_bits():
    a, b = draw("normal", 768, 8192, 1).cuda(), draw("normal", 768, 8192, 2).cuda()
    first, second = (product(a, b, on_gpu(0.3), None, 1.0, torch.float32) for _ in range(2))
    assert torch.equal(first, second)


@gpu
def test_threads_share_plans():
    a, b = whole_numbers(40, 56, seed=0), whole_numbers(24, 56, seed=1)
    expected = exact_sum(a, b) * 0.5
    with ThreadPoolExecutor(4) as pool:
        products = list(pool.map(lambda _: product(a, b, on_gpu(0.5), None, 1.0, torch.float32), range(64)))
    assert all(torch.equal(each, expected) for each in products)


@gpu
def test_a_cuda_graph_replays_on_new_matrices_and_factors():
    """Also where the capture is the first call of its shape: capture fails at a synchronisation."""
    a, b, factor = whole_numbers(88, 104, seed=0), whole_numbers(72, 104, seed=1), on_gpu(0.5)
    total = torch.zeros(88, 72, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = product(a, b, factor, None, 1.0, torch.bfloat16)
        add_product(total, a, b, factor, None, 1.0)
    a.copy_(whole_numbers(88, 104, seed=3))
    factor.fill_(0.25)
    graph.replay()
    expected = exact_sum(a, b) * 0.25
    assert torch.equal(result, expected.bfloat16())
    assert torch.equal(total, expected)


@gpu
def test_nothing_waits_for_the_device():
    a, b, factor = whole_numbers(64, 64, seed=0), whole_numbers(64, 64, seed=1), on_gpu(0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(a, b, factor, factor, 1.0, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_they_are_operators_of_traced_graphs():
    torch.compiler.reset()
    a, b, factor = whole_numbers(64, 64, seed=0), whole_numbers(32, 64, seed=1), on_gpu(0.5)
    options = (a, b, factor, None, 1.0, torch.bfloat16)
    torch.library.opcheck(torch.ops.hqsweep.product.default, options)
    torch.library.opcheck(torch.ops.hqsweep.add_product_.default, (torch.zeros(64, 32, device="cuda"), *options[:-1]))
    compiled = torch.compile(lambda a: product(a * 2, b, factor, None, 1.0, torch.bfloat16), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    assert torch.equal(compiled(a), product(a * 2, b, factor, None, 1.0, torch.bfloat16))


@gpu
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("a is torch.float32", {"a": torch.ones(4, 8)}),
        ("a is .*, not contiguous", {"a": torch.ones(4, 8, 2).bfloat16(), "gaps": True}),
        (r"a is .*\(4, 9\)", {"a": torch.ones(4, 9).bfloat16()}),
        (r"a is .*\(0, 8\)", {"a": torch.ones(0, 8).bfloat16()}),
        (r"a is .*\(2, 4, 8\)", {"a": torch.ones(2, 4, 8).bfloat16()}),
        (r"factor is torch.float32 \(2, 1\)", {"factor": torch.ones(2, 1)}),
        ("factor is torch.bfloat16", {"factor": torch.ones(1, 1).bfloat16()}),
        ("for torch.float16", {"dtype": torch.float16}),
    ],
)
def test_what_cannot_be_multiplied_is_refused(message, change):
    a = change.get("a", torch.ones(4, 8).bfloat16()).cuda()
    a = a[..., 0] if "gaps" in change else a
    b, factor = torch.ones(6, 8).bfloat16().cuda(), change.get("factor", torch.ones(1, 1)).cuda()
    with pytest.raises(ValueError, match=message):
        product(a, b, factor, None, 1.0, change.get("dtype", torch.float32))


@gpu
@pytest.mark.parametrize("out", [torch.ones(4, 6).bfloat16(), torch.ones(4, 7), torch.ones(6, 4).t()], ids=str)
def test_sums_go_to_float32_of_the_products_shape(out):
    a, b = (torch.ones(rows, 8).bfloat16().cuda() for rows in (4, 6))
    with pytest.raises(ValueError, match=r"out is .* float32 \(4, 6\), contiguous"):
        add_product(out.cuda(), a, b, None, None, 1.0)
