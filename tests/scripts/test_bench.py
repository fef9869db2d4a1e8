"""The benchmark's arithmetic and its results file; no contender runs."""

import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import tempfile
import types
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import cpu  # noqa: E402
import features  # noqa: E402


def run_of(machine, commit, target="avx512", **cell):
    row = {"pass": "fwd", "dtype": "f32", "d_qk": 64, "d_v": 64, "causal": False, "s": 1024} | cell
    return {"date": "2000-01-01", "commit": commit, "machine": {"cpu": machine, "threads": 2},
            "versions": {"abacist_target": target}, "rows": [row]}


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


    def test_windows_and_decode_steps(self):
        # Windows of one key to the left: 1 + 2 + 2 pairs; two queries of three keys: 2 + 2.
        window = cpu.Problem("fwd", "f32", 8, 3, True, 2, "window=1")
        self.assertEqual(window.flops, 2 * 5 * 32)
        self.assertEqual(dataclasses.replace(window, causal=False).flops, 2 * 5 * 32)
        self.assertEqual(dataclasses.replace(window, s_q=2).flops, 2 * 4 * 32)
        self.assertEqual(dataclasses.replace(window, feature="window=9").flops, 2 * 6 * 32)
        self.assertEqual(cpu.Problem("fwd", "f32", 8, 3, True, 2, s_q=1).flops, 2 * 3 * 32)
        self.assertEqual(cpu.Problem("fwd", "f32", 8, 3, False, 2, "paged=16", 2).flops, 2 * 6 * 32)


class FakeContender:
    """So many seconds a run."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def burst(self, problem, seconds):
        self.asked.append((problem.feature, seconds))
        return self.seconds[problem.feature]

    def offers(self, problem):
        return problem.feature in self.seconds

    def copy_gbytes(self, _):
        return 50.0

    def peak_gflops(self):
        return 100.0

    def forget(self):
        pass


class Features(unittest.TestCase):
    def test_a_group(self):
        problems = [cpu.Problem("fwd", "f32", 8, 1000, False, 2, name, 1) for name in ("plain", "paged=16")]
        arguments = types.SimpleNamespace(rounds=3, seconds=0.25)
        abacist, peaks = FakeContender({"plain": 2e-6, "paged=16": 4e-6}), []
        cells = features.measure_group(features.Group("decode", problems), cpu.Cell, abacist,
                                       FakeContender({"plain": 1e-6}), arguments, peaks)
        plain, paged = (cell.row(100.0) for cell in cells)
        self.assertEqual((plain["abacist"], plain["ratio"], plain["of_plain"]), (32.0, 0.5, 1.0))
        self.assertEqual((paged["abacist"], paged["torch"], paged["of_plain"]), (16.0, None, 0.5))
        # 2 s h d 4 bytes in 2 us, beside 50 GB/s.
        self.assertEqual((plain["kv"], plain["copy"], plain["of_copy"]), (64.0, 50.0, 1.28))
        # Of slow cells the ratios, too: 0.064 and 0.048 GFLOP/s are both printed as 0.1 or 0.0.
        slow = FakeContender({"plain": 1e-3, "paged=16": 4e-3 / 3})
        cells = features.measure_group(features.Group("decode", problems), cpu.Cell, slow, None, arguments, peaks)
        self.assertEqual(cells[1].row(100.0)["of_plain"], 0.75)
        self.assertEqual(abacist.asked.count(("plain", 0.25)), 6)
        self.assertEqual(peaks[:3], [100.0] * 3)

    def test_groups_start_with_the_plain_cell(self):
        for group in features.groups(cpu.Problem):
            self.assertEqual(group.problems[0].feature, "plain")
            self.assertEqual(len({(p.dtype, p.d, p.s, p.causal, p.heads, p.s_q) for p in group.problems}), 1)


class ToolThatIsMissing(unittest.TestCase):
    def refused(self, *arguments):
        said = io.StringIO()
        with self.assertRaises(SystemExit) as end, contextlib.redirect_stderr(said):
            cpu.main([*arguments, "--no-torch", "--no-save"])
        self.assertEqual(end.exception.code, 2)
        self.assertRegex(said.getvalue(), r"\Abench/cpu.py: error: [^\n]+\n\Z")
        return said.getvalue()

    def test_is_named_with_the_command_that_builds_it(self):
        with tempfile.TemporaryDirectory() as folder:
            missing = f"{folder}/build/release/cli/abacist"
            with unittest.mock.patch.object(cpu, "TOOL", missing):
                said = self.refused()
        self.assertIn(missing, said)
        self.assertIn("cmake --build --preset release --target abacist_cli", said)

    def test_of_a_given_name(self):
        said = self.refused("--abacist", "nowhere/abacist")
        self.assertIn("nowhere/abacist", said)
        self.assertNotIn("cmake", said)


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

    def test_other_instruction_sets_stay(self):
        saved = self.save(run_of("A", "1"), run_of("A", "2", target="avx2"))
        self.assertEqual(saved["versions"]["abacist_target"], "avx2")
        self.assertEqual([o["versions"]["abacist_target"] for o in saved["others"]], ["avx512"])

    def test_features_are_cells_of_their_own(self):
        saved = self.save(run_of("A", "1"), run_of("A", "1", feature="bias", group="forward", s_q=1024),
                          run_of("A", "1", feature="bias", group="forward", s_q=1024, abacist=5))
        self.assertEqual([row.get("feature") for row in saved["rows"]], ["bias", None])
        self.assertEqual(saved["rows"][0]["abacist"], 5)

    def test_other_cells_of_the_same_commit_stay(self):
        saved = self.save(run_of("A", "1", s=1024), run_of("A", "1", s=2048))
        self.assertEqual(sorted(row["s"] for row in saved["rows"]), [1024, 2048])

    def test_an_older_commit_goes(self):
        saved = self.save(run_of("A", "1", s=1024), run_of("A", "2", s=2048))
        self.assertEqual([row["s"] for row in saved["rows"]], [2048])
        self.assertNotIn("others", saved)


if __name__ == "__main__":
    unittest.main()
