"""What reaches an engine: a server's routes over HTTP, Ray actors, a client of one's own. Unit layer; the HTTP server is a
real one that says what the test tells it to."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx", reason="httpx is not installed")

import lora_stream
from lora_stream.engines import by_url, engine_of
from lora_stream.vllm.clients import CallsClient, RayClient, ServerClient


class Server(ThreadingHTTPServer):
    """Answers each route with what `routes` holds: a list of answers that are used up but for the last."""

    daemon_threads = True

    def __init__(self):
        self.routes, self.seen = {}, []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        route, _, query = self.path.partition("?")
        self.server.seen.append((self.command, route, query, json.loads(body) if body else None, dict(self.headers)))
        answers = self.server.routes.get(route, [(404, {"detail": "Not Found"})])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "drop":
            self.close_connection = True
            return
        if answer == "hang":
            time.sleep(2)
            return
        status, content, *headers = answer
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    started = Server()
    yield started
    started.shutdown()
    started.server_close()


OK = [(200, {"message": "done"})]


def test_each_call_goes_to_its_route_with_vllms_body(server):
    server.routes = dict.fromkeys(
        ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"], OK
    )
    server.routes |= {"/pause": OK, "/resume": OK, "/reset_encoder_cache": OK}
    server.routes["/reset_prefix_cache"] = [(200, {"success": False})]
    server.routes["/is_sleeping"] = [(200, {"is_sleeping": False})]
    server.routes["/is_paused"] = [(200, {"is_paused": True})]
    server.routes["/get_world_size"] = [(200, {"world_size": 4})]
    client = ServerClient(server.url + "/")
    client.init_weight_transfer_engine({"region": "r"})
    client.start_weight_update()
    client.update_weights({"generation": 3})
    client.finish_weight_update("v7")
    client.pause()
    client.resume()
    assert client.reset_prefix_cache() is False
    assert client.is_still() is True
    assert client.num_workers() == 4
    assert [seen[:4] for seen in server.seen] == [
        ("POST", "/init_weight_transfer_engine", "", {"init_info": {"region": "r"}}),
        ("POST", "/start_weight_update", "", None),
        ("POST", "/update_weights", "", {"update_info": {"generation": 3}}),
        ("POST", "/finish_weight_update", "", {"weight_version": "v7"}),
        ("POST", "/pause", "mode=keep&clear_cache=true", None),
        ("POST", "/resume", "", None),
        ("POST", "/reset_encoder_cache", "", None),
        ("POST", "/reset_prefix_cache", "reset_running_requests=true", None),
        ("GET", "/is_sleeping", "", None),
        ("GET", "/is_paused", "", None),
        ("GET", "/get_world_size", "", None),
    ]


def test_the_body_of_an_error_is_shown(server):
    server.routes["/update_weights"] = [(500, {"error": {"message": "layer 3 has another shape"}})]
    with pytest.raises(RuntimeError, match=r"POST http.*/update_weights: 500: .*layer 3 has another shape"):
        ServerClient(server.url).update_weights({})


def test_a_server_without_the_routes_says_how_to_get_them(server):
    with pytest.raises(ConnectionError, match=r"VLLM_SERVER_DEV_MODE=1 .* keep it off any network"):
        ServerClient(server.url).start_weight_update()
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("call", "route", "again"),
    [
        (lambda client: client.init_weight_transfer_engine({}), "/init_weight_transfer_engine", True),
        (lambda client: client.pause(), "/pause", True),
        (lambda client: client.resume(), "/resume", True),
        (lambda client: client.start_weight_update(), "/start_weight_update", False),
        (lambda client: client.update_weights({}), "/update_weights", False),
        (lambda client: client.finish_weight_update(), "/finish_weight_update", False),
    ],
)
def test_a_broken_connection_is_tried_again_only_where_twice_does_no_harm(server, call, route, again):
    server.routes[route] = ["drop", *OK]
    client = ServerClient(server.url)
    if again:
        call(client)
    else:
        with pytest.raises(ConnectionError, match=route):
            call(client)
    assert len(server.seen) == 1 + again


def test_a_server_that_stays_away_is_named(server):
    server.routes["/resume"] = ["drop"]
    with pytest.raises(ConnectionError, match=rf"POST {server.url}/resume"):
        ServerClient(server.url).resume()
    assert len(server.seen) == 3


def test_a_call_that_is_not_answered_ends_at_the_timeout_but_for_the_update(server):
    server.routes |= {"/start_weight_update": ["hang"], "/update_weights": ["hang"]}
    client = ServerClient(server.url, timeout_s=0.2)
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="/start_weight_update: timed out"):
        client.start_weight_update()
    assert time.monotonic() - begun < 1.5
    begun = time.monotonic()
    with pytest.raises(ConnectionError):  # the server drops it in the end
        client.update_weights({})
    assert time.monotonic() - begun > 1.5


def test_nothing_goes_to_a_proxy_or_to_where_a_redirect_points(server, monkeypatch):
    other = Server()
    monkeypatch.setenv("HTTP_PROXY", other.url)
    monkeypatch.setenv("ALL_PROXY", other.url)
    server.routes["/start_weight_update"] = [(307, {}, ("location", f"{other.url}/start_weight_update"))]
    with pytest.raises(RuntimeError, match="307"):
        ServerClient(server.url).start_weight_update()
    assert len(server.seen) == 1
    assert other.seen == []
    other.shutdown()
    other.server_close()


def test_a_key_goes_along(server):
    server.routes["/start_weight_update"] = OK
    ServerClient(server.url, api_key="secret").start_weight_update()
    assert server.seen[0][4]["Authorization"] == "Bearer secret"


def test_a_sleeping_server_is_not_asked_to_pause(server):
    server.routes["/is_sleeping"] = [(200, {"is_sleeping": True})]
    assert ServerClient(server.url).is_still()


def test_a_url_stands_for_one_client():
    one = by_url("http://127.0.0.1:1")
    assert isinstance(one, ServerClient)
    assert by_url("http://127.0.0.1:1") is one
    assert by_url("http://127.0.0.1:2") is not one
    assert by_url(one) is one


# -- Ray --


class Actor:
    """An actor handle: methods with .remote, whose results ray.get fetches."""

    def __init__(self, **methods):
        self.calls = []
        for name, result in methods.items():
            setattr(self, name, SimpleNamespace(remote=self._method(name, result)))

    def _method(self, name, result):
        def remote(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return SimpleNamespace(value=result)

        return remote


@pytest.fixture
def ray(monkeypatch):
    module = SimpleNamespace(get=lambda references: [reference.value for reference in references])
    monkeypatch.setitem(sys.modules, "ray", module)
    request = SimpleNamespace(
        WeightTransferInitRequest=lambda **fields: ("init", fields),
        WeightTransferUpdateRequest=lambda **fields: ("update", fields),
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", SimpleNamespace(base=request))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", request)
    return module


CALLS = dict.fromkeys(
    ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"], None
)


def test_all_actors_are_driven_as_one(ray):
    asynchronous = {"pause_generation": None, "resume_generation": None, "update_weight_version": None}
    actors = [Actor(**CALLS, **asynchronous, is_paused=i == 0, reset_prefix_cache=i == 0) for i in range(2)]
    client = RayClient(actors)
    assert client.is_still() is False
    client.pause()
    client.init_weight_transfer_engine({"region": "r"})
    client.start_weight_update()
    client.update_weights({"generation": 2})
    client.finish_weight_update("v3")
    assert client.reset_prefix_cache() is False
    client.resume()
    for actor in actors:
        assert actor.calls == [
            ("is_paused", (), {}),
            ("pause_generation", (), {"mode": "keep", "clear_cache": True}),
            ("init_weight_transfer_engine", (("init", {"init_info": {"region": "r"}}),), {}),
            ("start_weight_update", (), {}),
            ("update_weights", (("update", {"update_info": {"generation": 2}}),), {}),
            ("finish_weight_update", (), {}),
            ("update_weight_version", ("v3",), {}),
            ("reset_prefix_cache", (), {}),
            ("resume_generation", (), {}),
        ]


def test_actors_that_cannot_pause_are_taken_as_idle(ray):
    actor = Actor(**CALLS, reset_prefix_cache=True)
    client = RayClient([actor])
    assert client.is_still()
    client.finish_weight_update()
    assert [name for name, _, _ in actor.calls] == ["finish_weight_update"]


# -- a client of one's own --


def test_a_client_without_pause_is_taken_as_idle():
    own = SimpleNamespace(**dict.fromkeys(CALLS, lambda *a: None), reset_prefix_cache=lambda: True)
    assert CallsClient(own).is_still()


def test_a_client_with_pause_is_paused_unless_it_says_that_it_is():
    calls = []
    own = SimpleNamespace(
        **dict.fromkeys(CALLS, lambda *a: None),
        reset_prefix_cache=lambda: True,
        pause=lambda: calls.append("pause"),
        resume=lambda: calls.append("resume"),
    )
    assert not CallsClient(own).is_still()
    own.is_paused = lambda: True
    assert CallsClient(own).is_still()
    CallsClient(own).pause()
    CallsClient(own).resume()
    assert calls == ["pause", "resume"]


def test_a_client_of_coroutines_is_refused_with_what_to_do():
    class AsyncEngine:
        async def init_weight_transfer_engine(self, init_info): ...
        async def start_weight_update(self): ...
        async def update_weights(self, update_info): ...
        async def finish_weight_update(self, weight_version=None): ...
        async def reset_prefix_cache(self): ...

    with pytest.raises(ValueError, match=r"AsyncEngine are coroutines.*run_coroutine_threadsafe"):
        engine_of(AsyncEngine())


def test_what_is_no_engine_is_refused_with_what_is():
    with pytest.raises(ValueError, match=r"the URL of a vLLM server.*got builtins\.object"):
        engine_of(object())


def test_missing_httpx_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"pip install 'lora_stream\[server\]'"):
        lora_stream.ServerClient("http://127.0.0.1:1")
