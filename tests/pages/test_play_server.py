"""The playground's server answers its own page only, within limits."""

import asyncio
import base64
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt.commands import play as command
from mini_gpt.config import loading
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.evaluation.perplexity import make_nll_fn
from mini_gpt.evaluation.scoring import score_tokens
from mini_gpt.pages import document
from mini_gpt.pages.play import pack, page, server
from mini_gpt.pages.play.answers import Answers
from mini_gpt.pages.play.page import Shown
from mini_gpt.runtime.errors import UserError
from tests.pages import node
from tests.random_models import random_model

ENGINES = document.modules(page.PAGE.parent / "view/engines.js")
RUN = {"kind": "run", "model": 0, "tokens": [100, 101, 102, 103], "edits": {}, "ask": {"top": 3, "lens": 1}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve a small model; return its port and the model."""
    fields = {"model.num_layers": 2, "model.d_model": 16, "model.num_heads": 2, "context_length": 32}
    tokenizer = ByteTokenizer()
    model = random_model(loading.load("configs/default.py", fields | {"model.dtype": "float32"}), tokenizer.token_bytes)
    connection = command._listening(0)
    port = connection.getsockname()[1]
    runs = [Shown("run", 3, model)]
    html = page.play(runs, tokenizer, "def f(x):", title="a served run", served=True)
    app = server.Server(html, Answers([model], page.most_tokens(runs)), port).app
    running = server.make_server(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [connection]})
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield port, model
    running.should_exit = True
    thread.join(10)


def send(port, body, **headers):
    """Post a request to /ask; return the status and the text."""
    given = {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    connection.request("POST", "/ask", data, {name: value for name, value in (given | headers).items() if value})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_a_run_is_answered_with_the_model_s_losses(served):
    port, model = served
    status, text = send(port, RUN)
    reply = json.loads(text)
    assert status == 200 and (reply["kind"], reply["length"], reply["layers"]) == ("result", 4, 2)
    nll = np.frombuffer(base64.b64decode(reply["nll"]["float32"]), "<f4")
    expected = score_tokens(make_nll_fn(model), np.array(RUN["tokens"]), window=4, stride=4, batch_size=1)
    np.testing.assert_allclose(nll[1:], expected, atol=1e-4)
    assert np.isnan(nll[0])
    assert np.frombuffer(base64.b64decode(reply["next"]["tokens"]["int32"]), "<i4").shape == (12,)


def test_generation_is_answered_line_by_line(served):
    request = {"kind": "generate", "model": 0, "tokens": [100], "count": 3, "temperature": 0}
    status, text = send(served[0], request)
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert status == 200 and kinds == ["token", "token", "token", "done"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "example.org"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Origin": None},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ],
    ids=str,
)
def test_other_hosts_and_other_pages_are_refused(served, headers):
    assert send(served[0], RUN, **headers)[0] == 403


def test_the_page_is_refused_under_another_name(served):
    for host, status in {
        f"localhost:{served[0]}": 200,
        f"127.0.0.1:{served[0]}": 200,
        f"evil.test:{served[0]}": 403,
    }.items():
        connection = http.client.HTTPConnection("127.0.0.1", served[0], timeout=60)
        connection.request("GET", "/", headers={"Host": host})
        response = connection.getresponse()
        assert response.status == status
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        response.read()


@pytest.mark.parametrize(
    "body, status",
    [("{", 400), ("[1]", 400), ("[" * 100_000, 400), (b"\xff\xfe", 400), ('{"x": "' + "a" * 2**20 + '"}', 413)],
    ids=["broken", "list", "deep", "bytes", "large"],
)
def test_bodies_of_another_form_are_refused(served, body, status):
    assert send(served[0], body)[0] == status


def test_a_refusal_is_a_reply(served):
    _, text = send(served[0], RUN | {"tokens": []})
    assert json.loads(text) == {"kind": "refused", "message": "The text is empty: type at least one token."}
    assert send(served[0], RUN)[0] == 200


def test_a_generation_lets_other_requests_in_between():
    """The lock is free between two replies."""
    order = []

    class Slow:
        def answer(self, request):
            for n in range(3):
                order.append((request["name"], n))
                yield {"n": n}

    async def both():
        both_served = server.Server("", Slow(), 1)

        async def read(name):
            async for _ in both_served._lines({"name": name}):
                await asyncio.sleep(0.01)

        await asyncio.gather(read("a"), read("b"))

    asyncio.run(both())
    assert order.index(("b", 0)) < order.index(("a", 2))


class Failing:
    def answer(self, request):
        yield {"kind": "token", "token": 1, "probability": float(request["probability"])}
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.parametrize("probability, count", [("1", 2), ("nan", 1)])
def test_a_failure_is_logged_and_refused(caplog, probability, count):
    async def read():
        return [line async for line in server.Server("", Failing(), 1)._lines({"probability": probability})]

    lines = asyncio.run(read())
    assert len(lines) == count
    assert json.loads(lines[-1]) == {"kind": "refused", "message": "The server failed: see its log."}
    [record] = caplog.records
    assert record.exc_info is not None and record.levelname == "ERROR"


REPLIES = """(async () => {
  globalThis.fetch = async () => new Response(given.text, { status: given.status });
  const replies = [];
  served().send({ kind: "run", model: 0 }, (reply) => replies.push(reply));
  await new Promise((done) => setTimeout(done, 100));
  return replies;
})()"""


ASKED = """(async () => {
  const sent = [];
  const send = (request, onReply) => {
    sent.push(request);
    onReply?.({ kind: "sent" });
  };
  start({ send }, given.configs);
  const asked = given.requests.map((request) => ask(request));
  return [await Promise.all(asked), sent.length];
})()"""


def test_impossible_edits_do_not_reach_the_engine_or_the_server(served):
    config = pack.described(served[1])["config"]
    requests = [RUN | {"edits": edits} for edits in ({"temperature": -1}, {}, {"heads": {"2.0": "off"}})]
    requests += [{"kind": "generate", "model": 0, "edits": {"mask": "no"}}, {"kind": "cancel", "model": 0}]
    replies, count = node.evaluate(ENGINES, ASKED, {"configs": [config], "requests": requests})
    assert [reply and reply["kind"] for reply in replies] == ["refused", "sent", "refused", "refused", None]
    assert replies[0]["message"] == "The edit “temperature” can't have the value -1."
    assert count == 2, "a request that is possible, and the end of all"


def test_a_request_that_the_server_refuses_is_refused_on_the_page():
    [reply] = node.evaluate(ENGINES, REPLIES, {"status": 403, "text": "only the page may ask"})
    assert reply == {"kind": "refused", "message": "The server refuses the request: only the page may ask."}


def test_each_line_of_an_answer_is_a_reply():
    text = '{"kind":"token"}\n{"kind":"done"}'
    replies = node.evaluate(ENGINES, REPLIES, {"status": 200, "text": text})
    assert replies == [json.loads(line) for line in text.splitlines()]


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="give another port"):
            command._listening(taken.getsockname()[1])


def test_only_this_machine_is_listened_to():
    with command._listening(0) as connection:
        assert connection.getsockname()[0] == "127.0.0.1"
        socket.create_connection(connection.getsockname()).close()  # it waits until the server runs


@pytest.mark.slow
def test_the_served_page_shows_the_losses_of_the_model(served, browser):
    port, model = served
    browser.get(f"http://127.0.0.1:{port}/")
    until = lambda condition: WebDriverWait(browser, 60).until(lambda _: condition())
    until(lambda: browser.execute_script("return document.documentElement.dataset.busy === 'no'"))
    tokens = ByteTokenizer().encode("def f(x):")
    nll = score_tokens(make_nll_fn(model), tokens, window=len(tokens), stride=len(tokens), batch_size=1)
    assert f"{nll.mean():.3f}" in browser.find_element(By.ID, "said").text
    assert browser.get_log("browser") == []
