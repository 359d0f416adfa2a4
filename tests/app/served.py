"""Serve the page, and record every host that this process connects to: python -m tests.app.served MODEL…"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(folder: Path, *models: str) -> Iterator[SimpleNamespace]:
    """The page as a process of its own serves it: its address, its folder, whom it spoke to, and its console."""
    heard, console = folder / "heard.txt", folder / "console.txt"
    settings = {"GRADIO_TEMP_DIR": str(folder), "HEARD": str(heard), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.app.served", *models]
    with (
        console.open("w") as errors,
        subprocess.Popen(
            command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as served,
    ):
        url = served.stdout.readline().strip()
        port = int(url.split(":")[2].strip("/"))
        yield SimpleNamespace(local_url=url, server_port=port, folder=folder, heard=heard, console=console)
        served.kill()


def _hear(event: str, arguments: tuple) -> None:
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments
        if isinstance(address, tuple):
            with Path(os.environ["HEARD"]).open("a") as file:
                print(address[0], file=file)


if __name__ == "__main__":
    sys.addaudithook(_hear)
    from vitflow.app import serve

    models = sys.argv[1:]
    models, samples = (
        (models[: models.index("--")], models[models.index("--") + 1 :]) if "--" in models else (models, [])
    )
    page = serve(models, samples=samples, allowed_hosts=["photos.example"])
    print(page.local_url, flush=True)
    page.block_thread()
