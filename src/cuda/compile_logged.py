"""A compiler launcher: runs the command given and keeps what the compiler said, and its seconds, in
OBJECT.log beside the object. Prints one line, or everything if the command fails."""

import pathlib
import re
import subprocess
import sys
import time


def main():
    command = sys.argv[1:]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False)
    seconds = time.monotonic() - start
    if done.returncode != 0 or "-o" not in command:
        sys.stdout.write(done.stdout)
        sys.exit(done.returncode)
    target = pathlib.Path(command[command.index("-o") + 1])
    pathlib.Path(f"{target}.log").write_text(f"seconds {seconds:.1f}\n{done.stdout}",
                                             encoding="utf-8")
    registers = re.findall(r"Used (\d+) registers", done.stdout)
    told = f", {'/'.join(registers)} registers" if registers else ""
    print(f"{target.name}: {seconds:.1f} s{told}")


if __name__ == "__main__":
    main()
