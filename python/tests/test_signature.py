"""Every argument of attention() in random company: numpy against float64, torch against numpy bit for
bit, gradients against float64."""

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import abacist

TYPES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}


def numpy_type(name):
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16)


def strided(x, rng):
    """The same values where elements lie apart, some axes backwards."""
    steps = rng.integers(1, 3, x.ndim) * rng.choice([1, -1], x.ndim)
    wide = np.zeros([n * abs(int(s)) for n, s in zip(x.shape, steps)], x.dtype)
    view = wide[tuple(slice(None, None, int(s)) for s in steps)]
    view[...] = x
    return view


def call(case, dtype, convert, backend=None, **more):
    arrays = [x.astype(dtype) for x in case.arrays.values()]
    if case.heads_first:
        arrays = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in arrays]
    given = dict(case.options)
    if case.like_q and "bias" in given:
        given["bias"] = given["bias"].astype(dtype)
    options = {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    return abacist.attention(*map(convert, arrays), **options, layout=case.layout, backend=backend, **more)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), backend=st.sampled_from([None, "cpu", "reference"]), apart=st.booleans())
def test_numpy_against_float64(name, data, backend, apart):
    dtype = numpy_type(name)
    case = data.draw(cases.cases(round_to=lambda x: x.astype(dtype).astype(np.float64)))
    rng = np.random.default_rng(1)
    backend = "reference" if name == "float64" else backend
    o, lse = call(case, dtype, lambda x: strided(x, rng) if apart and x.dtype != np.int32 else x,
                  backend, return_lse=True)  # fmt: skip
    assert o.dtype == dtype and lse.dtype == (np.float64 if name == "float64" else np.float32)
    o_expected, lse_expected = case.expected()
    o = np.asarray(o.swapaxes(-2, -3) if case.heads_first else o, np.float64)
    tolerance = TYPES[name] * (1 + np.abs(o_expected).max(initial=0))
    np.testing.assert_allclose(o, o_expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, lse_expected, rtol=1e-5, atol=1e-5)
    alone = call(case, dtype, lambda x: x, backend)
    assert np.array_equal(alone, call(case, dtype, lambda x: x, backend, return_lse=True)[0])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), inference=st.booleans())
def test_torch_gives_the_bits_of_numpy(name, data, inference):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dtype = numpy_type(name)
    case = data.draw(cases.cases())

    def convert(x):
        if x.dtype == dtype and name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    expected = call(case, dtype, lambda x: x, return_lse=True)
    with torch.inference_mode(inference):
        found = call(case, dtype, convert, return_lse=True)
        alone = call(case, dtype, convert)
    assert str(found[0].dtype) == f"torch.{name}" and found[0].is_contiguous()
    assert torch.equal(found[0], convert(expected[0])) and torch.equal(found[1], convert(expected[1]))
    assert torch.equal(alone, found[0])


def torch_oracle(case, torch, leaves):
    """o and lse as a graph of float64 torch operations; dense cases."""
    import oracle

    given, (q, k, v) = case.options, (leaves[n] for n in "qkv")
    (b, s_q, h_q, d), s_k = q.shape, k.shape[1]
    group = h_q // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = d**-0.5 if given["scale"] is None else given["scale"]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if given["softcap"]:
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    factors, seen = np.ones(s.shape), np.zeros(s.shape, bool)
    for _, keys, n in case.sequences:
        length = s_k if keys.stop is None else int(keys.stop)
        pairs, distance = oracle.visible_pairs(
            s_q, length, given["causal"], given["window"], given["align"] == "top-left"
        )
        seen[n, :, :, :length] = pairs
        if "alibi_slopes" in given:
            slopes = np.broadcast_to(given["alibi_slopes"], (b, h_q))[n]
            s = s.clone()
            s[n, :, :, :length] -= torch.from_numpy(slopes[:, None, None] * distance)
    if "mask" in given:
        seen &= given["mask"].astype(bool)
    if "bias" in given:
        s = s + leaves["bias"]
    if given.get("dropout_p"):
        factors = oracle.dropout_factors(given["dropout_p"], given["seed"], 0, *s.shape)
    s = s.masked_fill(torch.from_numpy(~seen), -torch.inf)
    sinks = leaves.get("sinks", torch.full((h_q,), -torch.inf, dtype=torch.float64))
    s = torch.cat([s, sinks[None, :, None, None].expand(b, h_q, s_q, 1)], -1)
    # Rows that see nothing: neither -inf minus -inf nor its gradient.
    empty = torch.isneginf(s).all(-1)
    lse = torch.where(empty, -torch.inf, s.masked_fill(empty[..., None], 0.0).logsumexp(-1))
    p = (s - torch.where(empty, 0.0, lse)[..., None]).exp()[..., :s_k] * torch.from_numpy(factors)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.where(empty, 0.0, lse)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), backend=st.sampled_from([None, "reference"]),
       through=st.sampled_from(["o", "lse", "both"]), wanted=st.sets(st.sampled_from(["q", "k", "v", "bias", "sinks"])))  # fmt: skip
def test_gradients_against_float64(data, backend, through, wanted):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    case = data.draw(cases.cases(varlen=st.just(False)))
    dtype = torch.float32 if backend is None else torch.float64
    values = case.arrays | {n: case.options[n] for n in ("bias", "sinks") if n in case.options}
    wanted = sorted(wanted & values.keys()) or ["q"]
    leaves = {n: torch.from_numpy(x.astype(np.float32)).double().requires_grad_(n in wanted) for n, x in values.items()}
    types = {"sinks": torch.float32, "bias": dtype if case.like_q else torch.float32}
    ours = {n: x.detach().to(types.get(n, dtype)).requires_grad_(n in wanted) for n, x in leaves.items()}
    options = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in case.options.items()}
    options |= {n: ours[n] for n in ("bias", "sinks") if n in ours}
    inputs = [ours[n].transpose(1, 2) if case.heads_first else ours[n] for n in "qkv"]
    o, lse = abacist.attention(*inputs, **options, layout=case.layout, backend=backend, return_lse=True)
    if case.heads_first:
        o = o.transpose(1, 2)
    o_expected, lse_expected = torch_oracle(case, torch, leaves)
    lse = torch.where(torch.isneginf(lse), 0.0, lse)
    rng = np.random.default_rng(2)
    d_o, d_lse = (torch.from_numpy(rng.standard_normal(tuple(x.shape))) for x in (o, lse))
    keep = {"o": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[through]
    found = torch.autograd.grad(
        (o, lse)[keep], [ours[n] for n in wanted], (d_o.to(o.dtype), d_lse.to(lse.dtype))[keep]
    )
    # lse is no function of v, and without keys nothing is one of anything.
    pairs = list(zip((o_expected, lse_expected), (d_o, d_lse)))[keep]
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    expected = [None] * len(wanted)
    if pairs:
        expected = torch.autograd.grad([x for x, _ in pairs], [leaves[n] for n in wanted],
                                       [d for _, d in pairs], allow_unused=True)  # fmt: skip
    for name, x, y in zip(wanted, found, expected):
        y = torch.zeros_like(leaves[name]) if y is None else y
        assert x.shape == y.shape and x.dtype == ours[name].dtype
        most = float(y.abs().max()) if y.numel() else 0.0
        close = 2e-5 if backend is None else 1e-6  # gradients of bias and sinks are float32
        torch.testing.assert_close(x.double(), y, rtol=0, atol=close * (1 + most), msg=lambda m, n=name: f"d{n}: {m}")
