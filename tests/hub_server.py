"""A Hugging Face Hub on loopback: the part of its protocol that `huggingface_hub` uses to push and load, in memory.

Models and datasets; commits, branches, tags and revisions; files beside the commit or through LFS, as the real Hub asks for
them. A client needs `HF_ENDPOINT=http://127.0.0.1:PORT`, any `HF_TOKEN` and `HF_HUB_DISABLE_XET=1` before it imports
`huggingface_hub`: `LoopbackHub.environment` gives them. Paths that are not served answer 404 and say so.
"""

import base64
import fnmatch
import hashlib
import itertools
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

KINDS = {"models": "model", "datasets": "dataset"}
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.parquet")
USER = "me"
DATE = "2026-01-01T00:00:00.000Z"


class HubError(Exception):
    """An answer that the client turns into its own exception by the name in a header."""

    def __init__(self, status: int, name: str, message: str, headers: dict | None = None, content: dict | None = None):
        super().__init__(message)
        self.status = status
        self.content = {"error": message, **(content or {})}
        self.headers = {"X-Error-Code": name, "X-Error-Message": message, **(headers or {})}


@dataclass(frozen=True)
class StoredFile:
    """Content, and its sha256 if it came through LFS."""

    data: bytes
    lfs: str | None = None

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.lfs or self.git_oid

    def describe(self, path: str) -> dict:
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.git_oid}
        if self.lfs:
            entry["lfs"] = {"oid": self.lfs, "size": len(self.data), "pointerSize": 134}
        return entry


