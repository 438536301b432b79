"""Renders the notebooks and their index as HTML: ``python notebooks/render.py FOLDER``."""

import os
import re
import sys
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter

HERE = Path(__file__).resolve().parent
CODE_OR_EQUATION = re.compile(r"```.*?```|`[^`\n]+`|\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)


def main(folder):
    """Write a page per notebook, and index.html."""
    folder.mkdir(parents=True, exist_ok=True)
    # Equations become MathML, which browsers show by themselves: no page needs a network.
    exporter = HTMLExporter()
    index = nbformat.v4.new_notebook()
    index.cells = [nbformat.v4.new_markdown_cell((HERE / "README.md").read_text("utf-8"))]
    pages = {"index": index}
    for path in sorted(HERE.glob("*.ipynb")):
        pages[path.stem] = nbformat.read(path, as_version=4)
    for name, content in pages.items():
        for cell in content.cells:
            if cell.cell_type == "markdown":
                cell.source = CODE_OR_EQUATION.sub(equation, with_links(cell.source, folder))
        page, _ = exporter.from_notebook_node(content, {"metadata": {"name": f"mxbn: {name}"}})
        # What nbconvert adds would fetch more scripts, for widgets and diagrams that are not there.
        page = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        print(folder / f"{name}.html")


def equation(found):
    """Return an equation as MathML, and code as it is."""
    block, inline = found.groups()
    if block is not None:
        return convert(" ".join(block.split()), display="block")
    return convert(inline) if inline is not None else found.group()


def with_links(text, folder):
    """Let links lead to pages, and those out of this folder to the files of the project."""
    text = re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.html", text)
    text = text.replace("](README.md", "](index.html")
    return text.replace("](../", f"]({os.path.relpath(HERE.parent, folder)}/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
