"""Decoding over a paged cache of keys and values: prompts of different lengths, then tokens one by one.

    python paged_decoding.py [--steps 20]

Each sequence owns pages of a common pool, named by its row of the block table, and takes a new one
when the last is full. flash_attn_with_kvcache rotates q and k, appends k and v, and attends.
"""

import argparse

import torch

from abacist.compat.flash_attn import flash_attn_with_kvcache

PAGE, HEADS, KV_HEADS, D = 16, 8, 2, 64


class Pool:
    """Pages of keys and values, and which of them each sequence has."""

    def __init__(self, pages: int, sequences: int, most: int) -> None:
        self.k, self.v = torch.zeros(2, pages, PAGE, KV_HEADS, D).unbind(0)
        self.free = list(range(pages))
        self.table = torch.full((sequences, most), -1, dtype=torch.int32)  # -1: no page
        self.lengths = torch.zeros(sequences, dtype=torch.int32)

    def reserve(self, n: int, count: int) -> None:
        """Pages for `count` more keys of sequence n."""
        have = -(-int(self.lengths[n]) // PAGE)
        need = -(-(int(self.lengths[n]) + count) // PAGE)
        for page in range(have, need):
            self.table[n, page] = self.free.pop()

    def attend(self, rows: slice, q, k, v, rotary) -> torch.Tensor:
        """Appends k and v to the sequences `rows`, and attends with q: [b, s, h, d]."""
        for n in range(*rows.indices(len(self.lengths))):
            self.reserve(n, k.shape[1])
        o = flash_attn_with_kvcache(
            q, self.k, self.v, k, v, *rotary, cache_seqlens=self.lengths[rows],
            block_table=self.table[rows], causal=True,
        )  # fmt: skip
        self.lengths[rows] += k.shape[1]
        return o


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(1)
    prompts = [37, 5, 64]
    most = -(-(max(prompts) + steps) // PAGE)
    pool = Pool(most * len(prompts), len(prompts), most)
    angle = torch.outer(torch.arange(most * PAGE), 1e4 ** -torch.linspace(0, 1, D // 2 + 1)[:-1])
    rotary = angle.cos(), angle.sin()

    tokens = [torch.randn(p + steps, HEADS + 2 * KV_HEADS, D) for p in prompts]
    split = [HEADS, KV_HEADS, KV_HEADS]
    for n, prompt in enumerate(prompts):
        pool.attend(slice(n, n + 1), *tokens[n][None, :prompt].split(split, 2), rotary)
    for step in range(steps):  # all sequences together
        now = torch.stack([x[p + step] for x, p in zip(tokens, prompts)])[:, None]
        o = pool.attend(slice(None), *now.split(split, 2), rotary)

    print(f"lengths {pool.lengths.tolist()}, {len(pool.free)} of {len(pool.k)} pages are free")
    for n, x in enumerate(tokens):  # the last step again, all at once, on a dense cache
        caches = torch.zeros(2, 1, len(x), KV_HEADS, D).unbind(0)
        whole = flash_attn_with_kvcache(
            *x[None, :, :HEADS].split(HEADS, 2), *caches, *x[None, :, HEADS:].split(KV_HEADS, 2),
            *rotary, cache_seqlens=0, causal=True)  # fmt: skip
        torch.testing.assert_close(o[n, 0], whole[0, -1], rtol=1e-4, atol=1e-5)
    print("the last step is that of a dense cache")


if __name__ == "__main__":
    main()
