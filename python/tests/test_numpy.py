"""attention() and plan() on numpy arrays, against float64."""

import base64
import concurrent.futures
import copy
import os
import pickle
import re
import subprocess
import sys
import time
import xml.etree.ElementTree

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import abacist

TOLERANCE = {np.float32: 2e-6, np.float16: 2e-3}


def arrays(seed, b, s_q, s_k, h_q, h_k, d_qk, d_v, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (b, s_q, h_q, d_qk), (b, s_k, h_k, d_qk), (b, s_k, h_k, d_v)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(result, expected, tolerance):
    (o, lse), (o_expected, lse_expected) = result, expected
    np.testing.assert_allclose(o, o_expected, rtol=0, atol=tolerance * (1 + np.abs(o_expected).max(initial=0)))
    np.testing.assert_allclose(lse, lse_expected, rtol=1e-5, atol=1e-5)


bounds = st.one_of(st.none(), st.integers(0, 12))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), b=st.integers(0, 3), s_q=st.integers(0, 20),
    s_k=st.integers(0, 70), h_k=st.integers(1, 2), group=st.integers(1, 3), d_qk=st.integers(1, 20),
    d_v=st.integers(1, 20), causal=st.booleans(), window=st.one_of(st.none(), st.tuples(bounds, bounds)),
    scale=st.one_of(st.none(), st.floats(-2, 2, width=32, allow_subnormal=False)), softcap=st.sampled_from([0.0, 3.0]),
    top_left=st.booleans(), extra=st.sets(st.sampled_from(["slopes", "bias", "mask", "sinks"])),
    heads_first=st.booleans(), dtype=st.sampled_from([np.float32, np.float16]),
)  # fmt: skip
def test_against_float64(seed, b, s_q, s_k, h_k, group, d_qk, d_v, causal, window, scale, softcap,
                         top_left, extra, heads_first, dtype):  # fmt: skip
    h_q = h_k * group
    q, k, v = arrays(seed, b, s_q, s_k, h_q, h_k, d_qk, d_v, dtype)
    rng = np.random.default_rng(seed + 1)
    values = {
        "slopes": rng.random(h_q).astype(np.float32),
        "bias": rng.standard_normal((h_q, s_q, s_k)).astype(np.float32),
        "mask": rng.random((b, 1, s_q, s_k)) < 0.7,
        "sinks": rng.standard_normal(h_q).astype(np.float32),
    }
    chosen = {name: values[name] for name in extra}
    options = dict(causal=causal, window=window, scale=scale, softcap=softcap)
    expected = oracle.attention(q, k, v, top_left=top_left, **options, **chosen)
    if "slopes" in chosen:
        chosen["alibi_slopes"] = chosen.pop("slopes")
    layout = "bshd"
    if heads_first:
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
        layout = "bhsd"
    o, lse = abacist.attention(
        q, k, v, **options, **chosen, layout=layout, return_lse=True,
        align="top-left" if top_left else "bottom-right",
    )  # fmt: skip
    assert o.dtype == dtype and lse.dtype == np.float32
    check((o.swapaxes(1, 2) if heads_first else o, lse), expected, TOLERANCE[dtype])


def test_strided_and_read_only_inputs_are_read_in_place():
    q, k, v = arrays(1, 2, 9, 14, 4, 4, 8, 8)
    wide = np.full((2, 28, 4, 8), np.nan, np.float32)
    wide[:, ::2] = k
    k_view, v_view = wide[:, ::2], v[:, ::-1, ::-1][:, ::-1, ::-1]
    q.setflags(write=False)
    check(abacist.attention(q, k_view, v_view, causal=True, return_lse=True),
          oracle.attention(q, k, v, causal=True), 2e-6)  # fmt: skip


def test_nothing_is_copied():
    """512 GB of keys that lie in 32 bytes; a query sees ten of them."""
    q, k = arrays(1, 1, 1, 1, 8, 1, 8, 8)[:2]
    many = np.broadcast_to(k, (1, 2**31, 8, 8))
    o = abacist.attention(q, many, many, key_lengths=np.array([10], np.int32))
    np.testing.assert_allclose(o, oracle.attention(q, many[:, :10], many[:, :10])[0], rtol=1e-5)


def test_varlen_is_each_sequence_alone_and_leaves_the_rest_empty():
    q, k, v = (x[0] for x in arrays(2, 1, 12, 20, 4, 2, 8, 8))
    cu_q, cu_k = np.array([0, 3, 3, 10], np.int32), np.array([0, 5, 9, 18], np.int32)
    o, lse = abacist.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                               max_s_q=7, max_s_k=9, return_lse=True)  # fmt: skip
    for n in range(3):
        rows, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        check((o[None, rows], lse[None, :, rows]),
              oracle.attention(q[None, rows], k[None, keys], v[None, keys], causal=True), 2e-6)  # fmt: skip
    assert (o[10:] == 0).all() and np.isneginf(lse[:, 10:]).all()


