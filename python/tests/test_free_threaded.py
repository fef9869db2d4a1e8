"""Threads that run at once: all of it on free-threaded CPython (3.13t and newer), the first calls on any."""

import concurrent.futures
import subprocess
import sys
import sysconfig
import threading

import numpy as np
import oracle
import pytest

import abacist

FREE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
free_threaded = pytest.mark.skipif(not FREE, reason="this CPython has a GIL")
THREADS = 16


def together(work):
    """work(n) in so many threads that begin at the same moment; their results."""
    barrier = threading.Barrier(THREADS)

    def run(n):
        barrier.wait()
        return work(n)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


FIRST = """
import concurrent.futures, sys, threading
import numpy as np
{imports}
barrier = threading.Barrier(8)
q = {q}
def first(n):
    barrier.wait()
    import abacist
    o = abacist.attention(q, q, q, causal=n % 2 == 0)
    return abacist.plan(q, q, q).kernel, float(o.sum())
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    results = list(pool.map(first, range(8)))
assert len(set(results)) == 1 and results[0][1] == 64, results
assert getattr(sys, "_is_gil_enabled", lambda: True)() == {gil}, "the GIL"
"""


def first_calls(imports, q, gil):
    code = FIRST.format(imports=imports, q=q, gil=gil)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_calls_of_a_process_at_once():
    """Importing the package, too, and on free-threaded CPython with the GIL off all the time."""
    first_calls("", "np.ones((1, 4, 2, 8), np.float32)", not FREE)


def test_the_first_calls_with_torch_at_once():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # importing torch may have turned it on
    first_calls("import torch", "torch.ones(1, 4, 2, 8)", gil)
    assert torch.__version__


@free_threaded
def test_the_gil_is_off():
    assert not sys._is_gil_enabled()


@free_threaded
def test_numpy_calls_at_once():
    """Shapes and options that differ, more than the caches hold."""
    rng = np.random.default_rng(1)
    cases = []
    for n in range(300):
        shapes = (1, 1 + n % 37, 2, 8), (1, 40 + n % 3, 2, 8), (1, 40 + n % 3, 2, 8)
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        options = {"causal": n % 2 == 0, "scale": 0.1 + n / 1000}
        cases.append((arrays, options, oracle.attention(*arrays, **options)))

    def work(thread):
        for n in np.random.default_rng(thread).permutation(len(cases)):
            arrays, options, expected = cases[n]
            o, lse = abacist.attention(*arrays, **options, return_lse=True)
            np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-5)
            np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)
        return True

    assert all(together(work))


@free_threaded
def test_one_call_of_many_threads_and_their_errors():
    """The same arrays, hence the same entries of every cache; each thread finds its own error."""
    q = np.random.default_rng(2).standard_normal((1, 33, 2, 8)).astype(np.float32)
    expected, plan = abacist.attention(q, q, q, causal=True), str(abacist.plan(q, q, q, causal=True))

    def work(thread):
        for n in range(200):
            assert np.array_equal(abacist.attention(q, q, q, causal=True), expected)
            assert str(abacist.plan(q, q, q, causal=True)) == plan
            with pytest.raises(ValueError, match=f"softcap: is -{thread * 1000 + n + 1}[,.]"):
                abacist.attention(q, q, q, softcap=-float(thread * 1000 + n + 1))
            with pytest.raises(TypeError, match="^k: is a list"):
                abacist.attention(q, [thread], q)
        return True

    assert all(together(work))


@free_threaded
def test_torch_calls_at_once():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    leaves = [torch.randn(1, n % 30 + 1, 2, 8, requires_grad=True) for n in range(90)]

    def gradient(x, scale):
        o, lse = abacist.attention(x, x, x, causal=True, scale=scale, return_lse=True)
        return torch.autograd.grad(o.square().sum() + lse.sum(), x)[0]

    expected = [gradient(x, 0.1 + n / 100) for n, x in enumerate(leaves)]

    def work(thread):
        for n in np.random.default_rng(thread).permutation(len(leaves)):
            assert torch.equal(gradient(leaves[n], 0.1 + n / 100), expected[n])
        return True

    assert all(together(work))
