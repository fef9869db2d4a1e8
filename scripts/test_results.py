"""Reads test counts out of what CTest, GoogleTest and unittest report. A test program counts with
every GoogleTest or unittest case that it ran, anything else as one test."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree


@dataclasses.dataclass
class Results:
    passed: int = 0
    failures: list = dataclasses.field(default_factory=list)  # names
    skips: list = dataclasses.field(default_factory=list)  # "name: reason"

    def add(self, other):
        self.passed += other.passed
        self.failures += other.failures
        self.skips += other.skips

    @property
    def total(self):
        return self.passed + len(self.failures) + len(self.skips)


# "(12 ms)" is on the line that ends a case, not on the summary's second mention of it.
CASE_START = re.compile(r"^\[ RUN      \] (\S+)")
CASE_END = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+).* \(\d+ ms\)$")


def from_gtest(output):
    """Counts of one run of a GoogleTest program, and whether a case began and never ended."""
    results = Results()
    running = None
    said = []
    for line in output.splitlines():
        if start := CASE_START.match(line):
            running, said = start.group(1), []
        elif end := CASE_END.match(line):
            verdict, name = end.groups()
            running = None
            if verdict == "OK":
                results.passed += 1
            elif verdict == "FAILED":
                results.failures.append(name)
            else:
                reason = " ".join(part.strip() for part in said
                                  if part.strip() and not part.endswith(": Skipped"))
                results.skips.append(f"{name}: {reason or 'no reason given'}")
        elif running:
            said.append(line)
    if running:
        results.failures.append(f"{running} (did not end)")
    return results


def from_ctest_junit(text):
    """Counts of one CTest run from its JUnit file (written with the whole output of every test)."""
    results = Results()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = case.get("name")
        status = case.get("status")
        output = case.findtext("system-out") or ""
        inner = from_gtest(output)
        if inner.total == 0:
            inner = from_unittest(output)
        if inner.total == 0:
            inner = from_checks(output)
        if status == "run" and inner.total > 0:
            results.add(inner)
        elif status == "run":
            results.passed += 1
        elif status == "fail":
            results.add(inner)
            if not inner.failures:  # crashed, timed out, or a program of another kind
                results.failures.append(name)
        elif inner.skips:
            results.add(inner)
        else:
            skipped = case.find("skipped")
            message = skipped.get("message") if skipped is not None else ""
            if status == "disabled" or (message or "").startswith("SKIP_"):
                said = output.strip().splitlines()
                results.skips.append(f"{name}: {said[-1] if said else status}")
            else:  # e.g. its program was not built
                results.failures.append(f"{name} ({message or status})")
    return results


# Our own check scripts: "ok NAME", "FAIL NAME", "skip NAME: REASON" at the start of a line.
CHECK = re.compile(r"^(ok|FAIL|skip) (.+)$")


def from_checks(output):
    results = Results()
    for line in output.splitlines():
        if not (match := CHECK.match(line)):
            continue
        verdict, rest = match.groups()
        if verdict == "ok":
            results.passed += 1
        elif verdict == "FAIL":
            results.failures.append(rest)
        else:
            results.skips.append(rest)
    return results


# "Ran 5 tests in 0.001s", then "OK", "OK (skipped=1)" or "FAILED (failures=1, errors=1, skipped=1)".
UNITTEST_RAN = re.compile(r"^Ran (\d+) tests?", re.MULTILINE)
UNITTEST_CASE = re.compile(r"^(FAIL|ERROR): (.+)$", re.MULTILINE)
UNITTEST_SKIP = re.compile(r"^(.+) \.\.\. skipped ['\"](.*)['\"]$", re.MULTILINE)
UNITTEST_SKIPPED = re.compile(r"^(?:OK|FAILED) \(.*skipped=(\d+)", re.MULTILINE)


def from_pytest_junit(text):
    """Counts of one pytest run from its --junitxml file."""
    results = Results()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            results.failures.append(name)
        elif skipped is not None:
            results.skips.append(f"{name}: {skipped.get('message') or 'no reason given'}")
        else:
            results.passed += 1
    return results


def from_unittest(output):
    """Counts of `python3 -m unittest`; with -v the reasons of skips, too."""
    ran = UNITTEST_RAN.search(output)
    if not ran:
        return Results()
    failures = [name for _, name in UNITTEST_CASE.findall(output)]
    skips = [f"{name}: {why}" for name, why in UNITTEST_SKIP.findall(output)]
    if (skipped := UNITTEST_SKIPPED.search(output)) and int(skipped.group(1)) > len(skips):
        skips += ["a unittest: no reason given"] * (int(skipped.group(1)) - len(skips))
    return Results(max(0, int(ran.group(1)) - len(failures) - len(skips)), failures, skips)
