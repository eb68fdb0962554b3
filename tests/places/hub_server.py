"""A small Hugging Face Hub on this machine: the requests of huggingface_hub that read, and those of an upload."""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

KINDS = ("models", "datasets")


@dataclasses.dataclass
class Repository:
    """commits: {commit: {name: content}}, in order; the last one is main."""

    commits: dict[str, dict[str, bytes]]
    is_gated: bool = False
    is_private: bool = False

    def at(self, revision: str) -> str | None:
        """Return the commit of a revision; None if there is none."""
        return [*self.commits][-1] if revision == "main" else revision if revision in self.commits else None


class Hub:
    """A Hub and its contents.

    repositories: {"datasets/OWNER/NAME" or "models/OWNER/NAME": repository}.
    asked: the requests, as METHOD PATH.
    refused: names of files that nobody may read.
    """

    token = "a-token"

    def __init__(self):
        self.repositories = dict[str, Repository]()
        self.asked, self.large = list[str](), dict[str, bytes]()
        self.refused, self.address = set[str](), ""

    def add(self, name: str, files: dict[str, bytes], **fields) -> str:
        """Add a commit to a repository, which is made if it is new. Return the commit."""
        repository = self.repositories.setdefault(name, Repository({}, **fields))
        listed = sorted((each, hashlib.sha256(content).hexdigest()) for each, content in files.items())
        commit = hashlib.sha1(repr((name, len(repository.commits), listed)).encode()).hexdigest()
        repository.commits[commit] = dict(files)
        return commit

    def find(self, path: str, prefix: str) -> tuple[Repository | None, str, list[str]]:
        """Return the repository that a path names, its name, and the rest of the path."""
        parts = path.removeprefix(prefix).strip("/").split("/")
        kind = parts.pop(0) if parts[0] in KINDS else "models"
        name = "/".join([kind, *parts[:2]])
        return self.repositories.get(name), name, parts[2:]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self, code: int, body: bytes | dict | list, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, code: int, kind: str) -> None:
        self.answer(code, {"error": kind}, X_Error_Code=kind, X_Error_Message=kind)

    @property
    def knows_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def do_GET(self):
        url = urlsplit(self.path)
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(url.path)
        repository, _, rest = self.hub.find(path, "/api" if path.startswith("/api/") else "")
        if repository is None or (repository.is_private and not self.knows_token):
            return self.fail(401 if not self.knows_token else 404, "RepoNotFound")
        action, *more = rest or ["revision", "main"]
        commit = repository.at(more[0])
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        files, below = repository.commits[commit], "/".join(more[1:])
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.answer(200, {"id": "a/b", "sha": commit, "siblings": siblings, "tags": []})
        if action == "tree":
            recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() in ("true", "1")
            listed = self.tree(files, below, recursive)
            return self.answer(200, listed) if listed or not below else self.fail(404, "EntryNotFound")
        if action == "resolve":
            if repository.is_gated and not self.knows_token:
                return self.fail(403, "GatedRepo")
            if below not in files:
                return self.fail(404, "EntryNotFound")
            if below in self.hub.refused:
                return self.fail(403, "Forbidden")
            tag = f'"{hashlib.sha256(files[below]).hexdigest()}"'
            return self.answer(200, files[below], ETag=tag, X_Repo_Commit=commit)
        self.fail(404, "EntryNotFound")

    do_HEAD = do_GET

    @staticmethod
    def tree(files: dict[str, bytes], below: str, recursive: bool) -> list[dict]:
        """Return files and folders below a folder, as the Hub lists them."""
        start, found = f"{below}/" if below else "", {}
        for name in files:
            if not name.startswith(start):
                continue
            parts = name.removeprefix(start).split("/")
            folders = [start + "/".join(parts[:count]) for count in range(1, len(parts))]
            for folder in folders if recursive else folders[:1]:
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            if recursive or not folders:
                oid = hashlib.sha1(files[name]).hexdigest()
                found[name] = {"type": "file", "path": name, "oid": oid, "size": len(files[name])}
        return [*found.values()]

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {self.path}")
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/paths-info/" in path:
            return self.answer_paths(path, parse_qs(body.decode())["paths"])
        if not self.knows_token:
            return self.fail(401, "Unauthorized")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"models/{asked['organization']}/{asked['name']}" if "organization" in asked else asked["name"]
            if name in self.hub.repositories:
                return self.answer(409, {"url": f"{self.hub.address}/{name.removeprefix('models/')}"})
            private = asked.get("private", asked.get("visibility") == "private")
            self.hub.add(name, {".gitattributes": b""}, is_private=private)
            return self.answer(200, {"url": f"{self.hub.address}/{name.removeprefix('models/')}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [{"oid": each["oid"], "size": each["size"]} for each in json.loads(body)["objects"]]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.hub.address}/store/{each['oid']}"}}
            content = {"transfer": "basic", "objects": objects}
            return self.answer(200, content, Content_Type="application/vnd.git-lfs+json")
        repository, name, rest = self.hub.find(path, "/api")
        if repository is None:
            return self.fail(404, "RepoNotFound")
        if rest[0] == "preupload":
            mode = lambda each: "lfs" if each["path"].endswith(".safetensors") else "regular"
            asked = json.loads(body)["files"]
            return self.answer(
                200, {"files": [{"path": e["path"], "uploadMode": mode(e), "shouldIgnore": False} for e in asked]}
            )
        if rest[0] == "commit":
            files = dict([*repository.commits.values()][-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
            commit = self.hub.add(name, files)
            url = f"{self.hub.address}/{name.removeprefix('models/')}/commit/{commit}"
            return self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url})
        self.fail(404, "EntryNotFound")

    def answer_paths(self, path: str, names: list[str]) -> None:
        """Answer with the files and folders of these names; older versions of huggingface_hub ask for them."""
        repository, _, (_, revision) = self.hub.find(path, "/api")
        commit = repository and repository.at(revision)
        if repository is None or commit is None:
            return self.fail(404, "RevisionNotFound" if repository else "RepoNotFound")
        listed = self.tree(repository.commits[commit], "", recursive=True)
        self.answer(200, [entry for entry in listed if entry["path"] in names])

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.large[self.path.rpartition("/")[2]] = content
        self.answer(200, b"", ETag='"x"')

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def running():
    """Yield a Hub that answers on loopback."""
    hub = Hub()
    handler = type("Handler", (Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
