"""The types that the package declares, by mypy: a user's code under --strict, and stubs against code."""

import os
import pathlib
import subprocess
import sys

import pytest

import abacist

pytest.importorskip("mypy", reason="mypy is not installed")
HERE = pathlib.Path(__file__).parent


def run(folder, *command):
    package = pathlib.Path(abacist.__file__).parents[1]
    # A package that is not installed is found where it lies.
    path = {} if package.name == "site-packages" else {"MYPYPATH": str(package)}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **path})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_users_code_under_strict(tmp_path):
    run(tmp_path, "mypy", "--strict", "--cache-dir", tmp_path, HERE / "typed_sample.py")


def test_stubs_are_what_runs(tmp_path):
    run(tmp_path, "mypy.stubtest", "abacist._attention", "--ignore-missing-stub")
