"""Checks of the installed headers: each stands alone, in every language that it is meant for; what
must not compile does not."""

import re

from support import C_WARNINGS, CC, CXX, CXX_WARNINGS, TOP, WORK, check, run, said_of

CASES = TOP / "tests" / "package" / "must_not_compile"
C_STANDARDS = ["c99", "c11", "c17"]
OLD_CXX_STANDARDS = ["c++11", "c++14", "c++17"]
TOO_OLD = "#error \"Abacist's C++ headers need C++20"


def compile_alone(compiler, language, standard, header, warnings, include):
    """A source with nothing but the header (and, for the pedantic, a declaration)."""
    source = WORK / "alone.txt"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("extern int declared;\n", encoding="utf-8")
    return (compiler, f"-std={standard}", *warnings, f"-I{include}", "-fsyntax-only", "-include", header,
            "-x", language, source)


def cxx_headers_stand_alone(compiler, include):
    for header in sorted(include.rglob("*.h*")):
        run(*compile_alone(compiler, "c++", "c++20", header, CXX_WARNINGS, include))


def c_headers_serve_every_language(c_compiler, cxx_compiler, include):
    for header in sorted(include.rglob("*.h")):
        for standard in C_STANDARDS:
            run(*compile_alone(c_compiler, "c", standard, header, C_WARNINGS, include))
        for standard in OLD_CXX_STANDARDS:
            run(*compile_alone(cxx_compiler, "c++", standard, header, CXX_WARNINGS, include))


def cxx_headers_refuse_old_standards(compiler, include):
    """One #error, then the end: no list of hundreds."""
    for header in sorted(include.rglob("*.hpp")):
        code, said = said_of(*compile_alone(compiler, "c++", "c++17", header, [], include))
        errors = re.findall(r"error: (.*)", said)
        good = (code != 0 and len(errors) == 2 and errors[0].startswith((TOO_OLD, TOO_OLD[len("#error "):]))
                and "C++20" in errors[1])
        if not good:
            return f"{header.name} said {errors[:5]}"
    return None


def must_not_compile(compiler, source, include):
    """The case compiles without MUST_NOT_COMPILE, and fails with it for the reason that it expects."""
    expected = re.match(r"// expects: (.*)", source.read_text(encoding="utf-8")).group(1)
    c = source.suffix == ".c"
    base = (compiler, "-std=c11" if c else "-std=c++20", *(C_WARNINGS if c else CXX_WARNINGS), f"-I{include}",
            "-fsyntax-only", source)
    run(*base, "-DMUST_NOT_COMPILE=0")
    code, said = said_of("env", "LC_ALL=C", *base, "-DMUST_NOT_COMPILE=1")
    if code == 0:
        return "compiled"
    errors = re.findall(r"error: (.*)", said)
    if not any(re.search(expected, error) for error in errors):
        return f"failed for another reason: {errors[:3]}"
    return None


def check_all(include, suffix="", cxx=CXX, cc=CC):
    check(f"headers stand alone{suffix}", lambda: cxx_headers_stand_alone(cxx, include))
    check(f"the C header in C99 to C++17{suffix}",
          lambda: c_headers_serve_every_language(cc, cxx, include))
    check(f"C++ headers refuse C++17 in one line{suffix}",
          lambda: cxx_headers_refuse_old_standards(cxx, include))
    for source in sorted(CASES.iterdir()):
        compiler = cc if source.suffix == ".c" else cxx
        check(f"must not compile: {source.name}{suffix}",
              lambda source=source, compiler=compiler: must_not_compile(compiler, source, include))
