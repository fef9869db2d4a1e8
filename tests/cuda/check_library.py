"""Checks of the program of a build with CUDA: what it asks of the system, that it works on the CPU where there is no
driver, and, where there is a Hopper GPU, on that. Prints "ok NAME", "FAIL NAME: why" or "skip NAME: why" for each.

    python3 tests/cuda/check_library.py PROGRAM     the command line tool of the build"""

import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

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


# A problem for each kernel, and the end of that kernel's name.
HEADS = ["--h-q", "6", "--h-k", "2", "-d", "128", "--type", "bf16", "--causal"]
KERNELS = {"d128x128": ["-s", "777", *HEADS], "d128x128.packed": ["-s", "3", "--s-k", "300", *HEADS],
           "d128x128.short": ["--b", "9", "-s", "40", *HEADS],
           "d128x128.packed.split": ["-s", "3", "--s-k", "4000", *HEADS],
           "d128x128.score": ["-s", "300", *HEADS, "--alibi", "auto", "--sinks", "random", "--softcap", "9"]}


def on_gpu(*arguments):
    return run(*map(str, arguments), "--device", "cuda", env=os.environ)


def the_gpu_agrees_with_the_oracle():
    problems = {**KERNELS, "d64x64": [DATA, "--causal", "--rows", "20"],
                "d64x64.short": ["--h-q", "4", "--h-k", "4", "-d", "64", "--type", "f16", "--b", "3", "-s", "60",
                                 "--key-lengths", "60,0,17", "--window", "9,inf"]}
    for kernel, problem in problems.items():
        done = on_gpu("verify", *problem, "--pass", "forward")
        if done.returncode != 0 or not re.search(rf"^cuda\.forward\.sm90\.\w+\.{kernel} ", done.stdout, re.MULTILINE):
            return done.stdout + done.stderr
    return None


def the_gpu_is_shown():
    done = run("info", env=os.environ)
    good = done.returncode == 0 and re.search(r"GPU +cuda:0 .*compute capability 9\.0", done.stdout)
    return None if good else done.stdout + done.stderr


def plans_name_the_kernel():
    for kernel, problem in KERNELS.items():
        done = on_gpu("explain", *problem)
        named = re.search(rf"^kernel +cuda\.forward\.sm90\.bf16\.{kernel}$", done.stdout, re.MULTILINE)
        if done.returncode != 0 or not named or "passed over  cpu: the tensors are on cuda:0" not in done.stdout:
            return done.stdout + done.stderr
    return None


def halves(path):
    """The numbers of a .npy file of f16."""
    content = path.read_bytes()
    begin = 10 + struct.unpack_from("<H", content, 8)[0]
    return struct.unpack(f"<{(len(content) - begin) // 2}e", content[begin:])


def results_are_those_of_the_cpu():
    """O of `attend`, read from its file."""
    with tempfile.TemporaryDirectory() as folder:
        for kernel, problem in KERNELS.items():
            problem = ["f16" if x == "bf16" else x for x in problem]
            found = []
            for device in ("cuda", "cpu"):
                path = pathlib.Path(folder) / f"{device}.npy"
                done = run("attend", "--random", *problem, "--device", device, "--out", path, env=os.environ)
                if done.returncode != 0 or not re.search(rf"^kernel +{device}\.forward", done.stdout, re.MULTILINE):
                    return done.stdout + done.stderr
                found.append(halves(path))
            worst = max(abs(a - b) for a, b in zip(*found, strict=True))
            if not worst < 4e-3:
                return f"{kernel}: O of the GPU is off that of the CPU by {worst}"
    return None


def the_benchmark_runs():
    heads = ["--h-q", "6", "--h-k", "2", "-d", "64,128", "--type", "bf16", "--seconds", "0.02", "--bursts", "3"]
    for sizes in (["-s", "512"], ["-s", "3", "--s-k", "777"], ["-s", "3", "--s-k", "4000"], ["-s", "40", "--b", "9"]):
        done = on_gpu("bench", *sizes, *heads, "--feature", "plain,alibi")
        rates = re.findall(r"^forward .* ([\d.]+) us +([\d.]+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or len(rates) != 8 or not all(float(x) > 0 for pair in rates for x in pair):
            return done.stdout + done.stderr
    return None


failed = False
checks = [needs_no_cuda_libraries, works_on_the_cpu, info_says_why_there_is_no_gpu, a_gpu_is_refused,
          devices_that_do_not_parse]
if gpu()[1]:
    checks += [the_gpu_is_shown, plans_name_the_kernel, the_gpu_agrees_with_the_oracle,
               results_are_those_of_the_cpu, the_benchmark_runs]
else:
    print(f"skip what needs a GPU: {gpu()[0]}")
for check in checks:
    fault = check()
    failed |= bool(fault)
    name = check.__name__.replace("_", " ")
    print(f"FAIL {name}: {fault}" if fault else f"ok {name}")
sys.exit(failed)
