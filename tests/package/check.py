"""Installs Abacist and uses it as a stranger would: through find_package, pkg-config and
add_subdirectory, static and shared, with README's example as the program. Checks what the shared
library exports and calls. Prints "ok NAME" or "FAIL NAME: why" for each check."""

import os
import re
import shutil
import subprocess
import sys

import abi
import deb
import headers
import support
from support import (C_WARNINGS, CC, CXX, CXX_WARNINGS, TOP, WORK, check, configure, processors, run,
                     skip)

CONSUMER = TOP / "tests" / "package" / "consumer"
EXAMPLES = {"cpp": WORK / "example.cpp", "c": WORK / "example.c"}
SAYS = "o[0] = 0.1\n"  # what README's examples print


def expect_output(program, env=None):
    said = run(program, env=env)
    return None if said == SAYS else f"printed {said!r}, must be {SAYS!r}"


def write_examples():
    """README's first blocks of C++ and C become the programs that every consumer builds."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    WORK.mkdir(parents=True, exist_ok=True)
    for language, path in EXAMPLES.items():
        block = re.search(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        if not block:
            return f"README.md holds no {language} block"
        path.write_text(block.group(1), encoding="utf-8")
    return None


def install(build, prefix):
    """Installs, then moves the tree: nothing in it may depend on where it was installed."""
    first = WORK / "installed-here-first"
    shutil.rmtree(first, ignore_errors=True)
    shutil.rmtree(prefix, ignore_errors=True)
    run("cmake", "--install", build, "--prefix", first)
    first.rename(prefix)


def expect_both(folder):
    return expect_output(folder / "example_cpp") or expect_output(folder / "example_c")


def consume(folder, *options):
    shutil.rmtree(folder, ignore_errors=True)
    configure(CONSUMER, folder, *(f"-DEXAMPLE_{name.upper()}={path}" for name, path in EXAMPLES.items()),
              *options)
    run("cmake", "--build", folder, "-j", processors())
    return expect_both(folder)


def subdirectory():
    return consume(WORK / "subdirectory", f"-DABACIST_SOURCE_DIR={TOP}", "-DBUILD_SHARED_LIBS=ON",
                   "-DABACIST_INSTALL=ON", "-DABACIST_PACKAGE=ON")


def static_install():
    folder = TOP / "build" / "release"
    run("cmake", "--preset", "release")
    run("cmake", "--build", "--preset", "release", "-j", processors())
    install(folder, WORK / "static")


def shared_install():
    install(WORK / "subdirectory" / "abacist", WORK / "shared")


def project_version():
    text = (TOP / "CMakeLists.txt").read_text(encoding="utf-8")
    return re.search(r"project\(abacist VERSION (\S+)", text).group(1)


def make_packages():
    """cpack from the shared build; the archive unpacked, the .deb installed."""
    folder = WORK / "packages"
    shutil.rmtree(folder, ignore_errors=True)
    run("cpack", "--config", WORK / "subdirectory" / "CPackConfig.cmake", "-B", folder)
    version = project_version()
    archives, debs = list(folder.glob(f"abacist-{version}-linux-*.tar.gz")), list(folder.glob("*.deb"))
    if len(archives) != 1 or len(debs) != 1:
        return f"made {sorted(path.name for path in folder.iterdir())}"
    shutil.rmtree(WORK / "tgz", ignore_errors=True)
    (WORK / "tgz").mkdir()
    run("tar", "-xzf", archives[0], "-C", WORK / "tgz", "--strip-components=1")
    fields = run("dpkg-deb", "-f", debs[0])
    for wanted in (f"Version: {version}", "Package: abacist", "libhwy1", "libtbb12", "libstdc++6"):
        if wanted not in fields:
            return f"the .deb's fields lack \"{wanted}\": {fields}"
    control = run("dpkg-deb", "--ctrl-tarfile", debs[0], binary=True)
    if b"activate-noawait ldconfig" not in control:
        return "the .deb does not run ldconfig"
    return deb.install(debs[0])


def same_files_in_both_packages():
    def files(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    archive, installed = files(WORK / "tgz"), files(deb.ROOT / "usr")
    if archive != installed:
        return f"differ: {sorted(archive ^ installed)}"
    return None if "share/doc/abacist/copyright" in installed else "no licence"


def library_folder(prefix):
    found = list(prefix.glob("lib*/**/libabacist.*"))
    return found[0].parent if found else prefix / "lib"


def find_package(kind):
    return consume(WORK / f"find-package-{kind}", f"-DCMAKE_PREFIX_PATH={WORK / kind}")


def find_package_in_plain_c(kind):
    """A project of C alone."""
    folder = WORK / f"find-package-c-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    configure(CONSUMER / "plain_c", folder, f"-DCMAKE_PREFIX_PATH={WORK / kind}",
              f"-DEXAMPLE={EXAMPLES['c']}")
    run("cmake", "--build", folder)
    return expect_output(folder / "example")


def pkg_config(kind, below=""):
    libraries = library_folder(WORK / kind / below)
    env = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig"), "LD_LIBRARY_PATH": str(libraries)}
    flags = run("pkg-config", "--cflags", "--libs", "abacist", env=env).split()
    for compiler, options, example in ((CXX, ["-std=c++20", *CXX_WARNINGS], EXAMPLES["cpp"]),
                                       (CC, ["-std=c11", *C_WARNINGS], EXAMPLES["c"])):
        program = WORK / f"pkg-config-{kind}{example.suffix[1:]}"
        run(compiler, *options, example, "-o", program, *flags)
        if fault := expect_output(program, env):
            return f"{example.name}: {fault}"
    return None


def examples(kind):
    """The folder examples/ as a project of its own."""
    folder = WORK / f"examples-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    configure(TOP / "examples", folder, f"-DCMAKE_PREFIX_PATH={WORK / kind}")
    run("cmake", "--build", folder, "-j", processors())
    run("ctest", "--test-dir", folder, "--no-tests=error", "-j", processors())


def only_public_headers():
    include = WORK / "static" / "include"
    installed = {str(p.relative_to(include)) for p in include.rglob("*") if p.is_file()}
    public = {str(p.relative_to(TOP / "include"))
              for p in (TOP / "include" / "abacist").iterdir() if p.suffix in (".hpp", ".h")}
    return None if installed == public else f"differ: {sorted(installed ^ public)}"


def documents_link_to_what_is_there():
    """In the installed tree, README's links to headers among them."""
    folder = WORK / "static" / "share" / "doc" / "abacist"
    dead, goals = [], set()
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                goal = (page.parent / target).resolve()
                goals.add(goal)
                dead += [] if goal.exists() else [f"{page.name} to {target}"]
    wanted = {WORK / "static" / "include" / "abacist" / "plan.hpp", folder / "docs" / "contract.md"}
    return f"dead links: {dead}; not linked: {wanted - goals}" if dead or not wanted <= goals else None


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
    version = ".".join(project_version().split(".")[:2])
    wanted = f"libabacist.so.{version}"
    return None if f"[{wanted}]" in run("readelf", "-d", library) else f"is not {wanted}"


