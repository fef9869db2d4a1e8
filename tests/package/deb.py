"""The .deb under dpkg itself, in a root of its own beside the machine's: what it depends on is what this
machine has installed, its files are those that dpkg lists, and removing it leaves nothing."""

import os
import pathlib
import shutil

from support import WORK, run

ROOT = WORK / "deb"
STATUS = pathlib.Path("/var/lib/dpkg/status")


def dpkg(*arguments):
    # Neither the machine's log nor, without root, owners. The tools that dpkg looks for are there.
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    return run("dpkg", f"--root={ROOT}", f"--log={WORK / 'dpkg.log'}", "--force-not-root", *arguments,
               env={"PATH": path})


def files():
    """What lies in the root, but for dpkg's own database."""
    return {path for path in ROOT.rglob("*") if not path.is_dir() and ROOT / "var" not in path.parents}


def install(package):
    """Into a root that knows of the machine's packages, so that dependencies are looked up in earnest."""
    shutil.rmtree(ROOT, ignore_errors=True)
    database = ROOT / "var" / "lib" / "dpkg"
    for folder in ("info", "updates"):
        (database / folder).mkdir(parents=True)
    known, ours = [], "Package: abacist\n"
    for entry in STATUS.read_text(encoding="utf-8").split("\n\n"):
        if not entry.startswith(ours):
            known.append(entry)
    (database / "status").write_text("\n\n".join(known), encoding="utf-8")
    dpkg("--install", package)
    said = run("dpkg-query", f"--admindir={database}", "--show", "--showformat=${db:Status-Status}", "abacist")
    return None if said == "installed" else f"is {said}"


def lists_its_files():
    listed = {ROOT / line.lstrip("/") for line in dpkg("--listfiles", "abacist").splitlines()}
    listed = {path for path in listed if not path.is_dir()}
    if listed != files():
        return f"differ: {sorted(map(str, listed ^ files()))}"
    changed = dpkg("--verify", "abacist")
    return f"checksums differ: {changed}" if changed else None


def leaves_nothing():
    dpkg("--purge", "abacist")
    database = ROOT / "var" / "lib" / "dpkg"
    left = {path for path in ROOT.rglob("*") if database not in (path, *path.parents)} - set(database.parents)
    return f"left {sorted(map(str, left))}" if left else None
