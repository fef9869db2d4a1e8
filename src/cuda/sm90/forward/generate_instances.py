"""Writes the translation units of the Hopper forward kernel's instances, and the table of them.

    python3 generate_instances.py FOLDER [INSTANCE...]     e.g. bf16_3 f16_0m; default: all

An instance is a type, an index into kForwardTiles (config.hpp), and nothing more, "m" if scores can be modified
(softcap, ALiBi) and query heads packed into a tile, "k" if keys can be split, too; or a type, "s" and the width
computed with (short.cuh).
Prints the names; files that would not change are left alone."""

import pathlib
import sys

ELEMENTS = {"bf16": "__nv_bfloat16", "f16": "__half"}
SHAPES = {
    "": range(8),
    "m": (0, 3, 5),  # d 96 runs in 3, 192/128 in 5, d 256 in 6k; 1 and 7 would spill
    "k": (0, 3, 6),  # for 96 and 192, too: what is split waits for memory, not for arithmetic
}
SHORT = (64, 128)
HERE = pathlib.Path(__file__).resolve().parent


def all_instances():
    shapes = [f"{i}{kind}" for i in range(8) for kind, indices in SHAPES.items() if i in indices]
    shapes += [f"s{d}" for d in SHORT]
    return [f"{element}_{shape}" for shape in shapes for element in ELEMENTS]


def unit(name):
    element, shape = name.split("_")
    if shape.startswith("s"):
        maker = f"make_short_instance<{shape[1:]}, {ELEMENTS[element]}>"
    else:
        modified, splits = (str(shape[-1] in kinds).lower() for kinds in ("mk", "k"))
        maker = f"make_forward_instance<{shape.rstrip('mk')}, {ELEMENTS[element]}, {modified}, {splits}>"
    return f"""#include "{HERE}/instance.cuh"
namespace abacist::cuda::sm90 {{
extern const ForwardInstance forward_{name} = {maker}();
}}  // namespace abacist::cuda::sm90
"""


def table(names):
    externs = "\n".join(f"extern const ForwardInstance forward_{name};" for name in names)
    rows = "\n".join(f"    &forward_{name}," for name in names)
    return f"""#include "{HERE}/instance.hpp"
namespace abacist::cuda::sm90 {{
{externs}
const ForwardInstance* const kForwardInstances[] = {{
{rows}
}};
const int kForwardInstanceCount = {len(names)};
}}  // namespace abacist::cuda::sm90
"""


def write(path, text):
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main():
    folder = pathlib.Path(sys.argv[1])
    names = sys.argv[2:] or all_instances()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write(folder / f"{name}.cu", unit(name))
    write(folder / "list.cu", table(names))
    print("\n".join(names))


if __name__ == "__main__":
    main()
