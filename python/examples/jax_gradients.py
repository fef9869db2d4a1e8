"""Attention of JAX arrays under jit and grad, beside attention written in jax.numpy. On the CPU.

    python jax_gradients.py
"""

import jax
import jax.numpy as jnp

import abacist

b, s, h_q, h_k, d = 2, 200, 4, 2, 32
keys = jax.random.split(jax.random.PRNGKey(1), 3)
q = jax.random.normal(keys[0], (b, s, h_q, d))
k, v = (jax.random.normal(key, (b, s, h_k, d)) for key in keys[1:])


def plain(q, k, v):
    """The formula, which writes the scores of all pairs."""
    k, v = (jnp.repeat(x, h_q // h_k, axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / d**0.5
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def exact(q, k, v):
    return abacist.attention(q, k, v, causal=True)


def loss_of(attention):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.square(attention(*x)).mean(), argnums=(0, 1, 2)))


(loss, gradients), (expected, others) = (loss_of(x)(q, k, v) for x in (exact, plain))
apart = max(float(jnp.abs(x - y).max()) for x, y in zip(gradients, others))
size = max(float(jnp.abs(x).max()) for x in others)
print(f"loss {loss:.6f} and {expected:.6f}; gradients differ by at most {apart:.1e} of {size:.1e}")
assert abs(loss - expected) < 1e-6 and apart < 1e-5 * size
