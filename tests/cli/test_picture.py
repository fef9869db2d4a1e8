"""abacist explain --svg and --html: the picture is well formed, self-contained, and says the truth."""

import re
import unittest
import xml.etree.ElementTree as ElementTree

import numpy as np

from tool import ToolTest, attention, random_qkv

SVG = "{http://www.w3.org/2000/svg}"


def texts(root):
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def visible_matrix(s_q, s_k, causal=False, left=10**9, right=10**9):
    i, j = np.indices((s_q, s_k))
    at = i + s_k - s_q
    return (j <= (at if causal else at + right)) & (j >= at - left) & (j <= at + right)


def count_tiles(visible, rows, keys):
    """Full, masked and skipped tiles, counted pair by pair; blocks start at a tile's first visible key."""
    full = masked = 0
    s_q, s_k = visible.shape
    tile_rows = range(0, s_q, rows)
    for first in tile_rows:
        tile = visible[first:first + rows]
        seen = np.flatnonzero(tile.any(axis=0))
        if seen.size == 0:
            continue
        for key in range(seen[0], seen[-1] + 1, keys):
            block = tile[:, key:min(key + keys, seen[-1] + 1)]
            full += bool(block.all())
            masked += not block.all()
    return full, masked, len(tile_rows) * -(-s_k // keys) - full - masked


class Picture(ToolTest):
    def draw(self, *arguments):
        self.assertEqual(self.succeed("explain", *arguments, "--svg", "p.svg"), "wrote p.svg\n")
        return ElementTree.fromstring((self.folder / "p.svg").read_text(encoding="utf-8"))

    def numbers(self, root, word):
        line = next(text for text in texts(root) if f"  {word}: " in text)
        return int(re.match(r"[\d,]+", line).group().replace(",", ""))

    def check_counts(self, *arguments, visible):
        root = self.draw(*arguments)
        rows, keys = map(int, re.search(r"A tile is (\d+) query rows .* by (\d+) keys", "\n".join(texts(root))).groups())
        counts = tuple(self.numbers(root, word) for word in ("full", "masked", "skipped"))
        self.assertEqual(counts, count_tiles(visible, rows, keys))
        return counts

    def test_tiles_are_counted_as_the_mask_says(self):
        full, masked, skipped = self.check_counts("-s", 1000, "--causal",
                                                  visible=visible_matrix(1000, 1000, causal=True))
        self.assertTrue(full > 0 and masked > 0 and skipped > 0)
        self.check_counts("--s-q", 500, "--s-k", 1300, "--window", "300,40",
                          visible=visible_matrix(500, 1300, left=300, right=40))
        self.check_counts("--s-q", 700, "--s-k", 300, "--causal",
                          visible=visible_matrix(700, 300, causal=True))
        self.check_counts("-s", 450, visible=visible_matrix(450, 450))

    def test_many_tiles_are_drawn_as_one_but_counted(self):
        root = self.draw("-s", 100000, "-d", 64, "--causal")
        self.assertIn("rows of tiles are drawn as one", "\n".join(texts(root)))
        total = sum(self.numbers(root, word) for word in ("full", "masked", "skipped"))
        self.assertGreater(total, 100000)
        self.assertLess((self.folder / "p.svg").stat().st_size, 200_000)

    def test_the_walk_ends_at_the_lse(self):
        q, k, v = random_qkv(3, s_q=40, s_k=60)
        self.save(q=q, k=k, v=v)
        i, j = np.indices((40, 60))
        visible = (j <= i + 20) & (j >= i + 20 - 30)
        _, lse = attention(q, k, v, visible, softcap=3.0)
        for row in (39, 0, 17):
            root = self.draw("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--causal", "--window", "30,0",
                             "--softcap", 3, "--row", row)
            line = next(text for text in texts(root) if text.startswith("LSE = "))
            self.assertAlmostEqual(float(re.search(r"= (-?[\d.]+);", line).group(1)), lse[0, 0, row], places=3)

    def test_rows_and_problems_without_keys(self):
        self.assertIn("It sees no key", "\n".join(texts(self.draw("--s-q", 9, "--s-k", 4, "--causal", "--row", 0))))
        for arguments in (["-s", 0], ["--s-k", 0], ["--heads", 0], ["--b", 0]):
            self.draw(*arguments)

    def test_nothing_is_fetched(self):
        said = self.succeed("explain", "-s", 300, "--causal", "--html", "p.html", "--svg", "p.svg")
        self.assertEqual(said, "wrote p.svg\nwrote p.html\n")
        for name in ("p.html", "p.svg"):
            text = (self.folder / name).read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
            self.assertNotRegex(text, r"https?:|<script|@import|<link|src=")
            self.assertIn("prefers-color-scheme: dark", text)
        page = (self.folder / "p.html").read_text(encoding="utf-8")
        self.assertIn("cpu.forward", page)
        self.assertIn("<svg", page)

    def test_bad_requests(self):
        self.refuse("explain", "-s", 10, "--row", 10, "--svg", "p.svg", mentions="--row is 10")
        self.refuse("explain", "-s", 10, "--row", -1, "--svg", "p.svg", mentions="--row")
        self.refuse("explain", "-s", 2**40, "--svg", "p.svg", mentions="too many tiles")
        self.refuse("explain", "-s", 10, "--svg", "missing/p.svg", mentions="missing/p.svg")
        self.refuse("explain", "-s", 10, "--svg", "p.svg", "--html", "missing/p.html", mentions="missing")
        self.refuse("explain", "-s", 10, "--row", 3, mentions="--row")
        q, k, v = random_qkv(1)
        self.save(q=q, k=k, v=v)
        self.refuse("explain", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--svg", "q.npy", mentions="q.npy")


if __name__ == "__main__":
    unittest.main()
