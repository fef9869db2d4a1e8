"""Installs Abacist and uses it as a stranger would: through find_package, pkg-config and
add_subdirectory, static and shared, with README's example as the program. Checks what the shared
library exports and calls. Prints "ok NAME" or "FAIL NAME: why" for each check."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
WORK = TOP / "build" / "package"
EXAMPLE = WORK / "example.cpp"
SAYS = "o[0] = 0.1\n"  # what README's example prints
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wpedantic", "-Werror"]

failed = False


class CommandFailed(Exception):
    pass


def run(*command, env=None):
    done = subprocess.run([str(part) for part in command], cwd=TOP, capture_output=True, text=True,
                          env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(name, body):
    """Runs a check: it fails by an exception or by returning text that says why."""
    global failed
    try:
        fault = body()
    except CommandFailed as error:
        fault = str(error)
    failed |= bool(fault)
    print(f"FAIL {name}: {fault}" if fault else f"ok {name}", flush=True)
    return not fault


def configure(source, folder, *options):
    launcher = shutil.which("ccache")
    if launcher:
        options = (*options, f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}")
    run("cmake", "-G", "Ninja", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *options)


def expect_output(program, env=None):
    said = run(program, env=env)
    return None if said == SAYS else f"printed {said!r}, must be {SAYS!r}"


def write_example():
    """README's first C++ block becomes the program that every consumer builds."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```cpp\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if not block:
        return "README.md holds no C++ block"
    EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
    EXAMPLE.write_text(block.group(1), encoding="utf-8")
    return None


def install(build, prefix):
    """Installs, then moves the tree: nothing in it may depend on where it was installed."""
    first = WORK / "installed-here-first"
    shutil.rmtree(first, ignore_errors=True)
    shutil.rmtree(prefix, ignore_errors=True)
    run("cmake", "--install", build, "--prefix", first)
    first.rename(prefix)


def subdirectory():
    folder = WORK / "subdirectory"
    configure(TOP / "tests" / "package" / "consumer", folder, f"-DABACIST_SOURCE_DIR={TOP}",
              f"-DEXAMPLE={EXAMPLE}", "-DBUILD_SHARED_LIBS=ON", "-DABACIST_INSTALL=ON")
    run("cmake", "--build", folder, "-j", len(os.sched_getaffinity(0)))
    return expect_output(folder / "example")


def static_install():
    folder = TOP / "build" / "release"
    run("cmake", "--preset", "release")
    run("cmake", "--build", "--preset", "release", "-j", len(os.sched_getaffinity(0)))
    install(folder, WORK / "static")


def shared_install():
    install(WORK / "subdirectory" / "abacist", WORK / "shared")


def library_folder(prefix):
    found = list(prefix.glob("lib*/**/libabacist.*"))
    return found[0].parent if found else prefix / "lib"


def find_package(kind):
    folder = WORK / f"find-package-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    configure(TOP / "tests" / "package" / "consumer", folder,
              f"-DCMAKE_PREFIX_PATH={WORK / kind}", f"-DEXAMPLE={EXAMPLE}")
    run("cmake", "--build", folder)
    return expect_output(folder / "example")


def pkg_config(kind):
    libraries = library_folder(WORK / kind)
    env = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig"), "LD_LIBRARY_PATH": str(libraries)}
    flags = run("pkg-config", "--cflags", "--libs", "abacist", env=env).split()
    program = WORK / f"pkg-config-{kind}"
    run(os.environ.get("CXX", "g++"), *WARNINGS, EXAMPLE, "-o", program, *flags)
    return expect_output(program, env)


def only_public_headers():
    include = WORK / "static" / "include"
    installed = {str(p.relative_to(include)) for p in include.rglob("*") if p.is_file()}
    public = {str(p.relative_to(TOP / "include"))
              for p in (TOP / "include" / "abacist").iterdir() if p.suffix in (".hpp", ".h")}
    return None if installed == public else f"differ: {sorted(installed ^ public)}"


def headers_stand_alone(compiler):
    include = WORK / "static" / "include"
    for header in sorted(include.rglob("*.hpp")):
        run(compiler, *WARNINGS, f"-I{include}", "-fsyntax-only", "-include", header, "-x", "c++",
            os.devnull)


