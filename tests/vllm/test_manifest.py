"""What the engine could not load is refused by name, before a weight moves. vllm layer."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch

import lora_stream
from lora_stream.plan import ParamMeta
from lora_stream.vllm.manifest import check_manifest
from tests.models import with_lora
from tests.vllm.live import logprobs

pytestmark = pytest.mark.vllm

Q, K, V = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv")


@pytest.fixture
def worker(setup):
    return setup.llm.llm_engine.model_executor.driver_worker.worker


@pytest.fixture
def check(setup, worker):
    model = worker.model_runner.get_model()
    return lambda metadata: check_manifest(model, worker.vllm_config, metadata)


@pytest.fixture
def metadata(setup):
    return lora_stream.MergedWeights(with_lora(setup.base()), wire_dtype=setup.dtype).metadata()


def snapshot(model):
    return {
        n: (p.data_ptr(), tuple(p.shape), sorted(vars(p))) for n, p in model.named_parameters(remove_duplicate=False)
    }


def test_a_complete_manifest_is_accepted_and_changes_nothing(check, metadata, worker, setup):
    before, old = snapshot(worker.model_runner.get_model()), logprobs(setup.llm)
    check(metadata)
    check(metadata)
    assert snapshot(worker.model_runner.get_model()) == before
    assert logprobs(setup.llm) == old


def changed(metadata, name, **change):
    return [meta._replace(**change) if meta.name == name else meta for meta in metadata]


def without(metadata, *names):
    return [meta for meta in metadata if meta.name not in names]


WRONG = {
    "unknown name": (
        lambda m: [*m, ParamMeta("model.layers.0.bogus.weight", m[0].dtype, (3, 3))],
        r"model\.layers\.0\.bogus",
    ),
    # vLLM ignores these two without a word.
    "unknown bias": (
        lambda m: [*m, ParamMeta("model.layers.0.mlp.down_proj.bias", m[0].dtype, (128,))],
        r"down_proj\.bias: no parameter",
    ),
    "rotary buffer": (
        lambda m: [*m, ParamMeta("model.layers.0.self_attn.rotary_emb.inv_freq", m[0].dtype, (16,))],
        r"inv_freq: no parameter",
    ),
    "PEFT name": (
        lambda m: [*m, ParamMeta("model.layers.0.self_attn.q_proj.base_layer.weight", m[0].dtype, (128, 128))],
        r"base_layer",
    ),
    # vLLM takes the first rows and drops the others.
    "too many rows": (lambda m: changed(m, K, shape=(128, 128)), rf"{K}: .*take only"),
    "too few rows": (lambda m: changed(m, V, shape=(5, 128)), rf"{V}:"),
    "too few columns": (lambda m: changed(m, Q, shape=(128, 64)), rf"{Q}:"),
    "wrong norm": (lambda m: changed(m, "model.norm.weight", shape=(5,)), r"model\.norm\.weight"),
    "wrong vocabulary": (
        lambda m: changed(m, "model.embed_tokens.weight", shape=(1000, 128)),
        r"model\.embed_tokens\.weight",
    ),
    # vLLM fills the gap with uninitialised memory.
    "k missing": (lambda m: without(m, K), r"layers\.0\.self_attn\.qkv_proj: .*q_proj\.weight, .*fill only"),
    "q and v alone": (lambda m: [meta for meta in m if meta.name in (Q, V)], r"qkv_proj: .*fill only"),
    "up missing": (
        lambda m: without(m, "model.layers.1.mlp.up_proj.weight"),
        r"layers\.1\.mlp\.gate_up_proj: .*fill only",
    ),
    "q twice for k": (
        lambda m: [*without(m, K, V), next(meta for meta in m if meta.name == Q)],
        rf"{Q}: comes twice",
    ),
    "other dtype": (lambda m: [meta._replace(dtype=torch.float16) for meta in m], "computes in"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_manifests_are_refused_by_name_and_the_engine_is_untouched(kind, check, metadata, worker, setup):
    make, message = WRONG[kind]
    before, old = snapshot(worker.model_runner.get_model()), logprobs(setup.llm)
    with pytest.raises(ValueError, match=message):
        check(make(metadata))
    assert snapshot(worker.model_runner.get_model()) == before
    assert logprobs(setup.llm) == old
    check(metadata)


def test_a_bias_without_its_weight_is_refused(check, metadata, setup):
    biases = [meta for meta in metadata if meta.name.endswith("bias")]
    if not biases:
        assert setup.base().config.tie_word_embeddings  # the other setup has them
        return
    with pytest.raises(ValueError, match="fill only"):
        check(biases)
    with pytest.raises(ValueError, match="fill only"):
        check(without(metadata, "model.layers.0.self_attn.k_proj.bias"))


def test_a_head_that_the_engine_ties_is_refused(check, metadata, setup):
    """Loaded, it would overwrite the shared embedding."""
    config = setup.base().config
    head = ParamMeta("lm_head.weight", setup.dtype, (config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings:
        with pytest.raises(ValueError, match=r"lm_head\.weight: .*tied"):
            check([*metadata, head])
    else:
        assert head in metadata


def test_a_checkpoint_that_was_quantised_beforehand_is_refused(worker, metadata):
    """A stand-in for the engine's config: no quantised engine runs on the CPU here."""
    model = worker.model_runner.get_model()
    config = SimpleNamespace(
        model_config=worker.vllm_config.model_config,
        parallel_config=worker.vllm_config.parallel_config,
        quant_config=SimpleNamespace(get_name=lambda: "gptq"),
    )
    other = [*metadata, metadata[0]._replace(name="not.accepted.before")]
    with pytest.raises(ValueError, match=r"quantised beforehand \(gptq\)"):
        check_manifest(model, config, other)


def test_a_stream_that_yields_other_than_announced_leaves_the_old_weights(setup, worker, metadata):
    from functools import partial

    from lora_stream.vllm import llm as module

    model = with_lora(setup.base())
    lora_stream.sync(model, setup.llm, full=True)
    old = logprobs(setup.llm)
    items = list(lora_stream.stream(model, wire_dtype=setup.dtype))
    name, tensor = items[0]
    for wrong in ([(name, tensor[:5]), *items[1:]], [("other", tensor), *items[1:]], items[:0]):
        with pytest.raises(Exception, match="announced"):
            setup.llm.collective_rpc(partial(module._load, metadata=metadata, weights=iter(wrong)))
        assert logprobs(setup.llm) == old


def test_registering_the_plugin_again_is_harmless():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lora_stream.vllm.plugin import register

    register()
    register()
    assert "lora_stream" in WeightTransferEngineFactory._registry
