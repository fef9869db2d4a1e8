"""Times Abacist on the CPU beside PyTorch's scaled_dot_product_attention and the machine's FMA peak.

    python3 bench/cpu.py                       every cell, results into bench/results/cpu.json
    python3 bench/cpu.py --dtypes f32 --passes fwd --lengths 4096 --no-save
    python3 bench/cpu.py --cells features      bias, masks, sinks, dropout, decode (features.py): 2 minutes
    ABACIST_CPU_TARGET=avx2 ATEN_CPU_CAPABILITY=avx2 python3 bench/cpu.py      both with AVX2

One protocol for both: the same number of threads on the same cores, the same data layout, random normal
data, bursts in random order, never at the same time. A rate is the median over bursts of
floating point operations of the visible pairs a second: 4 d a pair forward, 10 d backward (the
backward pass alone). Each round times Abacist twice; the spread of one against the other is printed:
a difference inside it means nothing. The peak is the best of many short bursts of FMA instructions
alone, on the same threads, in the same run."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys

import contenders
import features
import machine

TOP = pathlib.Path(__file__).resolve().parent.parent
RESULTS = TOP / "bench" / "results" / "cpu.json"
TOOL = str(TOP / "build" / "release" / "cli" / "abacist")


@dataclasses.dataclass(frozen=True)
class Problem:
    direction: str  # fwd or bwd
    dtype: str
    d: int
    s: int
    causal: bool
    heads: int
    feature: str = "plain"  # as `abacist bench --feature` has it
    s_q: int = 0  # 0: s

    @property
    def queries(self):
        return self.s_q or self.s

    def value(self, name):
        """The number of a feature "name=number", or None."""
        word, _, number = self.feature.partition("=")
        return float(number) if word == name else None

    @property
    def flops(self):
        window = self.value("window")
        left = self.s if window is None else int(window)
        pairs = self.queries * self.s
        if self.causal or window is not None:
            lasts = range(self.s - self.queries, self.s)  # each query's last key; none before key 0
            pairs = sum(min(last, left) + 1 for last in lasts)
        return self.heads * pairs * self.d * (4 if self.direction == "fwd" else 10)


def heads_for(s, d, peak_gflops):
    """As many heads (a power of two, at most 16) as keep the slowest pass of a cell near half a
    second a run, at 40% of the peak."""
    one_head = Problem("bwd", "f32", d, s, False, 1).flops
    fitting = 0.5 * 0.4 * peak_gflops * 1e9 / one_head
    heads = 1
    while heads < 16 and 2 * heads <= fitting:
        heads *= 2
    return heads


@dataclasses.dataclass
class Cell:
    problem: Problem
    abacist: list = dataclasses.field(default_factory=list)  # GFLOP/s of each burst
    again: list = dataclasses.field(default_factory=list)
    torch: list = dataclasses.field(default_factory=list)

    def rate(self):
        return statistics.median(self.abacist + self.again)

    def row(self, peak):
        ours = self.rate()
        row = {
            "pass": self.problem.direction, "dtype": self.problem.dtype, "d_qk": self.problem.d,
            "d_v": self.problem.d, "heads": self.problem.heads, "causal": self.problem.causal,
            "s": self.problem.s, "s_q": self.problem.queries, "feature": self.problem.feature,
            "abacist": round(ours, 1), "torch": None, "ratio": None,
            "share_of_fma_peak": round(ours / peak, 3),
            "spread": round(abs(statistics.median(self.abacist) /
                                statistics.median(self.again) - 1), 3),
        }
        if self.torch:
            theirs = statistics.median(self.torch)
            row |= {"torch": round(theirs, 1), "ratio": round(ours / theirs, 2)}
        return row


HEADER = (f"{'pass':<5}{'dtype':<6}{'d':>4}{'s':>7}{'heads':>6} {'mask':<7}"
          f"{'abacist':>9}{'torch':>9}{'ratio':>7}{'of peak':>9}{'torch of peak':>15}{'A/A':>7}")


def print_row(row, peak):
    mask = "causal" if row["causal"] else "full"
    theirs = f"{row['torch']:>9.1f}{row['ratio']:>7.2f}" if row["torch"] else f"{'-':>9}{'-':>7}"
    share = f"{row['torch'] / peak:>15.1%}" if row["torch"] else f"{'-':>15}"
    print(f"{row['pass']:<5}{row['dtype']:<6}{row['d_qk']:>4}{row['s']:>7}{row['heads']:>6} "
          f"{mask:<7}{row['abacist']:>9.1f}{theirs}{row['share_of_fma_peak']:>9.1%}{share}"
          f"{row['spread']:>7.1%}", flush=True)


def measure(problem, abacist, torch, arguments, peaks):
    cell = Cell(problem)
    series = [(abacist, cell.abacist), (abacist, cell.again)]
    if torch:
        series.append((torch, cell.torch))
    for contender, _ in series[1:]:  # each once, untimed
        contender.burst(problem, 0)
    for _ in range(arguments.rounds):
        for contender, rates in random.sample(series, len(series)):
            rates.append(problem.flops / contender.burst(problem, arguments.seconds) / 1e9)
        peaks.append(abacist.peak_gflops())
    for contender in filter(None, (abacist, torch)):
        contender.forget()
    return cell


def problems(arguments, peak):
    for dtype in arguments.dtypes:
        for direction in arguments.passes:
            for d in arguments.dims:
                for s in arguments.lengths:
                    heads = arguments.heads or heads_for(s, d, peak)
                    for causal in arguments.causal:
                        yield Problem(direction, dtype, d, s, causal, heads)


def save(path, run):
    """Writes the run; runs of other machines and instruction sets stay, under "others", and so do this
    machine's rows of the same commit for other cells."""
    others = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for old in [before, *before.pop("others", [])]:
            if runs_on(old) != runs_on(run):
                others.append(old)
            elif old["commit"] == run["commit"] and old["machine"] == run["machine"]:
                measured = {cell_of(row) for row in run["rows"]}
                run["rows"] += [row for row in old["rows"] if cell_of(row) not in measured]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("  " + json.dumps(row) for row in run.pop("rows"))
    head = json.dumps(run, indent=1)[:-2]
    tail = f',\n "others": {json.dumps(others)}' if others else ""
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]{tail}\n}}\n', encoding="utf-8")


