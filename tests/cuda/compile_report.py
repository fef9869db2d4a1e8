"""Compiles Hopper kernels with nvcc and reads the compiler's report: a kernel that spills registers,
uses local memory or whose WGMMA the compiler serialised is slow without being wrong, so no other test sees
it. Prints "ok NAME" or "FAIL NAME: why" for each kernel instance. Needs no GPU.

    python3 tests/cuda/compile_report.py [INSTANCE...]     e.g. bf16_128_128; default: all"""

import pathlib
import re
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
BUILD = TOP / "build" / "cuda-harness"


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


def main():
    script = TOP / "tests" / "cuda" / "build_harness.sh"
    done = subprocess.run(["sh", script, BUILD, *sys.argv[1:]], capture_output=True, text=True,
                          check=False)
    print(done.stdout)
    if done.returncode != 0:
        print(f"FAIL the kernels compile: {(done.stdout + done.stderr)[-2000:]}")
        sys.exit(1)
    failed = False
    logs = sorted((BUILD / "instances").glob("*.o.log"))
    wanted = set(sys.argv[1:]) or {log.name.removesuffix(".o.log") for log in logs}
    for log in logs:
        name = log.name.removesuffix(".o.log")
        if name not in wanted:
            continue
        wanted.discard(name)
        found = sorted(set(faults(log.read_text(encoding="utf-8", errors="replace"))))
        failed |= bool(found)
        print(f"FAIL {name}: {'; '.join(found)}" if found else f"ok {name}")
    for name in sorted(wanted):
        failed = True
        print(f"FAIL {name}: no report")
    sys.exit(failed)


if __name__ == "__main__":
    main()
