"""Files that are read by ranges of bytes: on a disk, behind HTTP, or in an object store.

HTTP is read with the standard library, every other URL through fsspec. A read that fails is tried
again for about half a minute: a corpus is read for weeks, and a server may restart meanwhile.
"""

from __future__ import annotations

import io
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from email.message import Message
from functools import partial
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from megatron_llama.data.words import is_url
from megatron_llama.errors import DataError

READ_BYTES = 1 << 17
"""Bytes of one request: a request costs a round trip, and every shard that is open holds as many
in memory."""
TRIES = 8
FIRST_PAUSE = 0.1
"""Seconds before the second try; twice as many before each that follows, 13 s before the last."""
TIMEOUT = 60.0
"""Seconds without a byte after which a request has failed."""
_FINAL = (400, 401, 403, 404, 405, 410, 416)
"""Answers of an HTTP server that do not change when the question is repeated."""
_VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "checksum", "blob_id"),
    *("LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created"),
)
"""Names that the stores of fsspec give to the version of a file, the best first."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class SourceFile:
    """A file of known size."""

    path: str
    """A path, or a URL."""
    size: int
    """Bytes."""
    version: str = ""
    """Mark of this version of a remote file: its ETag, or else its time. Empty: only the size is
    compared."""


def _is_http(name: str) -> bool:
    return name.startswith(("http://", "https://"))


class _ChangedError(Exception):
    """A file is not what it was."""


def read_range(file: SourceFile, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a remote file. Raises DataError when they cannot be read
    after several tries, or if the file has changed."""
    if start >= stop:
        return b""
    read = _http_range if _is_http(file.path) else _fsspec_range
    return _tried(f"{file.path}: bytes {start} to {stop}", partial(read, file, start, stop))


def _tried(where: str, read: Callable[[], Found]) -> Found:
    """Return the result of ``read``. Raises DataError when the last of several tries has failed, or
    at once where another try cannot help."""
    pause = FIRST_PAUSE
    for left in reversed(range(TRIES)):
        try:
            return read()
        except DataError:
            raise
        except _ChangedError as error:
            raise DataError(
                where,
                got=str(error),
                expected="the file as it was when the run began",
                do="restore it, or begin a run on the new one",
            ) from error
        except Exception as error:  # every store of fsspec has errors of its own
            if not left or not _may_pass(error):
                tries = f" after {TRIES} tries" if not left else ""
                raise DataError(
                    where,
                    got=f"{_reason(error)}{tries}",
                    expected="a server that answers",
                    do="check the URL, the server and your rights; --load goes on from the newest "
                    "checkpoint",
                ) from error
        time.sleep(pause)
        pause = 2 * pause
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code not in _FINAL
    final = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError)
    return not isinstance(error, final)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code} {error.reason}"
    return " ".join(str(error).split()) or type(error).__name__


def _http_range(file: SourceFile, start: int, stop: int) -> bytes:
    try:
        with _request(file.path, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            _require_ranges(file.path, answer)
            _require_same(file, SourceFile(file.path, _size(answer), _http_version(answer.headers)))
            content = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 416:
            got = f"a file that ends before byte {start} instead of {file.size} bytes"
            raise _ChangedError(got) from error
        raise
    if len(content) != stop - start:
        raise HTTPException(f"{len(content)} bytes instead of {stop - start}")
    return content


def _request(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    request = urllib.request.Request(url, headers=dict(headers))
    return cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT))


def _require_ranges(url: str, answer: HTTPResponse) -> None:
    if answer.status != 206:
        raise DataError(
            url,
            got=f"HTTP status {answer.status}: the server sends whole files only",
            expected="a server that answers requests for ranges of bytes (status 206)",
            do="serve the files with nginx, caddy or an object store, or copy them to a disk",
        )


def _size(answer: HTTPResponse) -> int:
    match = re.fullmatch(r"bytes \S+/(\d+)", answer.headers.get("Content-Range", ""))
    if match is None:
        raise HTTPException("an answer without the size of the file (Content-Range)")
    return int(match[1])


def _require_same(file: SourceFile, now: SourceFile | None) -> None:
    if now is None:
        raise _ChangedError("no file")
    if now.size != file.size:
        raise _ChangedError(f"a file of {now.size} bytes instead of {file.size}")
    if file.version and now.version != file.version:
        got = now.version or "without version"
        raise _ChangedError(f"another file of {file.size} bytes ({got}, it was {file.version})")


def _http_version(headers: Message) -> str:
    named = ((name, headers.get(name)) for name in ("ETag", "Last-Modified"))
    return next((f"{name} {value}" for name, value in named if value), "")


def find_file(url: str) -> SourceFile | None:
    """Return a remote file with its version; None if there is none of that name. Raises DataError
    if that cannot be found out."""
    return _tried(url, partial(_http_file if _is_http(url) else _fsspec_file, url))


def _http_file(url: str) -> SourceFile | None:
    try:
        with _request(url, {"Range": "bytes=0-0"}) as answer:
            _require_ranges(url, answer)
            return SourceFile(url, _size(answer), _http_version(answer.headers))
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == "bytes */0":
            return SourceFile(url, 0, _http_version(error.headers))
        if error.code in (404, 410):
            return None
        raise


def _fsspec_file(url: str) -> SourceFile | None:
    system, path = _file_system(url)
    system.invalidate_cache()  # a listing may be older than the file
    try:
        info = system.info(path)
    except FileNotFoundError:
        return None
    if info["type"] != "file":
        return None
    version = next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")
    return SourceFile(url, int(info["size"]), version)


def _http_size(url: str) -> int:
    file = _http_file(url)
    if file is None:
        raise urllib.error.HTTPError(url, 404, "Not Found", Message(), None)
    return file.size


