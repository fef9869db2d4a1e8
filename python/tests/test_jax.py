"""attention() on JAX arrays: numpy's bits, in place, under jit, grad and vmap; refusals."""

import concurrent.futures
import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import cases  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import abacist  # noqa: E402

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX computes on another device here")


def arrays(seed, b, s_q, s_k, h_q, h_k, d_qk, d_v):
    rng = np.random.default_rng(seed)
    shapes = (b, s_q, h_q, d_qk), (b, s_k, h_k, d_qk), (b, s_k, h_k, d_v)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def split(case, dtype):
    """Arrays by name, and the rest of the arguments."""
    values = {n: x.astype(dtype) for n, x in case.arrays.items()}
    if case.heads_first:
        values = {n: np.ascontiguousarray(x.swapaxes(-2, -3)) for n, x in values.items()}
    given = values | case.options
    numbers = {n: x for n, x in given.items() if not isinstance(x, np.ndarray)} | {"layout": case.layout}
    return {n: x for n, x in given.items() if isinstance(x, np.ndarray)}, numbers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_eager_gives_the_bits_of_numpy(dtype, data):
    dtype = jnp.dtype(dtype)
    named, numbers = split(data.draw(cases.cases()), dtype)
    expected = abacist.attention(**named, **numbers, return_lse=True)
    found = abacist.attention(**jax.tree.map(jnp.asarray, named), **numbers, return_lse=True)
    for x, y in zip(found, expected):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype and x.shape == y.shape
        assert np.array_equal(np.asarray(x).view(np.uint8), y.view(np.uint8))


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_jit_gives_the_bits_of_numpy(data):
    named, numbers = split(data.draw(cases.cases()), np.float32)
    expected = abacist.attention(**named, **numbers, return_lse=True)
    found = jax.jit(lambda x: abacist.attention(**x, **numbers, return_lse=True))(named)
    for x, y in zip(found, expected):
        assert np.array_equal(np.asarray(x), y)


def test_memory_is_neither_copied_in_nor_out(monkeypatch):
    from abacist import _jax, _numpy

    q, k, v = arrays(1, 1, 64, 64, 2, 2, 64, 64)
    seen, forward = [], _numpy.forward

    def spy(*given):
        result = forward(*given)
        seen.extend(x.__array_interface__["data"][0] for x in (*given[:3], result[0]))
        return result

    monkeypatch.setattr(_jax._numpy, "forward", spy)
    o = abacist.attention(q, k, v)
    assert seen == [x.unsafe_buffer_pointer() for x in (q, k, v, o)]


def test_under_jit_memory_is_not_copied_either(monkeypatch):
    from abacist import _jax

    if not _jax._in_place:
        pytest.skip("this JAX has another FFI, or none")
    q, k, v = arrays(1, 1, 64, 64, 2, 2, 64, 64)
    seen, execute = [], _jax._execute
    monkeypatch.setattr(_jax, "_execute", lambda *x: (seen.extend(y.address for y in (*x[1], x[2][0])), execute(*x)))
    o = jax.jit(lambda *x: abacist.attention(*x))(q, k, v)
    assert seen == [x.unsafe_buffer_pointer() for x in (q, k, v, o)]


@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,)])
def test_the_callback_of_other_versions_of_jax(monkeypatch, wanted):
    from abacist import _jax

    q, k, v = arrays(9, 2, 9, 12, 4, 2, 8, 8)
    sinks, bias = jnp.ones(4), jnp.linspace(0, 1, 12)

    def loss(q, k, v):
        o, lse = abacist.attention(q, k, v, sinks=sinks, bias=bias, causal=True, return_lse=True)
        return jnp.sin(o).sum() + lse.sum()

    results = []
    for in_place in (_jax._in_place, False):
        monkeypatch.setattr(_jax, "_in_place", in_place)
        jax.clear_caches()
        results.append(jax.tree.leaves(jax.jit(jax.value_and_grad(loss, wanted))(q, k, v)))
    for x, y in zip(*results):
        assert np.array_equal(x, y)


def test_a_version_of_the_ffi_that_may_differ_is_not_used(monkeypatch, tmp_path):
    from abacist import _xla

    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert not _xla.serves()
    for version, serves in (((0, 3), True), ((0, 9), True), ((0, 2), False), ((1, 3), False)):
        header.write_text("#define XLA_FFI_API_MAJOR {}\n\n#define XLA_FFI_API_MINOR {}\n".format(*version))
        assert _xla.serves() is serves


def reference(q, k, v, bias, sinks):
    s = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / q.shape[-1] ** 0.5 + bias
    seen = jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2])
    s = jnp.where(seen, s, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
    lse = jax.scipy.special.logsumexp(jnp.concatenate([s, column], -1), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(s - lse[..., None]), jnp.repeat(v, 2, 2)), lse


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_gradients(wrap, through):
    inputs = arrays(2, 2, 9, 33, 4, 2, 8, 8)
    rng = np.random.default_rng(3)
    inputs += [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 4, 1, 33), (4,))]

    def loss(attention):
        def run(q, k, v, bias, sinks):
            o, lse = attention(q, k, v, bias, sinks)
            return (through != "lse") * jnp.sin(o).sum() + (through != "o") * jnp.cos(lse).sum()

        def only(q, k, v, bias, sinks):  # so that the other output has no gradient at all
            o, lse = attention(q, k, v, bias, sinks)
            return jnp.sin(o).sum() if through == "o" else jnp.cos(lse).sum()

        return run if through == "both" else only

    def ours(q, k, v, bias, sinks):
        return abacist.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)

    found = jax.grad(wrap(loss(ours)), range(5))(*inputs)
    for x, y in zip(found, jax.grad(loss(reference), range(5))(*inputs)):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * (1 + np.abs(y).max()))
    (only_k,) = jax.grad(wrap(loss(ours)), (1,))(*inputs)
    assert np.array_equal(only_k, found[1])


