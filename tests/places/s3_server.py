"""A real S3 server on loopback: moto's, in a process of its own, behind a proxy that makes faults."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.runtime.test_processes import free_port

MISSING = "moto is not installed: pip install 'moto[s3]' flask flask-cors"
BUCKET = "bucket"
CLOSE, LOSE = "close", "lose"  # end the connection before the request is done, or after it, without an answer
Fault = Callable[[str, str], int | str | None]  # of method and path: a status, CLOSE, LOSE or None, the true answer
MESSAGES = {503: "SlowDown", 403: "InvalidAccessKeyId"}


class Server:
    """The server's `url`; `fault` answers a request in its place, and `log` has (method, path) of all requests."""

    def __init__(self, backend: int):
        self.backend, self.fault, self.log = backend, no_fault, list[tuple[str, str]]()
        self.conditions = threading.Lock()  # moto checks a condition and writes in two steps
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.proxy.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.proxy.server_port}"
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """Return the environment of a command on a machine with its own cache."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        own = {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "SECRET-KEY"}
        own |= {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "MINI_GPT_CACHE": str(cache)}
        return kept | own | more

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.backend, timeout=60)
        conditional = {name.lower() for name in headers} & {"if-match", "if-none-match"} and method == "PUT"
        with self.conditions if conditional else contextlib.nullcontext():
            connection.request(method, path, body, headers)
            return connection.getresponse()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def forward(self) -> None:
                body = self._body()
                server.log.append((self.command, self.path))
                fault = server.fault(self.command, self.path)
                if fault == CLOSE:
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    code = MESSAGES[fault]
                    content = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
                    self._send(fault, [("Content-Type", "application/xml")], content)
                    return
                answer = server.answer(self.command, self.path, dict(self.headers.items()), body)
                if fault == LOSE:
                    self.close_connection = True
                    return
                self._send(answer.status, answer.getheaders(), answer.read())

            def _body(self) -> bytes | None:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                del self.headers["Transfer-Encoding"]
                self.headers["Content-Length"] = str(sum(map(len, parts)))
                return b"".join(parts)

            def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response_only(status)
                hop = ("connection", "transfer-encoding", "content-length", "server")
                for name, value in headers:
                    if name.lower() not in hop or (self.command == "HEAD" and name.lower() == "content-length"):
                        self.send_header(name, value)
                if self.command != "HEAD" and status not in (204, 304):
                    self.send_header("Content-Length", str(len(content)))
                elif self.command == "HEAD" and not any(name.lower() == "content-length" for name, _ in headers):
                    self.send_header("Content-Length", "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        return Handler


def no_fault(method: str, path: str) -> int | str | None:
    return None


@contextlib.contextmanager
def running(log: Path) -> Iterator[Server]:
    """Start moto and the proxy, with an empty bucket."""
    pytest.importorskip("moto.server", reason=MISSING)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            server = Server(port)
            assert server.answer("PUT", f"/{BUCKET}", {}, None).status == 200, log.read_text()
            yield server
            server.proxy.shutdown()
        finally:
            process.kill()
