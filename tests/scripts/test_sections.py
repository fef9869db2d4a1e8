"""A test run that is ended takes what it has started along."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

# Runs one step whose grandchild writes its number to a file and would sleep on.
PROGRAM = """
import pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import sections
sections.LOGS = pathlib.Path(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
section = sections.Section("test", False)
section.step("sleep", ["sh", "-c", "sleep 300 & echo $! >" + sys.argv[2] + "/pid; wait"])
"""


def runs(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    return None


class Ending(unittest.TestCase):
    def end_by(self, number):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "pid"
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(SCRIPTS), folder], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            pid = int(wait_for(lambda: file.exists() and file.read_text(encoding="utf-8").strip()))
            self.assertTrue(runs(pid))
            process.send_signal(number)
            self.assertNotEqual(process.wait(20), 0)
            gone = wait_for(lambda: not runs(pid))
            if not gone:
                os.kill(pid, signal.SIGKILL)
            self.assertTrue(gone)

    def test_sigterm(self):
        self.end_by(signal.SIGTERM)

    def test_sigint(self):
        self.end_by(signal.SIGINT)


if __name__ == "__main__":
    unittest.main()
