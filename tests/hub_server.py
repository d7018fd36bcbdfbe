"""The routes of the HuggingFace hub that its client uses to fetch a model, over folders of this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


class Hub(ThreadingHTTPServer):
    """Serves ``folder/org/name/commit`` as the commits of ``org/name``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.branches: dict[tuple[str, str], str] = {}
        """Commit by repository and branch."""
        self.gated: set[str] = set()
        self.fetched: Counter[str] = Counter()
        """How often each file was sent."""
        self.asked: Counter[str] = Counter()
        """How often each repository was looked up."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put a commit at the end of a branch, and return its name."""
        commit = hashlib.sha1(json.dumps(sorted((name, data.hex()) for name, data in files.items())).encode()).hexdigest()
        for name, data in files.items():
            path = self.folder / repo / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.branches[repo, branch] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path):
            self._api(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        else:
            self._refuse(404, "no such route")

    do_HEAD = do_GET

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit, or None after the answer that there is none."""
        if repo not in {name for name, _ in self.server.branches}:
            self._refuse(401, "RepoNotFound")
        elif repo in self.server.gated and "Authorization" not in self.headers:
            self._refuse(403, "GatedRepo")
        else:
            commit = self.server.branches.get((repo, revision), revision)
            if (self.server.folder / repo / commit).is_dir():
                return commit
            self._refuse(404, "RevisionNotFound")
        return None

    def _api(self, repo: str, kind: str | None, revision: str) -> None:
        if kind != "tree":
            self.server.asked[repo] += 1
        commit = self._commit(repo, revision)
        if commit is None:
            return
        folder = self.server.folder / repo / commit
        files = [(str(path.relative_to(folder)), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]
        if kind == "tree":
            answer: object = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in files
            ]
        else:
            siblings = [{"rfilename": name} for name, _ in files]
            answer = {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": commit,
                "private": False,
                "gated": False,
                "tags": [],
                "siblings": siblings,
            }
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        path = self.server.folder / repo / commit / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        if self.command == "GET":
            self.server.fetched[name] += 1
        self._send(data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """A hub that runs beside the test."""
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
