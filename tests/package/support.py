"""What the package checks share: running commands, printing "ok NAME" or "FAIL NAME: why"."""

import os
import pathlib
import shutil
import subprocess

TOP = pathlib.Path(__file__).resolve().parents[2]
WORK = TOP / "build" / "package"
CXX = os.environ.get("CXX", "g++")
CC = os.environ.get("CC", "gcc")
CXX_WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wpedantic", "-Werror"]
C_WARNINGS = [*CXX_WARNINGS, "-Wstrict-prototypes"]

any_failed = False


class CommandFailed(Exception):
    pass


def run(*command, env=None, binary=False):
    done = subprocess.run([str(part) for part in command], cwd=TOP, capture_output=True, text=not binary,
                          env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def said_of(*command):
    """Exit code and everything that a command said that may fail."""
    done = subprocess.run([str(part) for part in command], cwd=TOP, capture_output=True, text=True,
                          check=False)
    return done.returncode, done.stdout + done.stderr


def check(name, body):
    """Runs a check: it fails by an exception or by returning text that says why."""
    global any_failed
    try:
        fault = body()
    except CommandFailed as error:
        fault = str(error)
    any_failed |= bool(fault)
    print(f"FAIL {name}: {fault}" if fault else f"ok {name}", flush=True)
    return not fault


def skip(name, reason):
    print(f"skip {name}: {reason}", flush=True)


def configure(source, folder, *options):
    launcher = shutil.which("ccache")
    if launcher:
        options = (*options, f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}")
    run("cmake", "-G", "Ninja", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *options)


def processors():
    return len(os.sched_getaffinity(0))
