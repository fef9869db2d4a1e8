"""Doxygen's filter for Markdown: links that leave the site become text, pictures become Doxygen's own."""

import pathlib
import re
import sys

PAGES = ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "include/abacist/")
HEADINGS = {"README.md": "mainpage", "docs/decisions/README.md": "page decisions"}
TOP = pathlib.Path.cwd()


def on_site(path):
    name = str(path)
    return name.startswith(PAGES) and path.suffix in (".md", ".h", ".hpp") and (TOP / path).is_file()


def join_code(paragraph):
    """Code that a line break divides, which Doxygen does not understand, on one line."""
    parts = paragraph.split("`")
    if "```" in paragraph or len(parts) % 2 == 0:
        return paragraph
    return "`".join(part.replace("\n", " ") if i % 2 else part for i, part in enumerate(parts))


def main():
    source = pathlib.Path(sys.argv[1]).resolve().relative_to(TOP)
    text = "\n\n".join(map(join_code, source.read_text(encoding="utf-8").split("\n\n")))

    def link(match):
        label, target = match.groups()
        if re.match(r"https?:|#", target):
            return match.group(0)
        path = (TOP / source.parent / target.split("#")[0]).resolve().relative_to(TOP)
        if on_site(path):
            return f'@ref {path.name} "{label}"' if path.suffix != ".md" else f"[{label}]({path})"
        return f"`{label}`" if label == str(path) else f"{label} (`{path}`)"

    text = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", link, text)
    text = re.sub(r"^!\[([^\]]*)\]\((?:[^)]*/)?([^)/]+)\)$", r'@image html \2 "\1"', text, flags=re.MULTILINE)
    for name, command in HEADINGS.items():
        if str(source) == name:  # Doxygen would take every README.md for the first page
            text = re.sub(r"\A# (.*)", rf"@{command} \1", text)
    print(text, end="")


if __name__ == "__main__":
    main()
