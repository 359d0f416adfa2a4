"""Serve the page, and write down every host that this process speaks to: python -m tests.app.served MODEL…"""

import os
import sys
from pathlib import Path


def _hear(event: str, arguments: tuple) -> None:
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments
        if isinstance(address, tuple):
            with Path(os.environ["HEARD"]).open("a") as file:
                print(address[0], file=file)


if __name__ == "__main__":
    sys.addaudithook(_hear)
    from vitflow.app import serve

    page = serve(sys.argv[1:], wait=False)
    print(page.local_url, flush=True)
    page.block_thread()
