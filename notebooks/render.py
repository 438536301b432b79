"""Renders the notebooks and their index as HTML: ``python notebooks/render.py FOLDER``."""

import os
import re
import shutil
import sys
from pathlib import Path

import jupyter_server_mathjax
import nbformat
from nbconvert import HTMLExporter

HERE = Path(__file__).resolve().parent
MATHJAX = Path(jupyter_server_mathjax.__file__).parent / "static"  # so that no page needs a network


def main(folder):
    """Write a page per notebook, index.html, and what shows equations."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(MATHJAX, folder / "mathjax", dirs_exist_ok=True)
    exporter = HTMLExporter(
        mathjax_url="mathjax/MathJax.js?config=TeX-AMS_CHTML-full,Safe", require_js_url=""
    )
    index = nbformat.v4.new_notebook()
    index.cells = [nbformat.v4.new_markdown_cell((HERE / "README.md").read_text("utf-8"))]
    pages = {"index": index}
    for path in sorted(HERE.glob("*.ipynb")):
        pages[path.stem] = nbformat.read(path, as_version=4)
    for name, content in pages.items():
        for cell in content.cells:
            if cell.cell_type == "markdown":
                cell.source = links(cell.source, folder)
        title = {"metadata": {"name": f"mxbn: {name}"}}
        page, _ = exporter.from_notebook_node(content, title)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        print(folder / f"{name}.html")


def links(text, folder):
    """Let links lead to pages, and those out of this folder to the files of the project."""
    text = re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.html", text)
    text = text.replace("](README.md", "](index.html")
    return text.replace("](../", f"]({os.path.relpath(HERE.parent, folder)}/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
