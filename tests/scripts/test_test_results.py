"""Counting must be honest: what fails, crashes, skips or never ran is never a pass."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import test_results  # noqa: E402

GTEST = """\
[ RUN      ] A.passes
[       OK ] A.passes (0 ms)
[ RUN      ] A.fails
file.cpp:3: Failure
[  FAILED  ] A.fails (1 ms)
[ RUN      ] A.skips
file.cpp:4: Skipped
no AVX-512 here
[  SKIPPED ] A.skips (0 ms)
[ RUN      ] Q/P.x/0
[  FAILED  ] Q/P.x/0, where GetParam() = 1 (0 ms)
[  PASSED  ] 1 test.
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] A.fails
[  FAILED  ] Q/P.x/0, where GetParam() = 1
"""


def junit(status, output="", message=None):
    skipped = f'<skipped message="{message}"/>' if message else ""
    return (f'<testsuite><testcase name="t" status="{status}">{skipped}'
            f"<system-out>{output}</system-out></testcase></testsuite>")


class Pytest(unittest.TestCase):
    def test_failures_errors_and_skips_are_no_passes(self):
        case = '<testcase classname="a" name="{}">{}</testcase>'
        results = test_results.from_pytest_junit("<testsuites><testsuite>" + "".join([
            case.format("p", ""), case.format("f", "<failure message='x'/>"),
            case.format("e", "<error message='x'/>"),
            case.format("s", "<skipped message='no torch'/>")]) + "</testsuite></testsuites>")
        self.assertEqual(results.passed, 1)
        self.assertEqual(results.failures, ["a.f", "a.e"])
        self.assertEqual(results.skips, ["a.s: no torch"])


class Gtest(unittest.TestCase):
    def test_each_case_counts_once(self):
        results = test_results.from_gtest(GTEST)
        self.assertEqual(results.passed, 1)
        self.assertEqual(results.failures, ["A.fails", "Q/P.x/0"])
        self.assertEqual(results.skips, ["A.skips: no AVX-512 here"])

    def test_a_crash_is_a_failure(self):
        results = test_results.from_gtest("[ RUN      ] A.b\nSegmentation fault\n")
        self.assertEqual(results.failures, ["A.b (did not end)"])


class Ctest(unittest.TestCase):
    def test_cases_of_a_program_count(self):
        results = test_results.from_ctest_junit(junit("fail", GTEST))
        self.assertEqual((results.passed, len(results.failures), len(results.skips)), (1, 2, 1))

    def test_other_programs_count_once(self):
        self.assertEqual(test_results.from_ctest_junit(junit("run")).passed, 1)
        self.assertEqual(test_results.from_ctest_junit(junit("fail")).failures, ["t"])

    def test_failure_after_passing_cases_is_a_failure(self):
        passed = "[ RUN      ] A.b\n[       OK ] A.b (0 ms)\nLeakSanitizer: detected\n"
        results = test_results.from_ctest_junit(junit("fail", passed))
        self.assertEqual((results.passed, results.failures), (1, ["t"]))

    def test_unittest_cases_count(self):
        results = test_results.from_ctest_junit(
            junit("fail", "ERROR: test_b (m.C.test_b)\nRan 4 tests in 0.1s\n\n"
                          "FAILED (errors=1, skipped=1)\n"))
        self.assertEqual((results.passed, len(results.failures), len(results.skips)), (2, 1, 1))

    def test_checks_of_a_program_count(self):
        checks = "ok a\nFAIL b: why\nskip c: because\n"
        results = test_results.from_ctest_junit(junit("fail", checks))
        self.assertEqual((results.passed, results.failures, results.skips),
                         (1, ["b: why"], ["c: because"]))
        crashed = test_results.from_ctest_junit(junit("fail", "ok a\nSegmentation fault\n"))
        self.assertEqual((crashed.passed, crashed.failures), (1, ["t"]))

    def test_a_program_that_was_not_built_is_a_failure(self):
        results = test_results.from_ctest_junit(
            junit("notrun", message="Unable to find executable"))
        self.assertEqual(len(results.failures), 1)

    def test_skips_give_their_reason(self):
        results = test_results.from_ctest_junit(
            junit("notrun", "no file", message="SKIP_RETURN_CODE=77"))
        self.assertEqual(results.skips, ["t: no file"])
        self.assertEqual(results.failures, [])


class Others(unittest.TestCase):
    def test_checks(self):
        results = test_results.from_checks("ok a\nnoise\nFAIL b: why\nskip c: because\n")
        self.assertEqual((results.passed, results.failures, results.skips),
                         (1, ["b: why"], ["c: because"]))

    def test_unittest(self):
        results = test_results.from_unittest(
            "test_a (m.C.test_a) ... ok\ntest_s (m.C.test_s) ... skipped 'slow'\n"
            "FAIL: test_b (m.C.test_b)\n"
            "Ran 3 tests in 0.1s\n\nFAILED (failures=1, skipped=1)\n")
        self.assertEqual(results.passed, 1)
        self.assertEqual(results.failures, ["test_b (m.C.test_b)"])
        self.assertEqual(results.skips, ["test_s (m.C.test_s): slow"])

    def test_nothing_ran(self):
        for read in (test_results.from_unittest, test_results.from_checks,
                     test_results.from_gtest):
            self.assertEqual(read("ImportError: no module\n").total, 0)


if __name__ == "__main__":
    unittest.main()
