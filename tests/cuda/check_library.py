"""Checks of a build with CUDA that need no GPU: what the program asks of the system, and that it works on the
CPU where there is no driver. Prints "ok NAME" or "FAIL NAME: why" for each.

    python3 tests/cuda/check_library.py PROGRAM     the command line tool of the build"""

import os
import re
import subprocess
import sys

PROGRAM = sys.argv[1]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # as if there were no GPU


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=HIDDEN, check=False)


def needs_no_cuda_libraries():
    dynamic = subprocess.run(["readelf", "-d", PROGRAM], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic.stdout)
    wrong = [name for name in needed if re.match(r"lib(cuda|cudart|nv)", name)]
    return f"needs {', '.join(wrong)}" if wrong or not needed else None


def works_on_the_cpu():
    done = run("verify", "-s", "100", "--type", "bf16", "--pass", "forward")
    good = done.returncode == 0 and "cpu.forward" in done.stdout
    return None if good else done.stdout + done.stderr


def info_says_why_there_is_no_gpu():
    done = run("info")
    good = done.returncode == 0 and re.search(r"GPU +none: \w", done.stdout)
    return None if good else done.stdout + done.stderr


def a_gpu_is_refused():
    for command in (["explain"], ["attend", "--random", "--discard"], ["bench"],
                    ["verify", "--pass", "forward"]):
        done = run(*command, "-s", "64", "--type", "bf16", "--device", "cuda")
        if done.returncode != 2 or "cuda: " not in done.stderr:
            return f"{command}: {done.returncode} {done.stdout}{done.stderr}"
    return None


def devices_that_do_not_parse():
    for device in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cud"):
        done = run("explain", "--device", device)
        if done.returncode != 2 or "must be cpu, cuda or cuda:N" not in done.stderr:
            return f"{device}: {done.returncode} {done.stderr}"
    return None


failed = False
for check in (needs_no_cuda_libraries, works_on_the_cpu, info_says_why_there_is_no_gpu, a_gpu_is_refused,
              devices_that_do_not_parse):
    fault = check()
    failed |= bool(fault)
    name = check.__name__.replace("_", " ")
    print(f"FAIL {name}: {fault}" if fault else f"ok {name}")
sys.exit(failed)
