"""A small Hub on loopback: what ``huggingface_hub`` needs to create, push to and read repositories.

It keeps commits and branches in memory and checks what the real one checks: tokens, namespaces,
private repositories, hashes of uploaded files, the branch a commit goes to. Weights and pictures
travel as LFS files, uploaded in two steps and served by redirect from another host name, where no
token may turn up. A request that it does not know is answered with 501 and noted in ``unknown``.

Not here: Xet storage (clients set ``HF_HUB_DISABLE_XET=1``), pull requests, tags, data sets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

#: As the .gitattributes of new repositories say.
LFS = ("*.safetensors", "*.bin", "*.pt", "*.png")
GITATTRIBUTES = "".join(f"{kind} filter=lfs diff=lfs merge=lfs -text\n" for kind in LFS).encode()


class Refusal(Exception):
    """An answer other than success.

    Args:
        status: of HTTP.
        message: for ``X-Error-Message`` and the body.
        code: for ``X-Error-Code``, by which the client tells kinds of 404.
        headers: further ones.
        body: further fields of the body.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None,
        headers: dict[str, str] | None = None, **body: Any,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.body = status, {"error": message, **body}
        self.headers = {"X-Error-Message": message.splitlines()[0], **(headers or {})}
        if code is not None:
            self.headers["X-Error-Code"] = code


class LineDropped(Exception):
    """The connection breaks instead of an answer."""


