"""Checks of the program of a build with CUDA: what it asks of the system, that it works on the CPU where there is no
driver, and, where there is a Hopper GPU, on that. Prints "ok NAME", "FAIL NAME: why" or "skip NAME: why" for each.

    python3 tests/cuda/check_library.py PROGRAM     the command line tool of the build"""

import os
import pathlib
import re
import subprocess
import sys

PROGRAM = sys.argv[1]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # as if there were no GPU


DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "smollm2_layer15.safetensors"


def run(*arguments, env=HIDDEN):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=env, check=False)


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


def gpu():
    """The line of `info` about the first GPU, or why there is none that serves."""
    found = re.search(r"^GPU +(.*)$", run("info", env=os.environ).stdout, re.MULTILINE).group(1)
    return found, "compute capability 9.0" in found


def the_gpu_agrees_with_the_oracle():
    for problem in (["-s", "777", "--h-q", "6", "--h-k", "2", "-d", "128", "--type", "bf16", "--causal"],
                    [DATA, "--causal", "--rows", "20"]):
        done = run("verify", *map(str, problem), "--pass", "forward", "--device", "cuda", env=os.environ)
        if done.returncode != 0 or "cuda.forward" not in done.stdout:
            return done.stdout + done.stderr
    return None


failed = False
checks = [needs_no_cuda_libraries, works_on_the_cpu, info_says_why_there_is_no_gpu, a_gpu_is_refused,
          devices_that_do_not_parse]
if gpu()[1]:
    checks.append(the_gpu_agrees_with_the_oracle)
else:
    print(f"skip the gpu agrees with the oracle: {gpu()[0]}")
for check in checks:
    fault = check()
    failed |= bool(fault)
    name = check.__name__.replace("_", " ")
    print(f"FAIL {name}: {fault}" if fault else f"ok {name}")
sys.exit(failed)
