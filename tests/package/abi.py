"""The C ABI as text: functions, struct layouts, numbers. Compared with abi.txt beside this file.

    python3 tests/package/abi.py LIBRARY            prints the description
    python3 tests/package/abi.py LIBRARY --update   writes it to abi.txt

Appending a field to a struct that has a struct_size, a function or a number is compatible. Anything
else breaks callers and needs a new minor version."""

import difflib
import pathlib
import re
import sys
import tempfile

from support import CC, TOP, run

DESCRIPTION = pathlib.Path(__file__).with_name("abi.txt")
INCLUDE = TOP / "include"
HEADER = INCLUDE / "abacist" / "abacist.h"


def declarations():
    """The header's own text without comments and directives, whitespace single."""
    text = HEADER.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = text.replace("ABACIST_NOEXCEPT", "")
    return re.sub(r"\s+", " ", text)


def functions(text):
    """Prototypes, and types that are no structs."""
    found = re.findall(r"(?:ABACIST_API|(?=typedef (?!struct))) ?([^;{}]+?)\s*;", text)
    return sorted(re.sub(r"\( ", "(", function) for function in found)


def fields(body):
    """(type and declarator, name) of the fields of a struct's body."""
    for declaration in body.split(";"):
        if not (match := re.match(r"\s*((?:const )?\w+)\s*(.+?)\s*$", declaration)):
            continue
        base, declarators = match.groups()
        for declarator in re.split(r"\s*,\s*", declarators):
            yield re.sub(r"\* ", "*", f"{base} {declarator}"), re.search(r"\w+", declarator).group()


def layout_program(text):
    """A C program that prints sizes, offsets and numbers."""
    lines = ["#include <abacist/abacist.h>", "#include <stdio.h>", "int main(void) {"]
    for body, name in re.findall(r"typedef struct \w+ \{([^}]*)\} (\w+);", text):
        lines.append(f'printf("struct %s: %zu bytes\\n", "{name}", sizeof({name}));')
        for declaration, field in fields(body):
            lines.append(f'printf("  {declaration}: at %zu, %zu bytes\\n", offsetof({name}, {field}),'
                         f" sizeof((({name}*)0)->{field}));")
    for name, body in re.findall(r"enum (\w+) \{([^}]*)\}", text):
        lines.append(f'printf("enum %s\\n", "{name}");')
        for value in re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", body.strip()):
            lines.append(f'printf("  %s = %d\\n", "{value}", (int){value});')
    constants = re.findall(r"^#define (ABACIST_(?!NOEXCEPT)\w+) \S", HEADER.read_text(encoding="utf-8"),
                           re.MULTILINE)
    for name in constants:
        lines.append(f'printf("%s = %lld\\n", "{name}", (long long)({name}));')
    return "\n".join([*lines, "return 0;", "}", ""])


def exported(library):
    listed = run("nm", "-D", "--defined-only", library).splitlines()
    names = (line.split()[-1].split("@")[0] for line in listed if re.search(r" [TDBR] ", line))
    return sorted(name for name in names if name.startswith("abacist_"))


def describe(library):
    text = declarations()
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "layout.c"
        source.write_text(layout_program(text), encoding="utf-8")
        program = source.with_suffix("")
        run(CC, "-std=c11", f"-I{INCLUDE}", source, "-o", program)
        layout = run(program)
    symbols = "\n".join(f"  {name}" for name in exported(library))
    listed = "\n".join(f"  {function}" for function in functions(text))
    return f"exported\n{symbols}\nfunctions\n{listed}\n{layout}"


def difference(library):
    """None, or how the library and its header differ from abi.txt."""
    now = describe(library)
    declared = {match.group(1) for function in functions(declarations())
                if (match := re.search(r"(abacist_\w+)\(", function))}
    if unequal := declared ^ set(exported(library)):
        return f"declared or exported alone: {sorted(unequal)}"
    then = DESCRIPTION.read_text(encoding="utf-8") if DESCRIPTION.exists() else ""
    if now == then:
        return None
    lines = list(difflib.unified_diff(then.splitlines(), now.splitlines(), "abi.txt", "now",
                                      lineterm="", n=1))
    lost = [line for line in lines[2:] if line.startswith("-")]
    kind = "BREAKS CALLERS (unless a struct only grew)" if lost else "is new and compatible"
    return "\n".join([f"{kind}; if that is meant: tests/package/abi.py LIBRARY --update", *lines])


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text = describe(sys.argv[1])
    if "--update" in sys.argv[2:]:
        DESCRIPTION.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
