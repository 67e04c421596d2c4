"""The tutorials: notebooks with their outputs, run here and shown by MkDocs.

    python docs/notebooks.py [NAME ...]

runs the tutorials and stores their outputs. MkDocs calls ``on_files`` and turns each
stored notebook into a page, so that the site needs no kernel and none of the
tutorials' data.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "tutorials"
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar


def run(path: Path):
    """Execute a notebook in an empty folder and return it with its outputs.

    Args:
        path: the notebook; the file is not changed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    notebook.metadata.pop("widgets", None)
    return notebook


def page(path: Path) -> Iterator[str]:
    """Yield a stored notebook as Markdown: a block for each cell and each output."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if picture := data.get("image/png"):
                yield f"![What the cell draws](data:image/png;base64,{picture.strip()})"
            else:
                text = "".join(data["text/plain"]).rstrip()
                yield f"```{{ .text .output }}\n{text}\n```"
    yield f'<a href="{path.name}" download>Download this notebook</a>'


def on_page_markdown(markdown, **_):
    """Link to the pages of notebooks, not to their files. Called by MkDocs."""
    return re.sub(r"\]\(((?:\.\./)?(?:tutorials/)?\w+)\.ipynb\)", r"](\1.md)", markdown)


def on_files(files, config):
    """Add a page for each notebook. Called by MkDocs."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        text = "\n\n".join(page(path))
        uri = f"tutorials/{path.stem}.md"
        files.append(File.generated(config, uri, content=text))
    return files


if __name__ == "__main__":
    import nbformat

    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.stem in sys.argv[1:] or len(sys.argv) == 1:
            nbformat.write(run(path), path)
            print(path.name)
