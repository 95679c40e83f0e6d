"""A Hugging Face endpoint on this machine, with the ways one can misbehave."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What is served at every URL, and what was asked for."""

    content: bytes = b""
    etag: str | None = None  # the SHA-256 of the content unless given
    declared_size: int | None = None
    status: int = 200  # of every answer
    error_code: str | None = None  # X-Error-Code
    get_status: int | None = None  # of answers to GET only
    ignores_range: bool = False
    shifts_range_by: int = 0
    cuts: list[int] = field(default_factory=list)  # bytes of each body before the connection breaks
    pause_s: float = 0.0  # between pieces of 1,000 bytes
    redirects_to: str | None = None  # host:port of the first GET's real answer
    port: int = 0
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gets(self) -> list[dict[str, str]]:
        return [headers for method, path, headers in self.requests if method == "GET" and "/resolve/" in path]

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("range") for headers in self.gets]


@contextmanager
def serving(content: bytes) -> Iterator[Hub]:
    hub = Hub(content)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._note()
            self._start(hub.status, len(hub.content))
            self.end_headers()

        def do_GET(self) -> None:
            self._note()
            if hub.redirects_to and self.headers["Host"] != hub.redirects_to:
                self.send_response(302)
                self.send_header("Location", f"http://{hub.redirects_to}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = hub.status if hub.get_status is None else hub.get_status
            asked = self.headers.get("Range")
            start = int(asked[6:-1]) if asked and not hub.ignores_range else 0
            body = hub.content[start:]
            self._start(206 if start and status == 200 else status, len(body))
            if start and status == 200:
                first = start + hub.shifts_range_by
                self.send_header("Content-Range", f"bytes {first}-{len(hub.content) - 1}/{len(hub.content)}")
            self.end_headers()
            if status == 200:
                self._send(body)

        def _note(self) -> None:
            hub.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))

        def _start(self, status: int, length: int) -> None:
            self.send_response(status)
            if hub.error_code:
                self.send_header("X-Error-Code", hub.error_code)
            self.send_header("ETag", f'"{hub.etag or hashlib.sha256(hub.content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            if self.command == "HEAD":
                length = hub.declared_size or length
            self.send_header("Content-Length", str(length if status < 300 else 0))

        def _send(self, body: bytes) -> None:
            cut = hub.cuts.pop(0) if hub.cuts else None
            for at in range(0, len(body), 1000):
                piece = body[at : min(at + 1000, len(body) if cut is None else cut)]
                try:
                    self.wfile.write(piece)
                    self.wfile.flush()
                except OSError:
                    return
                if cut is not None and at + 1000 >= cut:
                    self.close_connection = True
                    return
                time.sleep(hub.pause_s)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