def test_vmap_with_gradients_is_each_alone():
    q, k, v = arrays(4, 3, 5, 7, 2, 2, 4, 4)

    def one(q, k, v):
        return jnp.sin(abacist.attention(q[None], k[None], v[None], causal=True)).sum()

    both = jax.vmap(jax.value_and_grad(one, (0, 1)), (0, 0, None))(q, k, v[0])
    for n in range(3):
        alone = jax.value_and_grad(one, (0, 1))(q[n], k[n], v[0])
        for x, y in zip(jax.tree.leaves(both), jax.tree.leaves(alone)):
            assert np.array_equal(x[n], y)


def test_large_arrays_between_other_operations():
    q, k, v = arrays(5, 1, 2000, 2000, 4, 4, 64, 64)
    f = jax.jit(lambda q, k, v: abacist.attention(q * 2, k, jnp.sin(v), causal=True) + 1)
    np.testing.assert_allclose(f(q, k, v), abacist.attention(q * 2, k, jnp.sin(v), causal=True) + 1, atol=1e-5)


def test_plan_of_arrays_and_of_what_is_traced():
    q, k, v = arrays(6, 1, 100, 100, 2, 2, 8, 8)
    assert abacist.plan(q, k, v, causal=True).visible_pairs == 2 * 100 * 101 // 2
    plans = []
    jax.eval_shape(lambda *x: plans.append(abacist.plan(*x, causal=True)), q, k, v)
    assert plans == [abacist.plan(q, k, v, causal=True)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("change, kind, text", [
    (dict(k=jnp.ones((1, 4, 3, 8))), ValueError, "k: "), (dict(k=jnp.ones((4, 2, 8))), ValueError, "k: has 3 axes"),
    (dict(mask=jnp.ones((4, 4))), TypeError, "mask: has type"), (dict(bias=[1.0]), TypeError, "bias: is a list"),
    (dict(q=jnp.ones((1, 4, 2, 8), jnp.int32)), TypeError, "q: has type"),
    (dict(dropout_p=0.5), ValueError, "seed: is missing"), (dict(window=(-1, 0)), ValueError, "window: left is -1"),
    (dict(scale=jnp.ones(())), TypeError, "scale: is "), (dict(scale=1e-200), NotImplementedError, "scale"),
])  # fmt: skip
def test_errors_name_the_argument(traced, change, kind, text):
    given = dict(zip("qkv", arrays(7, 1, 4, 4, 2, 2, 8, 8))) | change
    v = given.pop("v")
    with pytest.raises(kind, match=text):
        f = (lambda v: abacist.attention(v=v, **given))
        (jax.jit(f) if traced else f)(v)


def test_threads_may_run_compiled_calls_at_once():
    run = jax.jit(lambda q, k, v: abacist.attention(q, k, v, causal=True))
    inputs = [arrays(n, 1, 40, 40, 2, 2, 8, 8) for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: run(*x), inputs))
    for x, found in zip(inputs, together):
        assert np.array_equal(found, abacist.attention(*x, causal=True))


def test_bad_data_under_jit_is_named():
    q = jnp.ones((7, 2, 8))
    run = jax.jit(lambda q, cu: abacist.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_s_q=4, max_s_k=4))
    with pytest.raises(Exception, match="cu_seqlens_q"):
        run(q, jnp.array([0, 5, 3], jnp.int32)).block_until_ready()


def test_what_cannot_be_differentiated_is_refused():
    q, k, v = arrays(8, 1, 4, 4, 2, 2, 8, 8)
    slopes = jnp.ones(2)
    with pytest.raises(NotImplementedError, match="alibi_slopes: requires a gradient"):
        jax.grad(lambda s: abacist.attention(q, k, v, alibi_slopes=s).sum())(slopes)
    jax.grad(lambda q: abacist.attention(q, k, v, alibi_slopes=slopes).sum())(q)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: abacist.attention(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        jax.grad(lambda q: jax.grad(lambda q: abacist.attention(q, k, v).sum())(q).sum())(q)


def test_what_cannot_be_read_is_named():
    q, k, v = arrays(1, 1, 4, 4, 2, 2, 8, 8)
    gone = k + 0
    gone.delete()
    with pytest.raises(ValueError, match="^k: was deleted or donated"):
        abacist.attention(q, gone, v)
    with pytest.raises(TypeError, match="^q: "):
        abacist.attention(jax.random.key(0), k, v)
    with pytest.raises(TypeError, match="^bias: "):
        abacist.attention(q, k, v, bias=jax.random.key(0))
    export = pytest.importorskip("jax.export", reason="this JAX has no export")
    shape = export.symbolic_shape("b, s, 2, 8")
    with pytest.raises(NotImplementedError, match="^q: has shape .* sizes must be numbers"):
        jax.eval_shape(lambda x: abacist.attention(x, x, x), jax.ShapeDtypeStruct(shape, jnp.float32))


def test_the_result_is_where_q_is():
    code = """
import jax, numpy as np, abacist
x = jax.device_put(np.ones((1, 4, 2, 8), np.float32), jax.devices()[1])
o, lse = abacist.attention(x, x, x, return_lse=True)
assert o.devices() == lse.devices() == jax.jit(abacist.attention)(x, x, x).devices() == {jax.devices()[1]}
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **flags})
