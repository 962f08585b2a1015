"""`/metrics` and `/dashboard` over HTTP: what is there, for whom, and when not."""

import socket
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import CONFIG, SETTINGS, Served, serving, wait_until
from wavegraph.builtin import builtin_path
from wavegraph.engine.engine import Engine
from wavegraph.server import dashboard
from wavegraph.server.settings import Settings
from wavegraph.startup.build import build_engine


def metric(server: Served, name: str, **labels: str) -> float:
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no {name} with {labels}")


def watch(port: int) -> socket.socket:
    """A page that listens to the feed, from its first event on."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: here\r\n\r\n")
    seen = b""
    while b"event: hello" not in seen:
        got = connection.recv(1 << 16)
        assert got, seen
        seen += got
    return connection


def test_metrics_count_what_was_asked_over_http(server: Served) -> None:
    names = ("wavegraph:generation_tokens_total", "wavegraph:time_to_first_token_seconds_count")
    before = [metric(server, name) for name in names]
    body = {"model": "builtin", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    assert [metric(server, name, model_name="builtin") for name in names] == [before[0] + 3, before[1] + 1]


def test_the_page_says_what_it_may_do(server: Served) -> None:
    status, headers, body = server.request("GET", "/dashboard")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert headers["content-security-policy"] == dashboard.CONTENT_SECURITY_POLICY
    assert body.decode() == dashboard.dashboard_page()


def test_a_page_that_leaves_is_forgotten(server: Served) -> None:
    for connection in [watch(server.port) for _ in range(3)]:
        connection.close()
    wait_until(lambda: not server.on_engine(lambda engine: engine.observers), "nobody watches")


def test_one_page_too_many_is_refused(server: Served) -> None:
    connections = [watch(server.port) for _ in range(dashboard.MAX_WATCHERS)]
    status, _, body = server.request("GET", "/dashboard/events")
    assert (status, b"close one" in body) == (503, True)
    for connection in connections:
        connection.close()
    wait_until(lambda: not server.on_engine(lambda engine: engine.observers), "nobody watches")


def test_the_feed_is_not_in_the_document(server: Served) -> None:
    _, _, body = server.request("GET", "/openapi.json")
    assert b"/metrics" in body
    assert b"/dashboard" not in body


def test_keys_guard_neither_and_the_page_can_be_left_out() -> None:
    settings = Settings(model_name="builtin", api_keys=("secret",), dashboard=False)
    with serving(settings) as server:
        server.do(server.engine.ready())
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("GET", "/metrics")[0] == 200
        for path in ("/dashboard", "/dashboard/events"):
            assert server.request("GET", path)[0] == 404


def test_before_the_start_and_after_a_failure_there_are_none() -> None:
    made, failing = Event(), Event()

    def build(**options: Any) -> Engine:
        assert made.wait(60)
        engine = build_engine(builtin_path(), CONFIG, **options)
        step = engine.step

        def maybe_step() -> Any:
            if failing.is_set():
                raise RuntimeError("the device is gone")
            return step()

        engine.step = maybe_step  # type: ignore[method-assign]
        return engine

    with serving(build=build) as server:
        assert server.request("GET", "/metrics")[0] == 503
        assert server.request("GET", "/dashboard/events")[0] == 503
        made.set()
        server.do(server.engine.ready())
        assert server.request("GET", "/metrics")[0] == 200
        connection = watch(server.port)
        failing.set()
        server.post("/v1/completions", {"model": SETTINGS.model_name, "prompt": [5, 6], "max_tokens": 3})
        seen = b""
        while got := connection.recv(1 << 16):
            seen += got
            if b"event: end" in seen:
                break
        assert b"event: end" in seen
        connection.close()
        assert server.request("GET", "/metrics")[0] == 503
        assert server.request("GET", "/dashboard/events")[0] == 503
        assert server.request("GET", "/dashboard")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/dashboard"])
def test_only_get(server: Served, path: str) -> None:
    assert server.post(path, {})[0] == 405
