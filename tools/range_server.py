"""A small HTTP server for tests and benches: files of a folder with ranges of bytes, as slowly and
as unreliably as one asks for."""

from __future__ import annotations

import html
import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlparse

_BLOCK = 1 << 16


class RangeServer(ThreadingHTTPServer):
    """Serves a folder on a free port of this machine."""

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        *,
        latency: float = 0.0,
        bytes_per_second: float = 0.0,
        ranges: bool = True,
    ) -> None:
        """``latency``: seconds before an answer. ``bytes_per_second``: of all answers together; 0:
        as fast as it goes. Without ``ranges`` it sends whole files, as Python's own does."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.ranges = ranges
        self.sent = 0
        """Bytes of files that were sent."""
        self.failing = 0
        """So many of the next requests for files are answered with status 503."""
        self.forbidden = False
        """Whether files are answered with status 403."""
        self.versions = True
        """Whether an answer has an ETag, which another version of a file has not."""
        self.requests: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        """Of each request for a file its path and the range of bytes [start, stop) that was
        sent."""
        self.lock = threading.Lock()
        self._free = time.monotonic()

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pace(self, size: int) -> None:
        """Wait until ``size`` more bytes may be sent."""
        with self.lock:
            self.sent += size
            if not self.bytes_per_second:
                return
            self._free = max(self._free, time.monotonic()) + size / self.bytes_per_second
            wait = self._free - time.monotonic()
        time.sleep(max(0.0, wait))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that are killed leave broken connections."""


class _Handler(BaseHTTPRequestHandler):
    server: RangeServer

    def do_GET(self) -> None:
        time.sleep(self.server.latency)
        path = self.server.folder / unquote(urlparse(self.path).path).lstrip("/")
        if path.is_dir():
            self._index(path)
        elif not path.is_file():
            self.send_error(404)
        elif self.server.forbidden:
            self.send_error(403)
        elif self._fails():
            self.send_error(503)
        else:
            self._file(path)

    def _fails(self) -> bool:
        with self.server.lock:
            fails = self.server.failing > 0
            self.server.failing -= fails
        return fails

    def _index(self, folder: Path) -> None:
        names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
        page = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names)
        self._begin(200, len(page.encode()), {"Content-Type": "text/html"})
        self.wfile.write(page.encode())

    def _file(self, path: Path) -> None:
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = 0, size
        status = 200
        headers = {}
        if self.server.versions:
            headers["ETag"] = f'"{path.stat().st_mtime_ns:x}-{size:x}"'
        if asked is not None and self.server.ranges:
            start, stop = int(asked[1]), min(size, int(asked[2]) + 1)
            if start >= size:
                self._begin(416, 0, {**headers, "Content-Range": f"bytes */{size}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.server.requests.put((path.name, start, stop))
        self._begin(status, stop - start, headers)
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK, stop - start))
                self.server.pace(len(block))
                self.wfile.write(block)
                start += len(block)

    def _begin(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


@contextmanager
def serving(folder: Path, **how: Any) -> Iterator[RangeServer]:
    """A section in which a folder is served."""
    with RangeServer(folder, **how) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