def symbols(*options):
    library = library_folder(WORK / "shared") / "libabacist.so"
    listed = run("nm", "-D", "-C", *options, library).splitlines()
    return [re.split(r" [A-Za-z] ", line, maxsplit=1)[1].split("@")[0] for line in listed]


def exports_only_the_api():
    ours = re.compile(r"(typeinfo for |typeinfo name for |vtable for )?abacist::|ABACIST_\d|abacist_")
    inner = re.compile(r"abacist::(api|core|cpu|cuda|reference|detail)::")
    bad = [s for s in symbols("--defined-only") if not ours.match(s) or inner.search(s)]
    return f"exports {bad[:5]}" if bad else None


def exports_the_whole_api():
    declared = set()
    for header in (TOP / "include" / "abacist").glob("*.hpp"):
        for match in re.finditer(r"^ABACIST_API [^;{]*?(\w+)\(", header.read_text(encoding="utf-8"),
                                 re.MULTILINE):
            declared.add(match.group(1))
    if not declared:
        return "no declaration found in the headers"
    exported = {match.group(1) for s in symbols("--defined-only")
                if (match := re.match(r"abacist::(\w+)[\[(]", s))}
    missing = declared - exported
    return f"missing {sorted(missing)}" if missing else None


def never_prints_or_ends_the_program():
    forbidden = re.compile(r"(v?f?printf|(__)?v?f?printf_chk|f?puts|putchar|f?putc|perror|fwrite|abort"
                           r"|_?exit|_Exit|quick_exit|__assert_fail|hwy::Abort.*"
                           r"|std::(cout|cerr|clog))$")
    bad = [s for s in symbols("--undefined-only") if forbidden.match(s)]
    return f"calls {bad}" if bad else None


def soname():
    library = library_folder(WORK / "shared") / "libabacist.so"
    version = re.search(r"project\(abacist VERSION (\d+\.\d+)",
                        (TOP / "CMakeLists.txt").read_text(encoding="utf-8")).group(1)
    wanted = f"libabacist.so.{version}"
    return None if f"[{wanted}]" in run("readelf", "-d", library) else f"is not {wanted}"


def versions_agree():
    cmake = (TOP / "CMakeLists.txt").read_text(encoding="utf-8")
    header = (TOP / "include" / "abacist" / "version.hpp").read_text(encoding="utf-8")
    numbers = ".".join(re.search(rf"VERSION_{part} (\d+)", header).group(1)
                       for part in ("MAJOR", "MINOR", "PATCH"))
    return None if f"project(abacist VERSION {numbers} " in cmake else f"header says {numbers}"


def foreign_platform_is_refused():
    folder = WORK / "foreign"
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(["cmake", "-G", "Ninja", "-S", TOP, "-B", folder,
                           "-DCMAKE_SYSTEM_NAME=Linux",
                           "-DCMAKE_SYSTEM_PROCESSOR=riscv64"],
                          capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "configured for riscv64"
    wanted = "Abacist builds on Linux x86-64 and aarch64; this is Linux riscv64."
    return None if wanted in done.stderr else f"said {done.stderr}"


def main():
    check("versions of CMake and header agree", versions_agree)
    check("a foreign platform is refused by name", foreign_platform_is_refused)
    if not check("README has an example", write_example):
        sys.exit(1)
    shared = check("add_subdirectory, shared", subdirectory)
    shared = shared and check("install, shared", shared_install)
    static = check("install, static", static_install)
    if static:
        check("only public headers are installed", only_public_headers)
        check("headers stand alone", lambda: headers_stand_alone(os.environ.get("CXX", "g++")))
        if clang := shutil.which("clang++") or shutil.which("clang++-14"):
            check("headers stand alone with clang", lambda: headers_stand_alone(clang))
        else:
            print("skip headers stand alone with clang: no clang++ on this machine")
        check("find_package, static", lambda: find_package("static"))
        check("pkg-config, static", lambda: pkg_config("static"))
    if shared:
        check("find_package, shared", lambda: find_package("shared"))
        check("pkg-config, shared", lambda: pkg_config("shared"))
        check("soname", soname)
        check("exports only the API", exports_only_the_api)
        check("exports the whole API", exports_the_whole_api)
        check("never prints, never ends the program", never_prints_or_ends_the_program)
    sys.exit(failed)


if __name__ == "__main__":
    main()