def test_key_lengths_hide_what_lies_behind():
    q, k, v = arrays(3, 2, 4, 10, 2, 2, 8, 8)
    k[1, 6:], v[1, 6:] = np.nan, np.nan
    result = abacist.attention(q, k, v, key_lengths=np.array([10, 6], np.int32), return_lse=True)
    for n, length in enumerate((10, 6)):
        check([x[n : n + 1] for x in result],
              oracle.attention(q[n : n + 1], k[n : n + 1, :length], v[n : n + 1, :length]), 2e-6)  # fmt: skip


def test_dropout_depends_on_the_seed_alone():
    q, k, v = arrays(4, 1, 16, 64, 2, 2, 8, 8)
    first = abacist.attention(q, k, v, dropout_p=0.5, seed=2**64 - 1)
    assert (first == abacist.attention(q, k, v, dropout_p=0.5, seed=2**64 - 1)).all()
    assert (first != abacist.attention(q, k, v, dropout_p=0.5, seed=8)).any()
    np.random.seed(5)
    drawn = [abacist.attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert (drawn[0] != drawn[1]).any()
    np.random.seed(5)
    assert (drawn[0] == abacist.attention(q, k, v, dropout_p=0.5)).all()
    assert (abacist.attention(q, k, v, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize(
    "change, kind, text",
    [
        (dict(window=(-1, 3)), ValueError, "window: left is -1"),
        (dict(window=(1,)), ValueError, "window: has 1 entries"),
        (dict(window=3), TypeError, "window: is 3"),
        (dict(softcap=-1.0), ValueError, "softcap: is -1"),
        (dict(scale="x"), TypeError, "scale: is 'x'"),
        (dict(dropout_p=1.5), ValueError, "dropout_p: is 1.5"),
        (dict(dropout_p=0.5, seed=-1), ValueError, "seed: is -1"),
        (dict(causal=2), TypeError, "causal: is 2"),
        (dict(causal=None), TypeError, "causal: is None"),
        (dict(deterministic="yes"), TypeError, "deterministic: is 'yes'"),
        (dict(softcap=True), TypeError, "softcap: is True"),
        (dict(scale=np.ones(1)), TypeError, "scale: is array"),
        (dict(align="middle"), ValueError, "align: is 'middle'"),
        (dict(layout="sbhd"), ValueError, "layout: is 'sbhd'"),
        (dict(backend="gpu"), ValueError, "backend: is 'gpu'"),
        (dict(max_s_q=3), ValueError, "cu_seqlens_q: is missing"),
        (dict(mask=np.ones((4, 4), np.float32)), TypeError, "mask: has type"),
        (dict(mask=np.ones((5, 4), bool)), ValueError, "mask: "),
        (dict(bias=[[1.0]]), TypeError, "bias: is a list"),
        (dict(sinks=np.ones(3, np.float32)), ValueError, "sinks: "),
        (dict(k=np.ones((1, 4, 3, 8), np.float32)), ValueError, "k: "),
        (dict(k=np.ones((4, 2, 8), np.float32)), ValueError, "k: has 3 axes"),
        (dict(v=np.ones((1, 4, 2, 8), np.int32)), TypeError, "v: has type"),
        (dict(q=np.ones((1, 4, 2, 8), ">f4")), TypeError, "q: has type >f4"),
        (dict(q=[1.0]), TypeError, "q: is a list"),
        (dict(q=np.ones((1, 4, 2, 8), np.float64)), TypeError, "k: has type float32, must be float64"),
        ({n: np.ones((1, 4, 2, 8), np.float64) for n in "qkv"}, NotImplementedError, "f64"),
    ],
)
def test_errors_name_the_argument(change, kind, text):
    arguments = dict(zip("qkv", arrays(5, 1, 4, 4, 2, 2, 8, 8)))
    with pytest.raises(kind, match=text.replace("[", r"\[")):
        abacist.attention(**{**arguments, **change})


def test_a_backend_that_is_not_there_is_refused():
    if abacist.has_backend("cuda"):
        pytest.skip("this build has the CUDA backend")
    q, k, v = arrays(5, 1, 4, 4, 2, 2, 8, 8)
    with pytest.raises(NotImplementedError, match="cuda"):
        abacist.attention(q, k, v, backend="cuda")


def test_plan_says_what_runs_and_why_not_another():
    q, k, v = arrays(6, 1, 100, 100, 2, 2, 8, 8)
    plan = abacist.plan(q, k, v, causal=True)
    assert plan.kernel.startswith("cpu.forward") and plan.visible_pairs == 2 * 100 * 101 // 2
    assert plan.kernel in str(plan) and plan.deterministic
    assert plan == abacist.plan(*(x.copy() for x in (q, k, v)), causal=True) != abacist.plan(q, k, v)
    assert abacist.plan(q, k, v, backward=True).kernel.startswith("cpu.backward")
    assert abacist.plan(q, k, v, backend="reference").kernel == "reference"
    with pytest.raises(NotImplementedError, match="cpu: scale is 1e-200"):
        abacist.plan(q, k, v, scale=1e-200)


def test_plans_are_copied_and_outlive_their_arrays():
    lengths = np.full(1, 90, np.int32)
    q, k, v = arrays(6, 1, 100, 100, 2, 2, 8, 8)
    plan = abacist.plan(q, k, v, causal=True, key_lengths=lengths)
    svg = abacist.show(plan).svg
    del q, k, v, lengths
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan and hash(other) == hash(plan) and abacist.show(other).svg == svg


def test_plan_is_of_the_call_that_runs_it():
    q, k, v = (x[0] for x in arrays(6, 1, 12, 20, 4, 2, 8, 8))
    cu_q, cu_k = np.array([0, 3, 12], np.int32), np.array([0, 5, 20], np.int32)
    varlen = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_s_q=9, max_s_k=15)
    plan = abacist.plan(q, k, v, **varlen)
    assert "cu_seqlens_q i32[3]" in str(plan)
    with pytest.raises(NotImplementedError, match="plan: is varlen"):
        abacist.show(plan)
    with pytest.raises(ValueError, match="window: left is -1"):
        abacist.plan(q, k, v, **varlen, window=(-1, 0))


def test_show_draws_the_tiles(tmp_path):
    q, k, v = arrays(6, 1, 1000, 1000, 2, 2, 8, 8)
    plan = abacist.plan(q, k, v, causal=True, backward=True)
    picture = abacist.show(plan)
    root = xml.etree.ElementTree.fromstring(picture.svg)
    text = " ".join(root.itertext())
    assert "1,000 queries, 1,000 keys" in text and "causal" in text and plan.kernel in text
    shapes = [x.get("class") for x in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert {"skipped", "masked", "full"} <= set(shapes)
    data = re.fullmatch(r'<img alt="[^"<>]*" src="data:image/svg\+xml;base64,([^"]*)">', picture._repr_html_(), re.S)
    assert base64.b64decode(data[1]).decode() == picture.svg
    picture.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture.svg
    assert repr(picture) == f"<abacist.Picture of {plan.kernel}: save(path) writes it as SVG>"
    with pytest.raises(TypeError, match="plan: is a str"):
        abacist.show(str(plan))


def test_neither_torch_nor_numpy_is_imported():
    code = "import sys, abacist; abacist.compat.sdpa; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                          text=True).stdout == "set()\n"  # fmt: skip


def test_the_gil_is_released():
    q, k, v = arrays(7, 1, 1500, 1500, 4, 4, 64, 64)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running, turns = pool.submit(abacist.attention, q, k, v, backend="reference"), 0
        while not running.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 5


def test_threads_may_call_at_once():
    """Shapes and options that differ, more than the caches hold, by threads that change places all the time."""
    cases = [(arrays(n, 1, 1 + n % 40, 40, 2, 2, 8, 8), dict(causal=n % 2 == 0, scale=0.1 + n / 1000)) for n in range(400)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda x: abacist.attention(*x[0], **x[1], return_lse=True), cases))
    finally:
        sys.setswitchinterval(interval)
    for (case, options), result in zip(cases, results):
        check(result, oracle.attention(*case, **options), 2e-6)


def test_no_memory_is_read_that_was_freed():
    """Python's debugging allocator overwrites what is freed."""
    code = ("import numpy as np, abacist; q = np.ones((1, 4, 2, 8), np.float32);"
            "print(abacist.attention(q, q, q, bias=np.ones((4, 4), np.float32), return_lse=True)[0].sum())")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONMALLOC": "debug"},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "64.0"), done.stderr


def test_an_error_is_that_of_its_thread():
    """The library keeps the last error for each thread."""
    q, k, v = arrays(1, 1, 4, 4, 2, 2, 8, 8)

    def fail(n):
        with pytest.raises(ValueError, match=f"softcap: is -{n + 1}[,.]"):
            abacist.attention(q, k, v, softcap=-float(n + 1))
        return n

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fail, range(200))) == list(range(200))