def runs_on(run):
    return run["machine"]["cpu"], run["versions"]["abacist_target"]


def cell_of(row):
    return (*(row[key] for key in ("pass", "dtype", "d_qk", "d_v", "causal", "s")),
            row.get("s_q", row["s"]), row.get("feature", "plain"), row.get("group", "grid"))


def commit(given):
    if given:
        return given
    def git(*command):
        done = subprocess.run(["git", *command], cwd=TOP, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    # Results of a run before this one are no change.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "") or "unknown"


def arguments_of(command_line):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    def words(text):
        return text.split(",")
    def numbers(text):
        return [int(word) for word in text.split(",")]
    def masks(text):
        return [{"full": False, "causal": True}[word] for word in text.split(",")]
    parser.add_argument("--abacist", default=TOOL,
                        help="the program (default: that of the release preset)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cells", type=words, default=["grid", "features"], metavar="grid,features",
                        help="all lengths without features, or features.py's (default: both)")
    parser.add_argument("--dtypes", type=words, default=list(contenders.DTYPES))
    parser.add_argument("--passes", type=words, default=["fwd", "bwd"])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--causal", type=masks, default=[False, True], metavar="full,causal")
    parser.add_argument("--heads", type=int, help="default: so that a run takes about half a second")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a burst, at least")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true", help="Abacist and the peak alone")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--commit", help="what to write as commit (a machine without git)")
    arguments = parser.parse_args(command_line)
    if unknown := set(arguments.cells) - {"grid", "features"}:
        parser.error(f"no cells {', '.join(sorted(unknown))}; there are grid and features")
    return arguments


def refuse_to_run_without(program):
    """One line and exit code 2 if the tool is not built."""
    if shutil.which(program):
        return
    how = ("build it by: cmake --preset release && cmake --build --preset release --target abacist_cli"
           if program == TOOL else "--abacist must name the program")
    print(f"bench/cpu.py: error: there is no program {program}; {how}", file=sys.stderr)
    sys.exit(2)


def main(command_line=None):
    arguments = arguments_of(command_line)
    refuse_to_run_without(arguments.abacist)
    cores = sorted(os.sched_getaffinity(0))[:arguments.threads]
    os.sched_setaffinity(0, cores)  # both contenders inherit it
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"warning: other work runs on this machine (load {load:.1f})", file=sys.stderr)
    abacist = contenders.Abacist(arguments.abacist, len(cores))
    torch = None if arguments.no_torch else contenders.Torch(len(cores))
    versions = {"abacist": abacist.version}
    if torch:
        versions |= {"torch": torch.version, "torch_capability": torch.capability}
    about = machine.describe(len(cores))
    print(f"{about['cpu']}, {len(cores)} threads, {' '.join(about['simd'])}; "
          + ", ".join(f"{name} {version}" for name, version in versions.items()))

    peaks = [abacist.peak_gflops() for _ in range(5)]
    print(f"FMA peak {max(peaks):.1f} GFLOP/s, clock {machine.clock_mhz() or 'not readable'}\n")
    cells = []
    if "grid" in arguments.cells:
        print(HEADER)
        for problem in problems(arguments, max(peaks)):
            cells.append(measure(problem, abacist, torch, arguments, peaks))
            print_row(cells[-1].row(max(peaks)), max(peaks))
    if "features" in arguments.cells:
        cells += features.measure(Problem, Cell, abacist, torch, arguments, peaks)
    versions["abacist_target"] = abacist.kernel.rsplit(".", 1)[-1]
    peak = max(peaks)  # the best of the whole run is what every row's share refers to
    print(f"\nFMA peak {peak:.1f} GFLOP/s (best of {len(peaks)} bursts, median "
          f"{statistics.median(peaks):.1f}), clock {machine.clock_mhz() or 'not readable'}")
    abacist.close()
    if not arguments.no_save:
        save(arguments.results, {
            "date": datetime.date.today().isoformat(), "commit": commit(arguments.commit),
            "machine": about, "fma_peak_gflops": round(peak, 1), "versions": versions,
            "units": "abacist and torch: GFLOP/s of visible pairs; kv and copy: GB/s, copy read plus written",
            "rows": [cell.row(peak) for cell in cells]})
        print(f"written to {arguments.results}")


if __name__ == "__main__":
    main()