@dataclass
class Repository:
    """Commits by their sha, each a whole tree; branches and tags name commits."""

    kind: str
    name: str
    private: bool
    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    history: list[tuple[str, str]] = field(default_factory=list)
    counter: itertools.count = field(default_factory=itertools.count)

    def commit(self, branch: str, files: dict[str, StoredFile], title: str) -> str:
        sha = hashlib.sha1(f"{self.kind}/{self.name}/{next(self.counter)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.history.insert(0, (sha, title))
        return sha

    def resolve(self, revision: str) -> str:
        revision = unquote(revision)
        sha = self.branches.get(revision) or self.tags.get(revision)
        sha = sha or (revision if revision in self.commits else None)
        if sha is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def info(self, sha: str) -> dict:
        return {
            **{"_id": "0" * 24, "id": self.name, "modelId": self.name, "author": self.name.split("/")[0], "sha": sha},
            **{"private": self.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []},
            **{"lastModified": DATE, "createdAt": DATE},
            "siblings": [{"rfilename": path} for path in sorted(self.commits[sha])],
        }


class LoopbackHub:
    """The server and what it holds. A context manager; `requests` lists `(method, path)` in the order of arrival."""

    def __init__(self):
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a client with an empty cache of its own under `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": "hf_loopback",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_DATASETS_CACHE": str(home / "datasets"),
        }

    def files(self, name: str, revision: str = "main", kind: str = "model") -> dict[str, bytes]:
        """What a repository holds, by path."""
        repository = self.repositories[kind, name]
        return {path: file.data for path, file in repository.commits[repository.resolve(revision)].items()}

    def find(self, kind: str, name: str) -> Repository:
        if (kind, name) not in self.repositories:
            raise HubError(404, "RepoNotFound", f"Repository not found: {name}")
        return self.repositories[kind, name]


class Handler(BaseHTTPRequestHandler):
    """One request: reads it whole, finds the method of its route, answers what that returns as JSON."""

    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def log_message(self, *arguments) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._body = self._read()
        address = urlsplit(self.path)
        self._query = parse_qs(address.query)
        self.hub.requests.append((self.command, address.path))
        try:
            with self.hub.lock:
                for pattern, method in ROUTES:
                    if match := re.fullmatch(pattern, address.path):
                        self._answer(200, method(self, **{k: unquote(v or "") for k, v in match.groupdict().items()}))
                        return
            raise HubError(404, "NotFound", f"{self.command} {address.path} is not served here")
        except HubError as error:
            self._answer(error.status, error.content, error.headers)

    do_POST = do_PUT = do_HEAD = do_DELETE = do_GET

    def _read(self) -> bytes:
        if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content, headers: dict | None = None) -> None:
        if isinstance(content, tuple):
            content, more = content
            headers = {**(headers or {}), **more}
            status = 206 if "Content-Range" in more else status
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        every = {"Content-Type": "application/json", "Content-Length": str(len(data)), "X-Request-Id": "0"}
        for name, value in {**every, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self) -> dict:
        return json.loads(self._body or b"{}")

    def who_am_i(self):
        token = {"displayName": "loopback", "role": "write"}
        return {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"accessToken": token}}

    def validate_card(self):
        return {"errors": [], "warnings": []}

    def create(self):
        wanted = self._json()
        kind, name = wanted.get("type") or "model", wanted["name"].split("/")[-1]
        name = f"{wanted.get('organization') or USER}/{name}"
        url = f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        answer = {"url": url, "name": name, "id": "0" * 24}
        if (kind, name) in self.hub.repositories:
            raise HubError(409, "Conflict", "You already created this repo", content=answer)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self.hub.repositories[kind, name] = Repository(kind, name, private)
        repository.commit("main", {}, "initial commit")
        return answer

    def put_lfs(self, oid):
        if hashlib.sha256(self._body).hexdigest() != oid:
            raise HubError(400, "BadRequest", "the content does not have the sha256 of its address")
        self.hub.lfs[oid] = self._body
        return {}

    def lfs_batch(self, **_):
        objects = []
        for wanted in self._json()["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.lfs:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/_lfs/{wanted['oid']}"}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def repository_info(self, kind, name, revision=""):
        repository = self.hub.find(KINDS[kind], name)
        return repository.info(repository.resolve(revision or "main"))

    def refs(self, kind, name):
        repository = self.hub.find(KINDS[kind], name)

        def listed(references, group):
            return [{"name": n, "ref": f"refs/{group}/{n}", "targetCommit": sha} for n, sha in references.items()]

        return {
            "branches": listed(repository.branches, "heads"),
            "tags": listed(repository.tags, "tags"),
            "converts": [],
        }

    def commits(self, kind, name, revision):
        history = self.hub.find(KINDS[kind], name).history
        listed = [{"id": sha, "title": t, "message": "", "authors": [], "date": DATE} for sha, t in history]
        return listed, {"X-Total-Count": str(len(listed))}

    def preupload(self, **_):
        def mode(path):
            return "lfs" if any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS) else "regular"

        files = self._json()["files"]
        return {"files": [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files]}

    def commit(self, kind, name, revision):
        repository = self.hub.find(KINDS[kind], name)
        head = repository.resolve(revision)
        files, title = dict(repository.commits[head]), ""
        for line in filter(None, map(bytes.strip, self._body.splitlines())):
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    title = value["summary"]
                    if value.get("parentCommit") not in (None, head):
                        raise HubError(412, "PreconditionFailed", "A commit has happened since.")
                case "file":
                    files[value["path"]] = StoredFile(base64.b64decode(value["content"]))
                case "lfsFile":
                    if value["oid"] not in self.hub.lfs:
                        raise HubError(400, "BadRequest", f"LFS object {value['oid']} was not uploaded")
                    files[value["path"]] = StoredFile(self.hub.lfs[value["oid"]], value["oid"])
                case "deletedFile":
                    files.pop(value["path"], None)
                case "deletedFolder":
                    folder = value["path"].rstrip("/") + "/"
                    files = {path: file for path, file in files.items() if not path.startswith(folder)}
        sha = repository.commit(unquote(revision), files, title)
        url = f"{self.hub.endpoint}/{name}/commit/{sha}"
        return {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""}

    def tree(self, kind, name, revision, folder=""):
        repository = self.hub.find(KINDS[kind], name)
        sha = repository.resolve(revision)
        recursive = self._query.get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        entries, folders = [], set()
        for path, file in sorted(repository.commits[sha].items()):
            if not path.startswith(prefix):
                continue
            first, *deeper = path[len(prefix) :].split("/")
            if deeper and not recursive:
                folders.add(prefix + first)
            else:
                entries.append(file.describe(path))
        if folder and not entries and not folders:
            raise HubError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        return [{"type": "directory", "path": p, "size": 0, "oid": "0" * 40} for p in sorted(folders)] + entries

    def paths_info(self, kind, name, revision):
        repository = self.hub.find(KINDS[kind], name)
        files = repository.commits[repository.resolve(revision)]
        if "json" in (self.headers.get("Content-Type") or ""):
            wanted = self._json()["paths"]
        else:
            wanted = parse_qs(self._body.decode()).get("paths", [])
        return [files[path].describe(path) for path in wanted if path in files]

    def branch(self, kind, name, branch):
        repository = self.hub.find(KINDS[kind], name)
        self._set_reference(repository.branches, branch, repository, self._json().get("startingPoint", "main"))
        return {}

    def tag(self, kind, name, revision):
        repository = self.hub.find(KINDS[kind], name)
        removing = self.command == "DELETE"
        self._set_reference(repository.tags, revision if removing else self._json()["tag"], repository, revision)
        return {}

    def _set_reference(self, references, name, repository, revision):
        if self.command == "DELETE":
            references.pop(name, None)
        elif name in references:
            raise HubError(409, "Conflict", "Reference already exists")
        else:
            references[name] = repository.resolve(revision)

    def resolve(self, kind, name, revision, path):
        repository = self.hub.find(KINDS[kind.strip("/") or "models"], name)
        sha = repository.resolve(revision)
        file = repository.commits[sha].get(path)
        if file is None:
            raise HubError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        if self.command == "GET" and (span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")):
            first, last = int(span[1]), int(span[2] or len(file.data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(file.data)}"
            return file.data[first : last + 1], headers
        return file.data, headers


_REPOSITORY = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = (
    (r"/api/whoami-v2", Handler.who_am_i),
    (r"/api/validate-yaml", Handler.validate_card),
    (r"/api/repos/create", Handler.create),
    (r"/_lfs/(?P<oid>\w+)", Handler.put_lfs),
    (r"/(?P<name>.+)\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (_REPOSITORY, Handler.repository_info),
    (rf"{_REPOSITORY}/revision/{_REVISION}", Handler.repository_info),
    (rf"{_REPOSITORY}/refs", Handler.refs),
    (rf"{_REPOSITORY}/commits/{_REVISION}", Handler.commits),
    (rf"{_REPOSITORY}/preupload/{_REVISION}", Handler.preupload),
    (rf"{_REPOSITORY}/commit/{_REVISION}", Handler.commit),
    (rf"{_REPOSITORY}/tree/{_REVISION}(?:/(?P<folder>.*))?", Handler.tree),
    (rf"{_REPOSITORY}/paths-info/{_REVISION}", Handler.paths_info),
    (rf"{_REPOSITORY}/branch/(?P<branch>.+)", Handler.branch),
    (rf"{_REPOSITORY}/tag/{_REVISION}", Handler.tag),
    (rf"/(?P<kind>(?:datasets/)?)(?P<name>[^/]+/[^/]+)/resolve/{_REVISION}/(?P<path>.+)", Handler.resolve),
)