def versions_agree():
    header = (TOP / "include" / "abacist" / "version.h").read_text(encoding="utf-8")
    numbers = ".".join(re.search(rf"VERSION_{part} (\d+)", header).group(1)
                       for part in ("MAJOR", "MINOR", "PATCH"))
    return None if project_version() == numbers else f"header says {numbers}"


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


def check_static():
    check("only public headers are installed", only_public_headers)
    check("links of the installed documents lead somewhere", documents_link_to_what_is_there)
    headers.check_all(WORK / "static" / "include")
    clang = shutil.which("clang") or shutil.which("clang-14")
    if clang:
        headers.check_all(WORK / "static" / "include", ", clang", clang.replace("clang", "clang++"), clang)
    else:
        skip("headers with clang", "no clang on this machine")
    check("static library defines only its own", static_library_is_all_ours)
    check("find_package, static", lambda: find_package("static"))
    check("find_package from plain C, static", lambda: find_package_in_plain_c("static"))
    check("pkg-config, static", lambda: pkg_config("static"))


def static_library_is_all_ours():
    """Linked into a program, an archive's symbols meet all others."""
    library = library_folder(WORK / "static") / "libabacist.a"
    ours = re.compile(r"(typeinfo for |typeinfo name for |vtable for |guard variable for |TLS \w+ function for )?"
                      r"abacist(::|_)")
    strong = re.compile(r"^[0-9a-f]+ [TDBRGS] (.*)$", re.MULTILINE)
    names = strong.findall(run("nm", "-g", "-C", "--defined-only", library))
    bad = [name for name in names if not ours.match(name)]
    return f"defines {bad[:5]}" if bad or not names else None


def check_packages():
    if not shutil.which("dpkg-shlibdeps"):
        skip("packages", "no dpkg-shlibdeps on this machine (Debian: dpkg-dev)")
    elif check("cpack makes a .tar.gz and a .deb, which dpkg installs", make_packages):
        check("dpkg lists the files of the .deb", deb.lists_its_files)
        check("both packages hold the same", same_files_in_both_packages)
        check("find_package from the .tar.gz", lambda: find_package("tgz"))
        check("pkg-config from the .deb", lambda: pkg_config("deb", "usr"))
        check("removing the .deb leaves nothing", deb.leaves_nothing)


def check_shared():
    check("find_package, shared", lambda: find_package("shared"))
    check("find_package from plain C, shared", lambda: find_package_in_plain_c("shared"))
    check("pkg-config, shared", lambda: pkg_config("shared"))
    check("examples on their own, shared", lambda: examples("shared"))
    check_packages()
    check("soname", soname)
    check("exports only the API", exports_only_the_api)
    check("exports the whole API", exports_the_whole_api)
    check("the C ABI is the one described",
          lambda: abi.difference(library_folder(WORK / "shared") / "libabacist.so"))
    check("never prints, never ends the program", never_prints_or_ends_the_program)


def main():
    check("versions of CMake and header agree", versions_agree)
    check("a foreign platform is refused by name", foreign_platform_is_refused)
    if not check("README has examples", write_examples):
        sys.exit(1)
    shared = check("add_subdirectory, shared", subdirectory)
    shared = shared and check("install, shared", shared_install)
    if check("install, static", static_install):
        check_static()
    if shared:
        check_shared()
    sys.exit(support.any_failed)


if __name__ == "__main__":
    main()
