"""A Hugging Face Hub on 127.0.0.1: the few endpoints that `datasets` and `huggingface_hub` need to read one.

It serves repositories held in memory and can cut connections, fail, or be away, as a test decides.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """The files of one commit. `kind` is datasets or models."""

    kind: str
    name: str
    commit: str
    files: dict[str, bytes] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        siblings = [{"rfilename": name} for name in self.files]
        return {
            "id": self.name,
            "sha": self.commit,
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
        }

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def folders(self) -> set[str]:
        parts = [name.split("/")[:-1] for name in self.files]
        return {"/".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)}

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
        """Return the entries of a folder, or None when there is no such folder."""
        if folder and folder not in self.folders():
            return None
        inside = f"{folder}/" if folder else ""
        entries = [
            {"type": "directory", "path": path, "size": 0, "oid": "0"} for path in sorted(self.folders())
        ]
        entries += [self.entry(name) for name in self.files]
        return [
            entry
            for entry in entries
            if entry["path"].startswith(inside) and (recursive or "/" not in entry["path"][len(inside) :])
        ]


class HubServer:
    """Serves repositories while it is entered. `requests` lists the paths asked for."""

    def __init__(self, *repositories: Repository) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self.cut: Callable[[str], bool] = lambda path: False
        """Whether to close the connection in the middle of the body of this answer."""
        self.away: Callable[[str], bool] = lambda path: False
        """Whether to close the connection without an answer."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def find(self, path: str) -> tuple[Repository, str] | None:
        """Return the repository that a path is about and the rest of the path."""
        for repository in self.repositories:
            prefixes = [f"/api/{repository.kind}/{repository.name}"]
            prefixes.append(
                f"/{repository.name}" if repository.kind == "models" else f"/datasets/{repository.name}"
            )
            for prefix in prefixes:
                if path == prefix or path.startswith(f"{prefix}/"):
                    return repository, path.removeprefix(prefix).strip("/")
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.away(path):
            self.close_connection = True
            return
        found = self.hub.find(path)
        if found is None:
            self._missing("RepoNotFound")
            return
        repository, rest = found
        verb, _, rest = rest.partition("/")
        revision, _, name = rest.partition("/")
        if revision and revision not in ("main", repository.commit):
            self._missing("RevisionNotFound")
        elif verb in ("", "revision"):
            self._send_json(repository.info())
        elif verb == "tree":
            entries = repository.tree(
                name, "recursive=True" in parts.query or "recursive=true" in parts.query
            )
            self._missing("EntryNotFound") if entries is None else self._send_json(entries)
        elif verb == "paths-info":
            length = int(self.headers.get("Content-Length", 0))
            wanted = json.loads(self.rfile.read(length))["paths"]
            self._send_json([repository.entry(path) for path in wanted if path in repository.files])
        elif verb == "resolve" and name in repository.files:
            self._send_file(repository, name, path)
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET
    do_POST = do_GET

    def _missing(self, code: str) -> None:
        self._send(404, b'{"error": "not here"}', {"X-Error-Code": code, "X-Error-Message": "not here"})

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repository: Repository, name: str, path: str) -> None:
        content = repository.files[name]
        headers = {
            "X-Repo-Commit": repository.commit,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status = 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, status = content[int(first) : stop], 206
        self._send(status, content, headers, cut=self.command == "GET" and self.hub.cut(path))

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass
