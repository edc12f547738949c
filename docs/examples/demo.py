"""Serve the packaged demo model, ask it one question with the `openai` client, stream the answer to the terminal."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from openai import OpenAI

QUESTION = "What is an octavo? Answer in one or two sentences."
START_LIMIT = 180.0  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}; its message is above")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    sys.exit(f"the server was not ready within {START_LIMIT:.0f} s")


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    octavo = Path(sys.executable).with_name("octavo")
    server = subprocess.Popen([octavo, "serve", "--host", "127.0.0.1", "--port", str(port)])
    try:
        wait_until_healthy(url, server)
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        print(f"\n{model} was asked: {QUESTION}\n")
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=80,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print(
            "\n\nThat was Octavo. To go on:\n"
            "  make serve                  leaves this server running on port 8000\n"
            "  octavo serve MODEL          serves a Hugging Face folder or repository, or a .gguf file\n"
            "  octavo chat                 talks to the model in the terminal\n"
            "  octavo --help               lists the rest; docs/quickstart.md explains it"
        )
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main()
