"""Who records or replaces torch's operators sees one for a call: make_fx, fake tensors, dispatch modes,
tensors with a dispatch of their own. What runs later is what ran in eager mode."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import abacist  # noqa: E402
from abacist.compat import _mask_window, flash_attn, sdpa  # noqa: E402
from abacist.compat import transformers as compat  # noqa: E402


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


POOL, TABLE, STARTS = torch.randn(3, 4, 2, 8), int32([[2, 1]]), int32([0, 6])
FUNCTIONS = {
    "attention": lambda q: abacist.attention(q, q, q, causal=True),
    "bias": lambda q: abacist.attention(q, q, q, bias=q[0, :, 0, :6], return_lse=True)[0],
    "sdpa": lambda q: sdpa(q, q, q, attn_mask=torch.ones(2, 2, dtype=torch.bool).tril()),
    "flash_attn": lambda q: flash_attn.flash_attn_func(q, q, q, window_size=(2, 0)),
    "cache": lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=4),
    "pages": lambda q: flash_attn.flash_attn_varlen_func(
        q[0], POOL, POOL, STARTS, STARTS, 6, 8, block_table=TABLE, window_size=(3, -1)),
}  # fmt: skip


def two():
    return torch.randn(2, 1, 6, 2, 8).unbind(0)


# The pool of the pages is a constant of their function, which a graph of fake tensors does not take.
MODES = [(name, mode) for name in FUNCTIONS for mode in ("real", "fake", "symbolic")
         if mode == "real" or name != "pages"]  # fmt: skip


@pytest.mark.parametrize("name, mode", MODES)
def test_make_fx(name, mode):
    first, other = two()
    graph = make_fx(FUNCTIONS[name], tracing_mode=mode)(first)
    assert torch.equal(graph(other), FUNCTIONS[name](other))


def test_make_fx_writes_the_caches_that_it_is_given():
    def step(q, k_cache, v_cache):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=1)

    first, other = two()
    caches = [list(torch.zeros(2, 1, 8, 2, 8).unbind(0)) for _ in range(3)]
    graph = make_fx(step)(first, *caches[0])
    assert torch.equal(graph(other, *caches[1]), step(other, *caches[2]))
    assert torch.equal(caches[1][0], caches[2][0]) and caches[1][0].any()


@pytest.mark.parametrize("record", [make_fx, None])
def test_the_window_of_a_mask_is_no_constant(record):
    """A mask that is given to what was recorded may show more."""

    def layer(q, mask):
        return compat._forward(torch.nn.Module(), q, q, q, mask)[0]

    q = torch.randn(1, 1, _mask_window.SMALLEST, 8)
    mask = torch.ones(1, 1, *2 * (q.shape[2],), dtype=torch.bool)
    recorded = (record(layer) if record else lambda *x: torch.jit.trace(layer, x))(q, mask.tril())
    assert torch.equal(recorded(q, mask), layer(q, mask))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fake_tensors(name):
    expected = FUNCTIONS[name](two()[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inside = FUNCTIONS[name](torch.randn(1, 6, 2, 8))
    outside = FUNCTIONS["attention"](mode.from_tensor(torch.randn(1, 6, 2, 8)))
    assert inside.fake_mode is mode is outside.fake_mode
    assert inside.shape == expected.shape and inside.dtype == expected.dtype


class Around(torch.Tensor):
    """A tensor around another one, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Around) else x, (args, kwargs or {}))
        return tree_map(lambda x: Around(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


def test_a_tensor_around_another():
    q, k = two()
    assert torch.equal(FUNCTIONS["attention"](Around(q)).inner, FUNCTIONS["attention"](q))
    assert torch.equal(abacist.attention(q, Around(k), k).inner, abacist.attention(q, k, k))
    with pytest.raises(NotImplementedError, match="^bias: has no memory of its own"):
        abacist.attention(q, k, k, bias=Around(torch.zeros(6, 6)))


def test_a_dispatch_mode_sees_one_operator():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    q = two()[0]
    x = q.numpy()
    with Seen():
        o, array = FUNCTIONS["attention"](q), FUNCTIONS["attention"](x)
    assert names == ["abacist.attention.default"]
    assert torch.equal(o, FUNCTIONS["attention"](q)) and np.array_equal(array, o)


def test_a_seed_is_drawn_where_nothing_is_recorded():
    from torch.utils.flop_counter import FlopCounterMode

    def dropped(q):
        return sdpa(q, q, q, dropout_p=0.5)

    q, results = two()[0], []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        torch.manual_seed(1)
        with mode:
            results.append(dropped(q))
    assert torch.equal(*results) and not torch.equal(results[0], dropped(q))
    for tracing in ("real", "fake", "symbolic"):
        with pytest.raises(NotImplementedError, match="^seed: must be given"):
            make_fx(dropped, tracing_mode=tracing)(q)
    with pytest.raises(NotImplementedError, match="^seed: must be given"), FakeTensorMode() as fake:
        dropped(fake.from_tensor(q))


def test_a_subclass_without_dispatch_is_a_tensor():
    class Mine(torch.Tensor):
        pass

    q = two()[0]
    for x in (q.as_subclass(Mine), torch.nn.Parameter(q)):
        assert torch.equal(FUNCTIONS["attention"](x), FUNCTIONS["attention"](q))


def test_numpy_arrays_in_a_compiled_function():
    """torch.compile takes them for tensors: the call runs between its graphs."""

    def run(x):
        return abacist.attention(x * 2, x, x, causal=True) + 1

    x = np.random.default_rng(1).standard_normal((1, 6, 2, 8)).astype(np.float32)
    expected = run(x)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        found = compiled(x)
        assert isinstance(found, np.ndarray) and np.array_equal(found, expected)
    with torch.no_grad():
        assert torch.jit.trace(lambda y: y + torch.from_numpy(run(x)), torch.zeros(1, 6, 2, 8)) is not None


def test_pages_in_one_graph():
    first, other = two()
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS["pages"], backend="aot_eager", fullgraph=True)
    for x in (first, other):
        assert torch.equal(compiled(x), FUNCTIONS["pages"](x))

    def with_lse(q, table, size):
        return flash_attn.flash_attn_varlen_func(q[0], POOL, POOL, STARTS, STARTS, size, 8, causal=True,
                                                 return_attn_probs=True, block_table=table)[:2]  # fmt: skip

    compiled = torch.compile(with_lse, backend="aot_eager", fullgraph=True, dynamic=True)
    for x, y in zip(compiled(first, TABLE, 6), with_lse(first, TABLE, 6)):
        assert torch.equal(x, y)


def test_opcheck_of_pages():
    from abacist.compat import _cache_ops  # noqa: F401: registers the operator

    score = (torch.rand(2), True, [3, -1], None, 2.0)
    torch.library.opcheck(torch.ops.abacist.read_pages, (
        torch.randn(6, 2, 8), POOL, POOL[..., :5], STARTS, STARTS, 6, 8, TABLE, *score))  # fmt: skip


def test_the_default_device_is_not_asked():
    q, cache = torch.randn(1, 3, 2, 8), torch.randn(2, 2, 9, 2, 8)
    rows, mask = int32([1]), torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    layer = torch.randn(1, 2, 300, 8)
    with torch.device("meta"):
        assert flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=5, cache_batch_idx=rows).is_cpu
        assert flash_attn.flash_attn_with_kvcache(q, *cache, cache_batch_idx=rows).is_cpu
        assert abacist.attention(q, q, q, dropout_p=0.5).is_cpu
        assert compat._forward(torch.nn.Module(), layer, layer, layer, mask)[0].is_cpu


def test_masks_of_meta_tensors():
    q = torch.ones(1, 2, 4, 8, device="meta")
    assert sdpa(q, q, q, attn_mask=torch.zeros(4, 4, device="meta")).shape == q.shape