def _fsspec_range(file: SourceFile, start: int, stop: int) -> bytes:
    system, path = _file_system(file.path)
    content: bytes = system.cat_file(path, start=start, end=stop)
    if len(content) != stop - start:
        raise _ChangedError(f"{len(content)} bytes, the file of {file.size} bytes ends there")
    if file.version:
        # A store answers without the version. If the version is the same after the answer, the
        # answer is of it.
        _require_same(file, _fsspec_file(file.path))
    return content


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DataError where a package
    is missing."""
    try:
        from fsspec.core import url_to_fs

        located: tuple[Any, str] = url_to_fs(url)
    except ImportError as error:
        raise DataError(
            url,
            got=str(error),
            expected="packages that read such a URL",
            do="pip install '.[fsspec]' and the package of the store, such as s3fs or gcsfs",
        ) from error
    except ValueError as error:
        do = "give a path, or a URL that fsspec knows"
        raise DataError(url, got=str(error), expected="a path or a URL", do=do) from error
    return located


def remote_files(name: str, pool: Executor) -> Iterator[tuple[str, SourceFile]]:
    """Yield every file behind a URL, in no order: its name relative to the folder, and the file.
    The URL names a file, a folder or (with ``*``, ``?`` or ``[``) several files. The threads of
    ``pool`` ask for sizes. Raises DataError."""
    if _is_http(name):
        yield from _http_files(name, pool)
        return
    yield from _tried(name, partial(_fsspec_files, name))


def _fsspec_files(name: str) -> list[tuple[str, SourceFile]]:
    system, path = _file_system(name)
    if re.search(r"[*?\[]", path):
        entries = system.glob(path, detail=True)
        base = re.split(r"[^/]*[*?\[]", path)[0]
    else:
        entries = system.find(path, detail=True)
        base = path if path not in entries else path.rpartition("/")[0]
    return [
        (
            entry.removeprefix(base).lstrip("/"),
            SourceFile(system.unstrip_protocol(entry), int(info["size"])),
        )
        for entry, info in entries.items()
        if info["type"] == "file"
    ]


class _Links(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _http_files(name: str, pool: Executor) -> Iterator[tuple[str, SourceFile]]:
    pattern = None
    folder = name
    if "*" in name:  # a ? or [ also stands in URLs with a query or an IPv6 address
        folder, _, names = name.rpartition("/")
        pattern = re.compile(".*".join(map(re.escape, names.split("*"))))
        if "*" in folder:
            do = "give a pattern for the last part alone"
            raise DataError(name, got="* in a folder", expected="* in file names", do=do)
    last = urllib.parse.urlparse(name).path.rpartition("/")[2]
    if pattern is None and "." in last:
        yield (
            urllib.parse.unquote(last),
            SourceFile(name, _tried(name, partial(_http_size, name))),
        )
        return
    base = folder.rstrip("/") + "/"
    urls = [url for url in _linked(base, base) if _chosen(url, base, pattern)]
    sizes = pool.map(lambda url: _tried(url, partial(_http_size, url)), urls)
    for url, size in zip(urls, sizes, strict=True):
        yield urllib.parse.unquote(url.removeprefix(base)), SourceFile(url, size)


def _chosen(url: str, base: str, pattern: re.Pattern[str] | None) -> bool:
    relative = urllib.parse.unquote(url.removeprefix(base))
    hidden = any(name.startswith(".") for name in relative.split("/"))
    return not hidden and (pattern is None or pattern.fullmatch(relative) is not None)


def _linked(base: str, folder: str) -> Iterator[str]:
    """Yield the files to which a folder's index page links, and those of the folders in it."""

    def page() -> str:
        try:
            with _request(folder, {}) as answer:
                return answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            if error.code not in (404, 410):
                raise
            raise DataError(
                folder,
                got=f"no such page ({_reason(error)})",
                expected="an index page with links to files of text, or for an indexed dataset the "
                "URL to which .idx and .bin can be added",
                do="check the URL",
            ) from error

    links = _Links()
    links.feed(_tried(folder, page))
    seen = set()
    for link in links.found:
        url = urllib.parse.urljoin(folder, link).partition("#")[0].partition("?")[0]
        if url in seen or url == folder or not url.startswith(folder):
            continue
        seen.add(url)
        if url.endswith("/"):
            yield from _linked(base, url)
        else:
            yield url


class _RemoteFile(io.RawIOBase):
    """A remote file with the interface of Python's files."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}
        self._at = begins[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._file.size)
        content = read_range(self._file, self._at, stop)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def open_source(file: SourceFile, buffered: int = READ_BYTES) -> BinaryIO:
    """Open a local or remote file for reading, with requests of ``buffered`` bytes. Reading raises
    OSError for a path, DataError for a URL."""
    if not is_url(file.path):
        return open(file.path, "rb")  # closed by the caller
    return cast(BinaryIO, io.BufferedReader(_RemoteFile(file), buffered))


def newlines_before(file: SourceFile, stop: int) -> int:
    """Count the line breaks in the first ``stop`` bytes of a file."""
    with open_source(file, 1 << 22) as stream:
        return sum(piece.count(b"\n") for piece in _pieces(stream, stop))


def _pieces(stream: IO[bytes], stop: int) -> Iterable[bytes]:
    while stop > 0 and (piece := stream.read(min(stop, 1 << 22))):
        yield piece
        stop -= len(piece)


def local_file(path: Path) -> SourceFile:
    """Return a file on the disk with its size. Raises DataError if it is not there."""
    try:
        return SourceFile(str(path), path.stat().st_size)
    except OSError as error:
        do = "check the path"
        raise DataError(path, got=error.strerror, expected="a file", do=do) from error
