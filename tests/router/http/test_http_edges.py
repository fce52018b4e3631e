"""What surrounds the routes: errors, hang-ups, slow readers, keys, names, health, metrics."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest
from http_server import HttpServer, serve_http
from prometheus_client.parser import text_string_to_metric_families

LONG = {"prompt": "count on", "max_tokens": 400}


def error_of(answer: httpx.Response) -> dict[str, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "literal"), [("temperature", "NaN"), ("top_p", "NaN"), ("presence_penalty", "Infinity")]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_sv04_non_finite_literals_are_refused_by_name(server: HttpServer, path: str, field: str, literal: str) -> None:
    body = f'{{"prompt": "a", "messages": [{{"role": "user", "content": "a"}}], "{field}": {literal}}}'
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": 500}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": [99999999, 1], "echo": True}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_values_are_refused_by_name_in_the_openai_form(
    server: HttpServer, change: dict[str, object], param: str
) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | change)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": "a"', b"\xff"])
def test_malformed_bodies_are_refused(server: HttpServer, body: bytes) -> None:
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_unknown_model_route_and_method(server: HttpServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody/knows", prompt="a")
    assert caught.value.code == "model_not_found"
    assert server.http.get("/v1/models/nobody/knows").status_code == 404
    assert error_of(server.http.get("/nothing"))["type"] == "invalid_request_error"
    assert server.http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(server: HttpServer, chunked: bool) -> None:
    size = server.settings.max_request_bytes + 1
    content = iter([b"x" * 65536] * (size // 65536 + 1)) if chunked else b"x" * size
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == 413
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_scheduler_is_429_with_retry_after(server: HttpServer, stream: bool) -> None:
    server.fail("full", after_tokens=0, code=8, message="queue is full", retry_after_ms=2500)
    answer = server.http.post("/v1/completions", json=LONG | {"stream": stream}, headers={"x-request-id": "full"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert error_of(answer)["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_error_in_a_stream_is_one_event_without_done(server: HttpServer, path: str) -> None:
    server.fail("broken", after_tokens=5, code=13, message="the model broke")
    body = LONG | {"messages": [{"role": "user", "content": "a b c d e f"}], "stream": True}
    lines = [json.loads(line) for line in server.stream_lines(path, body, {"x-request-id": "broken"})]
    assert "the model broke" in lines[-1]["error"]["message"]
    assert all("error" not in line for line in lines[:-1])
    assert len(lines) > 2


def test_ab01_hang_up_without_stream_aborts(server: HttpServer) -> None:
    server.wait_idle()
    aborted = server.scheduler.num_aborted
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=LONG | {"ignore_eos": True}, timeout=httpx.Timeout(10, read=0.2))
    server.wait_for(lambda: server.scheduler.num_aborted == aborted + 1)
    server.wait_idle()
    steps = server.scheduler.num_steps
    assert server.http.get("/health/live").status_code == 200
    assert server.scheduler.num_steps == steps


@pytest.mark.parametrize("prompt", ["count on", ["count on", "count off"]])
def test_ab02_hang_up_in_a_stream_aborts_all_its_prompts(server: HttpServer, prompt: str | list[str]) -> None:
    server.wait_idle()
    aborted = server.scheduler.num_aborted
    body = LONG | {"prompt": prompt, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wanted = aborted + (1 if isinstance(prompt, str) else 2)
    server.wait_for(lambda: server.scheduler.num_aborted == wanted)
    server.wait_idle()


def test_ab05_equal_request_ids_are_independent(server: HttpServer) -> None:
    async def both() -> tuple[str, str]:
        headers = {"x-request-id": "twin"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http:
            one, two, cut = await asyncio.gather(
                http.post("/v1/completions", json={"prompt": "left", "max_tokens": 60}),
                http.post("/v1/completions", json={"prompt": "right", "max_tokens": 60}),
                http.post("/v1/completions", json=LONG, timeout=0.05),
                return_exceptions=True,
            )
            again = await http.post("/v1/completions", json={"prompt": "left", "max_tokens": 60})
        assert isinstance(cut, httpx.TimeoutException)
        assert isinstance(one, httpx.Response)
        assert isinstance(two, httpx.Response)
        assert one.json()["id"] != two.json()["id"]
        assert again.json()["choices"][0]["text"] == one.json()["choices"][0]["text"]
        return one.json()["choices"][0]["text"], two.json()["choices"][0]["text"]

    left, right = asyncio.run(both())
    assert left == "left" * 60
    assert right == "right" * 60
    server.wait_idle()


def test_st05_a_slow_reader_gets_all_of_the_text_or_an_error(server: HttpServer) -> None:
    body = json.dumps(LONG | {"stream": True, "ignore_eos": True, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(30)
        connection.sendall(head.encode() + body)
        received = connection.recv(1024)
        server.wait_idle()  # the scheduler is done long before this reader is
        quick = server.http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 3})
        assert quick.json()["choices"][0]["text"] == "quickquickquick"
        while part := connection.recv(1 << 16):
            received += part
    assert b"data: [DONE]" in received or b'"error"' in received


def test_request_id_is_echoed_or_drawn(server: HttpServer) -> None:
    assert server.http.get("/health/live", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    refused = server.http.post("/v1/completions", content=b"{", headers={"x-request-id": "mine-too"})
    assert refused.headers["x-request-id"] == "mine-too"
    for unusable in ("", "a b", "x" * 200):
        drawn = server.http.get("/health/live", headers={"x-request-id": unusable}).headers["x-request-id"]
        assert len(drawn) == 32
    assert len(server.http.get("/nothing").headers["x-request-id"]) == 32


def test_models_are_listed_and_found(client: openai.OpenAI, server: HttpServer) -> None:
    (card,) = client.models.list().data
    assert card.id == server.model
    assert client.models.retrieve(card.id).created == card.created
    assert card.max_model_len == server.max_model_len  # type: ignore[attr-defined]


def test_tokenizer_routes_are_each_others_inverse(server: HttpServer) -> None:
    text = "Grüße, 世界 😀"
    tokenized = server.http.post("/tokenize", json={"prompt": text}).json()
    assert tokenized["tokens"] == server.ids(text)
    assert tokenized["count"] == len(tokenized["tokens"])
    assert server.http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["count"] > 3
    assert server.http.post("/tokenize", json={}).status_code == 400
    for unusable in (-1, 99_999_999):
        refused = server.http.post("/detokenize", json={"tokens": [unusable]})
        assert refused.status_code == 400
        assert str(error_of(refused)["param"]).startswith("tokens")


def test_metrics_are_prometheus_text(server: HttpServer) -> None:
    server.http.get("/health/live")
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    routes = {sample.labels["route"] for sample in families["pagemill:http_requests"].samples}
    assert "/health/live" in routes
    assert "pagemill:num_requests_running" in families


def test_readiness_names_what_is_missing() -> None:
    with serve_http(with_scheduler=False) as alone:
        for path in ("/health", "/health/ready"):
            answer = alone.http.get(path)
            assert answer.status_code == 503
            assert answer.json()["status"] == "not ready"
            assert answer.json()["missing"]
        assert alone.http.get("/health/live").status_code == 200
        refused = alone.http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


def test_a_draining_router_is_not_ready_and_takes_nothing_new() -> None:
    with serve_http() as leaving:
        leaving.parts.pipeline.begin_drain()
        answer = leaving.http.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert leaving.http.get("/health/live").status_code == 200
        refused = leaving.http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1


def test_a_bug_shows_its_place_in_the_log_and_nothing_else(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.parts.pipeline, "models", broken)
    answer = server.http.get("/v1/models", headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert "find-me" in str(error_of(answer)["message"])
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_readiness_when_all_is_there(server: HttpServer) -> None:
    answer = server.http.get("/health/ready")
    assert (answer.status_code, answer.json()["status"], answer.json()["missing"]) == (200, "ready", [])
    assert server.http.get("/version").json()["version"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[HttpServer]:
    with serve_http(api_key="sesame") as running:
        yield running


def test_op10_the_key_guards_every_route_but_health(guarded: HttpServer) -> None:
    routes = [(method, path) for path, methods in guarded.routes() for method in methods]
    assert ("POST", "/v1/completions") in routes
    assert ("GET", "/openapi.json") in routes
    wrong: list[dict[str, str]] = [{}, {"authorization": "Bearer sesam"}, {"authorization": "Basic sesame"}]
    for method, path in [*routes, ("GET", "/nothing"), ("OPTIONS", "/v1/completions"), ("GET", "//health")]:
        for headers in wrong:
            answer = guarded.http.request(method, path.replace("{model_id:path}", "x"), headers=headers)
            if path.startswith("/health"):
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                assert error_of(answer)["code"] == "invalid_api_key"
            assert "sesame" not in answer.text + str(answer.headers)


def test_op10_the_right_key_opens(guarded: HttpServer) -> None:
    right = openai.OpenAI(base_url=guarded.url + "/v1", api_key="sesame", max_retries=0)
    assert right.completions.create(model=guarded.model, prompt="ab", max_tokens=1).choices[0].text
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded.url + "/v1", api_key="EMPTY", max_retries=0).models.list()
