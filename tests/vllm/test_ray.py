"""`sync` into engines that Ray actors wrap, on a real local Ray. vllm layer; skipped where Ray is not installed."""

import json
import os
import sys

import pytest

from tests.peers import COMMON, ROOT

sys.path.append(str(COMMON))  # last: what is there is for who finds it nowhere else

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")
pytest.importorskip("ray", reason="Ray is not installed; tests/unit/test_clients.py has the calls")

import ray
import torch
from transformers import AutoModelForCausalLM

import lora_stream
from tests.models import fill, sent, with_lora
from tests.vllm import live

pytestmark = pytest.mark.vllm


class Rollout:
    """An engine in an actor, its methods passed on."""

    def __init__(self, directory):
        from tests.vllm import live

        self.live = live
        self.llm = live.make_llm(directory, "bfloat16", weight_transfer_config={"backend": "lora_stream"})

    def init_weight_transfer_engine(self, request):
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, request):
        self.llm.update_weights(request)

    def finish_weight_update(self):
        self.llm.finish_weight_update()

    def update_weight_version(self, version):
        self.llm.update_weight_version(version)

    def reset_prefix_cache(self):
        return self.llm.reset_prefix_cache()

    def answers(self):
        return self.llm.get_weight_version(), self.live.logprobs(self.llm)


@pytest.fixture
def local_ray(monkeypatch):
    environment = {"PYTHONPATH": f"{ROOT}:{COMMON}", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])  # for Ray's own processes
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {**environment, "VLLM_CPU_KVCACHE_SPACE": os.environ["VLLM_CPU_KVCACHE_SPACE"]}},
    )
    yield
    ray.shutdown()


def test_all_actors_get_the_policy_from_one_pass(local_ray, tmp_path):
    base = tmp_path / "base"
    live.save_base(torch.bfloat16, True, base)
    model = with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval())
    actors = [ray.remote(num_cpus=1)(Rollout).remote(str(base)) for _ in range(2)]
    _, before = ray.get(actors[0].answers.remote())
    lora_stream.sync(model, actors[0])  # an actor stands for itself
    both = lora_stream.RayClient(actors)
    assert lora_stream.sync(model, both).scope == "all"
    fill(model)
    assert lora_stream.sync(model, both, weight_version="9").scope == "trained"
    one, other = ray.get([actor.answers.remote() for actor in actors])
    assert one == other
    version, synced = one
    assert version == "9"
    assert synced != before
    merged = live.save_merged(base, sent(model), tmp_path / "merged")
    ray.shutdown()
    assert json.loads(json.dumps(synced)) == live.logprobs_in_a_process(merged, torch.bfloat16)
