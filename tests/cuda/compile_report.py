"""Reads the compiler's reports of the library's CUDA kernels: one that spills registers, uses local memory or
whose WGMMA the compiler serialised is slow without being wrong, so no other test sees it. Prints
"ok NAME: seconds, registers" or "FAIL NAME: why" for each kernel instance. Needs no GPU.

    python3 tests/cuda/compile_report.py [BUILD_FOLDER]     default: build/cuda, built before"""

import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
MOST_INSTANCES = 32
sys.path.insert(0, str(TOP / "src" / "cuda" / "sm90" / "forward"))
from generate_instances import all_instances  # noqa: E402 (its folder is on the path only now)


def faults(report):
    """What a report of `nvcc -Xptxas -v` says against a kernel."""
    for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report):
        if int(stores) or int(loads):
            yield f"spills {stores} bytes"
    for stack in re.findall(r"(\d+) bytes stack frame", report):
        if int(stack):
            yield f"keeps {stack} bytes in local memory"
    for note in re.findall(r"\bC75\d\d\b[^\n]*", report):  # serialised WGMMA, ignored setmaxnreg
        yield note.strip()
    if "Used " not in report:
        yield "the report names no kernel"


def check(name, path):
    """Seconds that the compiler took, and whether the report is a good one."""
    if not path.exists():
        print(f"FAIL {name}: no report, {path} is missing")
        return 0.0, False
    report = path.read_text(encoding="utf-8", errors="replace")
    seconds = float(re.match(r"seconds ([\d.]+)", report).group(1))
    found = sorted(set(faults(report)))
    registers = "/".join(re.findall(r"Used (\d+) registers", report))
    print(f"FAIL {name}: {'; '.join(found)}" if found
          else f"ok {name}: {seconds:.1f} s, {registers} registers")
    return seconds, not found


def main():
    build = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TOP / "build" / "cuda"
    objects = build / "src" / "CMakeFiles" / "abacist_objects.dir" / "cuda"
    names = all_instances()
    results = [check(name, objects / "generated" / "forward" / f"{name}.cu.o.log") for name in names]
    results.append(check("lengths", objects / "backend" / "lengths.cu.o.log"))
    results.append(check("merge", objects / "sm90" / "forward" / "merge.cu.o.log"))
    print(f"{len(names)} instances of the forward kernel, {sum(s for s, _ in results):.0f} s of compiling")
    few = len(names) <= MOST_INSTANCES
    print(f"{'ok' if few else 'FAIL'} at most {MOST_INSTANCES} instances")
    sys.exit(0 if few and all(good for _, good in results) else 1)


if __name__ == "__main__":
    main()
