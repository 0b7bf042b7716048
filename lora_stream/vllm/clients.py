"""What reaches an engine in other processes: its weight-transfer calls, and what must be done around an update.

    LLMClient     a vllm.LLM of this process whose engine core runs in another
    ServerClient  a vLLM server's RL routes, over HTTP
    RayClient     actors that wrap a vLLM engine
    or any object with vLLM's four calls and reset_prefix_cache() -> bool

Imports no vLLM: the process of a trainer need not have it.
"""

import inspect
import time
from typing import Protocol

from lora_stream.vllm.channel import Client


class EngineClient(Client, Protocol):
    """The four calls, and what must be done around an update: one that meets a running request kills the engine.

    It may have a method num_workers(), how many workers its calls reach in all, or an attribute num_engines.
    """

    def is_still(self) -> bool:
        """Whether the engine computes nothing by itself now, because somebody paused it, or it sleeps, or it never does.
        Raises ValueError where it must be idle and is not."""

    def pause(self) -> None:
        """Hold it still, its requests kept, the caches of the old policy dropped."""

    def resume(self) -> None:
        """Undo pause()."""

    def reset_prefix_cache(self) -> bool:
        """Drop what was computed with old weights; False if something still holds it."""


class LLMClient:
    """A vllm.LLM: it computes only while it is called, so it needs no pause, but it must be idle."""

    def __init__(self, llm) -> None:
        self._llm = llm

    def num_workers(self) -> int:
        return self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def is_still(self) -> bool:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ValueError("the engine has unfinished requests; finish or abort them before a sync")
        return True

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()


class ServerClient:
    """A vLLM server, by its RL routes (VLLM_SERVER_DEV_MODE=1).

    Those routes let anybody who reaches them stop the engine and replace its weights: they must not face a network. What
    the sender tells the server, the name of its shared memory above all, goes to this address alone: no proxy is used,
    no redirect is followed.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0, api_key: str | None = None) -> None:
        """url: "http://127.0.0.1:8000". timeout_s: for each answer, in seconds; loading weights may take longer."""
        try:
            import httpx
        except ImportError as error:
            raise ImportError("a sync over HTTP needs httpx: pip install 'lora_stream[server]'") from error
        self._httpx = httpx
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            base_url=self._url, timeout=timeout_s, headers=headers, trust_env=False, follow_redirects=False
        )

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._again("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._once("POST", "/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        # The ring's deadlines watch over this call, which lasts as long as the loading does.
        self._once("POST", "/update_weights", json={"update_info": update_info}, timeout=None)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._once("POST", "/finish_weight_update", json={"weight_version": weight_version})

    def num_workers(self) -> int:
        return self._again("GET", "/get_world_size")["world_size"]

    def is_still(self) -> bool:
        # A sleeping engine schedules nothing, and resuming it would: parts of it may still be asleep.
        return self._again("GET", "/is_sleeping")["is_sleeping"] or self._again("GET", "/is_paused")["is_paused"]

    def pause(self) -> None:
        self._again("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    def resume(self) -> None:
        self._again("POST", "/resume")

    def reset_prefix_cache(self) -> bool:
        # Whoever paused it may have left requests with keys and values of the old policy: they compute theirs anew.
        self._again("POST", "/reset_encoder_cache")
        return self._again("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})["success"]

    def _again(self, method: str, route: str, **content) -> dict:
        """A request that does no harm twice: it is sent again where the connection broke."""
        for seconds in (0.1, 0.5):
            try:
                return self._once(method, route, **content)
            except ConnectionError as error:
                if not isinstance(error.__cause__, self._httpx.TransportError):
                    raise
                time.sleep(seconds)
        return self._once(method, route, **content)

    def _once(self, method: str, route: str, **content) -> dict:
        try:
            answer = self._http.request(method, route, **content)
        except self._httpx.HTTPError as error:
            raise ConnectionError(f"{method} {self._url}{route}: {error or type(error).__name__}") from error
        if answer.status_code == 404:
            raise ConnectionError(
                f"{method} {self._url}{route}: not found; start the server with VLLM_SERVER_DEV_MODE=1 for its RL routes, "
                "and keep it off any network"
            )
        if not answer.is_success:
            raise RuntimeError(f"{method} {self._url}{route}: {answer.status_code}: {answer.text[:2000]}")
        return answer.json() if answer.content else {}


class RayClient:
    """Ray actors, each with a vLLM engine (``AsyncLLM`` or ``LLM``) whose methods they pass on; all get the same weights.

    Actors that have pause_generation and resume_generation are paused with their requests kept, others must be idle.
    """

    def __init__(self, handles: list) -> None:
        self._handles = handles
        self.num_engines = len(handles)

    def _call(self, method: str, *args, **kwargs) -> list:
        import ray

        return ray.get([getattr(handle, method).remote(*args, **kwargs) for handle in self._handles])

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._call("init_weight_transfer_engine", _request("WeightTransferInitRequest", init_info=init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self._call("update_weights", _request("WeightTransferUpdateRequest", update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        if weight_version is not None:
            self._call("update_weight_version", weight_version)

    def is_still(self) -> bool:
        can_pause = all(hasattr(handle, "pause_generation") for handle in self._handles)
        return not can_pause or all(self._call("is_paused"))

    def pause(self) -> None:
        self._call("pause_generation", mode="keep", clear_cache=True)

    def resume(self) -> None:
        self._call("resume_generation")

    def reset_prefix_cache(self) -> bool:
        return all(self._call("reset_prefix_cache"))


def _request(name: str, **content):
    """vLLM's request object, which its asynchronous engine asks for."""
    from vllm.distributed.weight_transfer import base

    return getattr(base, name)(**content)


class CallsClient:
    """An object with vLLM's four calls and reset_prefix_cache(); is_paused(), pause() and resume() where it has them."""

    def __init__(self, client: Client) -> None:
        if inspect.iscoroutinefunction(client.init_weight_transfer_engine):
            raise ValueError(
                f"the calls of {type(client).__name__} are coroutines, and a sync waits for them; pass a client that runs "
                "them in the engine's event loop: asyncio.run_coroutine_threadsafe(coroutine, loop).result()"
            )
        if not hasattr(client, "reset_prefix_cache"):
            raise ValueError(
                f"{type(client).__name__} has no reset_prefix_cache(), so the engine would answer new policies from old "
                "caches: add one that returns whether it succeeded"
            )
        self._client = client

    def __getattr__(self, name: str):
        return getattr(self._client, name)

    def is_still(self) -> bool:
        return not hasattr(self._client, "pause") or (hasattr(self._client, "is_paused") and self._client.is_paused())
