"""Random calls of attention() with every one of its arguments, and what float64 makes of them."""

import dataclasses

import numpy as np
import oracle
from hypothesis import strategies as st

bounds = st.one_of(st.none(), st.integers(0, 9))
EXTRAS = ("alibi_slopes", "bias", "mask", "sinks", "key_lengths")
ON_GPU = ("alibi_slopes", "sinks", "key_lengths")


@dataclasses.dataclass
class Case:
    arrays: dict  # q, k, v as float64 of the type's precision, [b, s, h, d] or [total, h, d]
    options: dict  # the rest, but for layout
    heads_first: bool
    sequences: list  # (rows, keys, number of the sequence) of each
    like_q: bool  # a bias is to be given in the type of q

    @property
    def layout(self):
        return "bhsd" if self.heads_first else "bshd"

    @property
    def varlen(self):
        return "cu_seqlens_q" in self.options

    def expected(self):
        """o and lse, in float64, [b, s_q, h, d] and [b, h, s_q]; varlen without b."""
        parts = [self._sequence(*sequence) for sequence in self.sequences]
        q, v = self.arrays["q"], self.arrays["v"]
        o = np.zeros((*q.shape[:-1], v.shape[-1]))
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0]), -np.inf)
        for (rows, _, number), (o_part, lse_part) in zip(self.sequences, parts):
            if self.varlen:
                o[rows], lse[:, rows] = o_part[0], lse_part[0]
            else:
                o[number], lse[number] = o_part[0], lse_part[0]
        return o, lse

    def _sequence(self, rows, keys, number):
        given = self.options
        q, k, v = (
            (x[None, part] if self.varlen else x[number : number + 1, part])
            for x, part in zip(self.arrays.values(), (rows, keys, keys))
        )
        len_q, len_k = q.shape[1], k.shape[1]

        def of_sequence(x):  # [b|1, h|1, s_q|1, s_k]
            x = x[min(number, x.shape[0] - 1)][None]
            return x[:, :, : len_q if x.shape[2] > 1 else 1, :len_k]

        rest = {name: of_sequence(given[name]) for name in ("bias", "mask") if name in given}
        if "alibi_slopes" in given:
            slopes = given["alibi_slopes"]
            rest["slopes"] = slopes[number] if slopes.ndim == 2 else slopes
        for name in ("causal", "window", "scale", "softcap", "sinks"):
            if name in given:
                rest[name] = given[name]
        if given.get("dropout_p"):
            rest["dropout"] = (given["dropout_p"], given["seed"])
        top_left = given.get("align") == "top-left"
        return oracle.attention(q, k, v, top_left=top_left, sequence=number, **rest)


@st.composite
def cases(draw, varlen=st.booleans(), round_to=lambda x: x, head_dims=st.integers(1, 20), on_gpu=False):
    """`round_to` rounds float64 to the type that the arrays will have. `on_gpu`: none of what the CUDA
    backend refuses."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    b, h_k, group = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    d_qk, d_v, h_q = draw(head_dims), draw(head_dims), h_k * group
    scales = st.floats(-2, 2, width=32, allow_subnormal=False)
    if on_gpu:  # scale / softcap must be a normal number there
        scales = scales.filter(lambda x: x == 0 or abs(x) > 2**-120)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(bounds, bounds))),
        "scale": draw(st.one_of(st.none(), scales)),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "align": draw(st.sampled_from(["bottom-right", "top-left"])),
    }
    if not on_gpu and draw(st.integers(0, 3)) == 0:
        options["dropout_p"] = draw(st.sampled_from([0.25, 0.5, 1.0]))
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    if draw(varlen):
        lengths = [rng.integers(0, n, b) for n in (12, 40)]
        most = [int(x.max(initial=0)) + int(rng.integers(0, 3)) for x in lengths]
        ends = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths]
        options |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_s_q": most[0], "max_s_k": most[1]}
        spare = rng.integers(0, 3, 2)
        first = [(int(end[-1]) + int(extra),) for end, extra in zip(ends, spare)]
        sequences = [(slice(*ends[0][n : n + 2]), slice(*ends[1][n : n + 2]), n) for n in range(b)]
    else:
        most = [draw(st.integers(0, 12)), draw(st.integers(0, 40))]
        first = [(b, s) for s in most]
        sequences = [(slice(None), slice(None), n) for n in range(b)]
    shapes = (*first[0], h_q, d_qk), (*first[1], h_k, d_qk), (*first[1], h_k, d_v)
    arrays = {name: round_to(rng.standard_normal(shape)) for name, shape in zip("qkv", shapes)}
    for name in draw(st.sets(st.sampled_from(ON_GPU if on_gpu else EXTRAS))):
        one = [draw(st.booleans()) for _ in range(3)]
        shape = [1 if o else n for o, n in zip(one, (b, h_q, most[0]))] + [most[1]]
        if name == "alibi_slopes":
            options[name] = rng.random((b, h_q) if one[0] and not on_gpu else h_q).astype(np.float32)
        elif name == "sinks":
            options[name] = rng.standard_normal(h_q).astype(np.float32)
        elif name == "bias":
            # Eighths, which every type holds: a bias may have the type of q.
            options[name] = (rng.integers(-16, 17, shape) / 8).astype(np.float32)
        elif name == "mask":
            options[name] = rng.random(shape) < 0.7
            if one[0]:  # any value but 0 is true
                options[name] = options[name] * rng.integers(1, 256, shape, np.uint8)
        elif "cu_seqlens_q" not in options:
            options[name] = rng.integers(0, most[1] + 1, b).astype(np.int32)
            sequences = [(slice(None), slice(options[name][n]), n) for n in range(b)]
    return Case(arrays, options, draw(st.booleans()), sequences, draw(st.booleans()))