@dataclass
class Repository:
    """Branches and what lies in each commit."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        content = repr([branch, message, len(self.commits), sorted(files.items())]).encode()
        oid = hashlib.sha1(content).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return any(fnmatch(path, kind) for kind in LFS)


class Hub:
    """The server; ``with Hub() as hub: ... hub.endpoint``.

    Attributes:
        repositories: by ``owner/name``.
        tokens: what each token may write to: names of owners.
        faults: by route name (``ROUTES``), run before the route itself; they may raise ``Refusal``
            or ``LineDropped``, or take their time.
        log: ``(method, path, token)`` of every request.
        unknown: requests without a route.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.tokens: dict[str, tuple[str, ...]] = {}
        self.faults: dict[str, Callable[[Request], None]] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.unknown: list[str] = []
        self.lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        #: Where LFS files lie: the same server under the name of another.
        self.storage = f"http://localhost:{self.port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """What a reader finds, without .gitattributes."""
        repo = self.repositories[repository]
        found = repo.commits[repo.branches.get(revision, revision)]
        return {path: data for path, data in found.items() if path != ".gitattributes"}

    # -- rules -----------------------------------------------------------------------------------

    def owners(self, token: str | None) -> tuple[str, ...]:
        """Namespaces a token may write to.

        Raises:
            Refusal: there is no token, or an unknown one.
        """
        if token is None:
            raise Refusal(401, "Invalid username or password.")
        if token not in self.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.tokens[token]

    def readable(self, name: str, token: str | None) -> Repository:
        """A repository; to strangers, a private one looks as if it did not exist."""
        owners = self.owners(token) if token is not None else ()
        repo = self.repositories.get(name)
        if repo is None or (repo.private and name.split("/")[0] not in owners):
            status = 401 if token is None else 404
            raise Refusal(status, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, name: str, token: str | None) -> Repository:
        owners = self.owners(token)
        repo = self.readable(name, token)
        if name.split("/")[0] not in owners:
            raise Refusal(403, "Forbidden: pass `create_pr=1` as a query parameter")
        return repo

    def revision(self, repo: Repository, name: str) -> str:
        """The commit of a branch or commit hash."""
        oid = repo.branches.get(name, name)
        if oid not in repo.commits:
            raise Refusal(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return oid

    # -- routes: (request) -> (status, headers, body) ----------------------------------------------

    def whoami(self, request: Request) -> Answer:
        owners = self.owners(request.token)
        orgs = [{"name": name} for name in owners[1:]]
        return Answer.json({"name": owners[0], "type": "user", "orgs": orgs})

    def create(self, request: Request) -> Answer:
        wanted = request.json()
        owners = self.owners(request.token)
        owner = wanted.get("organization") or owners[0]
        name = f"{owner}/{wanted['name']}"
        url = f"{self.endpoint}/{name}"
        if owner not in owners:
            raise Refusal(
                403, f'You don\'t have the rights to create a model under the namespace "{owner}"'
            )
        if name in self.repositories:
            raise Refusal(409, "You already created this model repo", url=url)
        private = wanted.get("private") or wanted.get("visibility") == "private"
        repo = self.repositories[name] = Repository(private=bool(private))
        repo.commit("main", {".gitattributes": GITATTRIBUTES}, "initial commit")
        return Answer.json({"url": url, "name": name})

    def branch(self, request: Request, name: str, branch: str) -> Answer:
        repo = self.writable(name, request.token)
        if branch in repo.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        start = request.json().get("startingPoint", "main")
        repo.branches[branch] = self.revision(repo, start)
        return Answer.json({})

    def validate_yaml(self, request: Request) -> Answer:
        content = request.json()["content"]
        if not content.startswith("---\n"):
            return Answer.json({"errors": [], "warnings": [{"message": "empty metadata"}]})
        return Answer.json({"errors": [], "warnings": []})

    def preupload(self, request: Request, name: str, revision: str) -> Answer:
        repo = self.writable(name, request.token)
        present = repo.commits[self.revision(repo, revision)]
        answers = []
        for file in request.json()["files"]:
            path = file["path"]
            answer = {"path": path, "shouldIgnore": False, "oid": None}
            answer["uploadMode"] = "lfs" if is_lfs(path) else "regular"
            if path in present:
                data = present[path]
                answer["oid"] = hashlib.sha256(data).hexdigest() if is_lfs(path) else git_hash(data)
            answers.append(answer)
        return Answer.json({"files": answers})

    def lfs_batch(self, request: Request, name: str) -> Answer:
        self.writable(name, request.token)
        objects = []
        for wanted in request.json()["objects"]:
            oid = wanted["oid"]
            answer = {"oid": oid, "size": wanted["size"]}
            if oid not in self.blobs:
                answer["actions"] = {
                    "upload": {"href": f"{self.storage}/storage/{oid}"},
                    "verify": {"href": f"{self.endpoint}/{name}.git/info/lfs/verify"},
                }
            objects.append(answer)
        return Answer.json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refusal(400, "the content has another hash")
        self.blobs[oid] = request.body
        return Answer.json({})

    def lfs_verify(self, request: Request, name: str) -> Answer:
        self.writable(name, request.token)
        wanted = request.json()
        if len(self.blobs.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, "the file was not uploaded")
        return Answer.json({})

    def commit(self, request: Request, name: str, branch: str) -> Answer:
        repo = self.writable(name, request.token)
        if branch not in repo.branches:
            raise Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        lines = [json.loads(line) for line in request.body.splitlines()]
        assert lines[0]["key"] == "header"
        header = lines[0]["value"]
        if header.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
            raise Refusal(412, "A commit has happened since")
        files = dict(repo.commits[repo.branches[branch]])
        for line in lines[1:]:
            value, path = line["value"], line["value"]["path"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                files[path] = base64.b64decode(value["content"], validate=True)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.blobs:
                    raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {path}")
                files[path] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                if files.pop(path, None) is None:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise Refusal(400, f"unknown operation {line['key']!r}")
        oid = repo.commit(branch, files, header["summary"])
        url = f"{self.endpoint}/{name}/commit/{oid}"
        return Answer.json({"success": True, "commitOid": oid, "commitUrl": url})

    def info(self, request: Request, name: str, revision: str = "main") -> Answer:
        repo = self.readable(name, request.token)
        oid = self.revision(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[oid])]
        return Answer.json(
            {
                "_id": name, "id": name, "modelId": name, "sha": oid, "private": repo.private,
                "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                "siblings": siblings,
            }
        )  # fmt: skip

    def refs(self, request: Request, name: str) -> Answer:
        repo = self.readable(name, request.token)
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
            for branch, oid in repo.branches.items()
        ]
        return Answer.json({"branches": branches, "tags": [], "converts": []})

    def tree(self, request: Request, name: str, revision: str, folder: str = "") -> Answer:
        repo = self.readable(name, request.token)
        oid = self.revision(repo, revision)
        inside = f"{folder}/" if folder else ""
        found = {p: d for p, d in repo.commits[oid].items() if p.startswith(inside)}
        if folder and not found:
            raise Refusal(
                404, f"{folder} does not exist on {revision!r}", "EntryNotFound",
                {"X-Repo-Commit": oid},
            )  # fmt: skip
        entries: dict[str, dict[str, Any]] = {}
        for path, data in sorted(found.items()):
            parts = path.removeprefix(inside).split("/")
            for depth in range(1, len(parts)):
                above = inside + "/".join(parts[:depth])
                entries[above] = {
                    "type": "directory",
                    "path": above,
                    "oid": git_hash(b""),
                    "size": 0,
                }
            entry = {"type": "file", "path": path, "oid": git_hash(data), "size": len(data)}
            if is_lfs(path):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            entries[path] = entry
        rows = list(entries.values())
        if request.query.get("recursive", "").lower() not in ("true", "1"):
            rows = [row for row in rows if "/" not in row["path"].removeprefix(inside)]
        return Answer.json(rows)

    def resolve(self, request: Request, name: str, revision: str, path: str) -> Answer:
        repo = self.readable(name, request.token)
        oid = self.revision(repo, revision)
        headers = {"X-Repo-Commit": oid}
        if path not in repo.commits[oid]:
            raise Refusal(404, "Entry not found", "EntryNotFound", headers)
        data = repo.commits[oid][path]
        if not is_lfs(path):
            return Answer(200, {**headers, "ETag": f'"{git_hash(data)}"'}, data)
        digest = hashlib.sha256(data).hexdigest()
        headers |= {
            "Location": f"{self.storage}/storage/{digest}",
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(data)),
        }
        return Answer(302, headers, b"")

    def storage_read(self, request: Request, oid: str) -> Answer:
        if request.token is not None:
            raise Refusal(400, "a token was sent to the storage")
        if oid not in self.blobs:
            raise Refusal(404, "no such object")
        return Answer(200, {"ETag": f'"{oid}"'}, self.blobs[oid])


REPO, REV = r"([\w.-]+/[\w.-]+)", r"([^/]+)"
#: method, path, name of the handling method of Hub.
ROUTES = [
    (methods.split(), re.compile(path), name)
    for methods, path, name in [
        ("GET", "/api/whoami-v2", "whoami"),
        ("POST", "/api/repos/create", "create"),
        ("POST", "/api/validate-yaml", "validate_yaml"),
        ("POST", f"/api/models/{REPO}/branch/{REV}", "branch"),
        ("POST", f"/api/models/{REPO}/preupload/{REV}", "preupload"),
        ("POST", f"/api/models/{REPO}/commit/{REV}", "commit"),
        ("GET", f"/api/models/{REPO}/refs", "refs"),
        ("GET", f"/api/models/{REPO}/tree/{REV}", "tree"),
        ("GET", f"/api/models/{REPO}/tree/{REV}/(.+)", "tree"),
        ("GET", f"/api/models/{REPO}/revision/{REV}", "info"),
        ("GET", f"/api/models/{REPO}", "info"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("POST", rf"/{REPO}\.git/info/lfs/verify", "lfs_verify"),
        ("PUT", "/storage/([0-9a-f]{64})", "lfs_upload"),
        ("GET HEAD", "/storage/([0-9a-f]{64})", "storage_read"),
        ("GET HEAD", f"/{REPO}/resolve/{REV}/(.+)", "resolve"),
    ]
]


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    query: dict[str, str]
    token: str | None
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Answer:
    """What the server sends."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def json(cls, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
        headers = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        return cls(status, headers, json.dumps(data).encode())


class _Handler(BaseHTTPRequestHandler):
    """Parses a request, finds its route and sends the answer."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        query = dict(part.partition("=")[::2] for part in url.query.split("&"))
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        body = self._read_body()
        request = Request(
            self.command, url.path, query, token if scheme == "Bearer" else None, body
        )
        with self.hub.lock:
            self.hub.log.append((self.command, self.path, request.token))
        try:
            answer = self._route(request)
        except Refusal as refusal:
            answer = Answer.json(refusal.body, refusal.status, refusal.headers)
        except LineDropped:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def _route(self, request: Request) -> Answer:
        for methods, pattern, name in ROUTES:
            # Matched before unquoting: a quoted slash belongs to a revision.
            found = pattern.fullmatch(request.path)
            if found and request.method in methods:
                if name in self.hub.faults:
                    self.hub.faults[name](request)  # without the lock, since it may wait
                with self.hub.lock:
                    handle = getattr(self.hub, name)
                    answer: Answer = handle(request, *map(unquote, found.groups()))
                    return answer
        with self.hub.lock:
            self.hub.unknown.append(f"{request.method} {self.path}")
        raise Refusal(501, "this server of the tests does not know the request")

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the hub keeps a log."""
