"""Execute the notebooks of the tutorials and the one for a first try, and write their outputs into them.

python -m docs.tutorials.execute                  all notebooks
python -m docs.tutorials.execute --only=2         the second one
python -m docs.tutorials.execute --only=try       the one for a first try
"""

import argparse
import os
import time
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TRY_IT = FOLDER.parent / "try_it.ipynb"
TIME_LIMIT = 300  # seconds for a cell; a whole notebook takes one to three minutes on two cores


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the executed notebook. Raises nbclient.exceptions.CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "JAX_PLATFORMS": "cpu"}
    client = nbclient.NotebookClient(notebook, timeout=TIME_LIMIT, kernel_name="python3", coalesce_streams=True)
    client.execute(cwd=str(FOLDER), env=environment)
    for cell in notebook.cells:  # times would change the file at each execution
        cell.metadata.pop("execution", None)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def without_pages(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook without outputs that are HTML: the page of the explorer has a megabyte."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if "text/html" not in output.get("data", {})]
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="N", help="the number of a notebook, or try")
    only = parser.parse_args().only
    for path in [*NOTEBOOKS, TRY_IT]:
        if only is None or path.name.startswith(f"{only}_"):
            start = time.monotonic()
            nbformat.write(without_pages(execute(path)), path)
            print(f"{path.name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
