"""The benchmark's arithmetic and its results file; no contender runs."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import cpu  # noqa: E402


def run_of(machine, commit, **cell):
    row = {"pass": "fwd", "dtype": "f32", "d_qk": 64, "d_v": 64, "causal": False, "s": 1024} | cell
    return {"date": "2000-01-01", "commit": commit, "machine": {"cpu": machine, "threads": 2},
            "versions": {}, "rows": [row]}


class Flops(unittest.TestCase):
    def test_full_and_causal(self):
        # Two heads, three queries: 9 pairs a head, or 6 under a causal mask; 2 (d_qk + d_v) a pair.
        self.assertEqual(cpu.Problem("fwd", "f32", 8, 3, False, 2).flops, 2 * 9 * 32)
        self.assertEqual(cpu.Problem("fwd", "f32", 8, 3, True, 2).flops, 2 * 6 * 32)

    def test_backward_has_five_products(self):
        self.assertEqual(cpu.Problem("bwd", "f32", 8, 3, True, 2).flops, 2 * 6 * 80)

    def test_heads_keep_a_run_short(self):
        self.assertEqual(cpu.heads_for(8192, 128, 200), 1)
        self.assertEqual(cpu.heads_for(1024, 64, 200), 16)
        self.assertEqual(cpu.heads_for(4096, 64, 1000), 16)


class Row(unittest.TestCase):
    def test_medians(self):
        cell = cpu.Cell(cpu.Problem("fwd", "f32", 64, 1024, False, 4), abacist=[100.0, 120.0, 110.0],
                        again=[100.0, 110.0, 100.0], torch=[50.0, 60.0, 1.0])
        row = cell.row(200.0)
        self.assertEqual((row["abacist"], row["torch"], row["ratio"]), (105.0, 50.0, 2.1))
        self.assertEqual((row["share_of_fma_peak"], row["spread"]), (0.525, 0.1))


class Results(unittest.TestCase):
    def save(self, *runs):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "cpu.json"
            for run in runs:
                cpu.save(path, run)
            return json.loads(path.read_text(encoding="utf-8"))

    def test_other_machines_stay(self):
        saved = self.save(run_of("A", "1"), run_of("B", "1"), run_of("A", "2"))
        self.assertEqual((saved["machine"]["cpu"], saved["commit"]), ("A", "2"))
        self.assertEqual([o["machine"]["cpu"] for o in saved["others"]], ["B"])
        self.assertEqual(len(saved["rows"]), 1)

    def test_other_cells_of_the_same_commit_stay(self):
        saved = self.save(run_of("A", "1", s=1024), run_of("A", "1", s=2048))
        self.assertEqual(sorted(row["s"] for row in saved["rows"]), [1024, 2048])

    def test_an_older_commit_goes(self):
        saved = self.save(run_of("A", "1", s=1024), run_of("A", "2", s=2048))
        self.assertEqual([row["s"] for row in saved["rows"]], [2048])
        self.assertNotIn("others", saved)


if __name__ == "__main__":
    unittest.main()
