"""Serve the playground on this machine: the page, and answers to its requests.

Only pages of the server itself can use it: it checks Host, so that no other name leads to it (DNS rebinding), and
Origin, so that no other page in the same browser can send requests.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from mini_gpt.pages.play.answers import Answers, Reply
from mini_gpt.runtime.errors import UserError

ADDRESS = "127.0.0.1"  # of this machine only
MOST_BYTES = 2**20  # of a request
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

log = logging.getLogger(__name__)


class Server:
    """The routes of the playground. port: on which it is reached."""

    def __init__(self, html: str, answers: Answers, port: int):
        self.html, self.answers = html, answers
        self.hosts = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
        self.lock = asyncio.Lock()  # the model computes for one request at a time
        routes = [Route("/", self.page), Route("/ask", self.ask, methods=["POST"])]
        self.app = Starlette(routes=routes)
        self.app.router.redirect_slashes = False  # a redirection would name the request's host

    async def page(self, request: Request) -> Response:
        refusal = self._refusal(request)
        return refusal or HTMLResponse(self.html, headers=HEADERS)

    async def ask(self, request: Request) -> Response:
        """Answer a request of worker.js with one reply a line."""
        if refusal := self._refusal(request) or self._foreign(request):
            return refusal
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return PlainTextResponse(f"a request has at most {MOST_BYTES} bytes", 413, headers=HEADERS)
        except ClientDisconnect:
            return PlainTextResponse("the whole request did not arrive", 408, headers=HEADERS)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return PlainTextResponse("the request is not JSON", 400, headers=HEADERS)
        if not isinstance(asked, dict):
            return PlainTextResponse("the request is not a JSON object", 400, headers=HEADERS)
        return StreamingResponse(self._lines(asked), media_type="application/x-ndjson", headers=HEADERS)

    async def _lines(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the replies as lines. Other requests may be answered between two replies."""
        lines = _written(self.answers.answer(asked))
        while True:
            async with self.lock:
                line = await run_in_threadpool(next, lines, None)
            if line is None:
                return
            yield line

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "").lower() in self.hosts:
            return None
        return PlainTextResponse("this host is not served", 403, headers=HEADERS)

    def _foreign(self, request: Request) -> Response | None:
        origins = set(request.headers.getlist("origin"))  # a browser sends one
        is_own = len(origins) == 1 and origins <= {f"http://{host}" for host in self.hosts}
        is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        return None if is_own and is_json else PlainTextResponse("only the page may ask", 403, headers=HEADERS)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return the HTTP server of an application."""
    return uvicorn.Server(uvicorn.Config(app, http="h11", log_level="warning"))


def _written(replies: Iterator[Reply]) -> Iterator[str]:
    """Yield replies as lines of JSON. An error becomes the last line."""
    try:
        for reply in replies:
            yield json.dumps(reply, default=_encoded, allow_nan=False) + "\n"
    except UserError as error:
        yield _refused(str(error))
    except Exception:  # such as too little memory on a GPU
        log.exception("An answer failed.")
        yield _refused("The server failed: see its log.")


def _refused(message: str) -> str:
    return json.dumps({"kind": "refused", "message": message}) + "\n"


def _encoded(value: Any) -> Any:
    """Return an array or a number of NumPy in types of JSON."""
    if isinstance(value, np.ndarray):
        name, form = ("int32", "<i4") if value.dtype.kind == "i" else ("float32", "<f4")
        return {name: base64.b64encode(value.astype(form).tobytes()).decode()}
    return value.item()
