"""`sync` into a live vllm.LLM, against engines that loaded the merged checkpoint from disk. vllm layer."""

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
from vllm import SamplingParams

import lora_stream
from tests.models import assert_same_state, fill, sent, state, with_lora
from tests.vllm.live import PROMPTS, logprobs, logprobs_in_a_process, save_merged

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(setup):
    return with_lora(setup.base())


def logprobs_from_disk(setup, model, tmp_path):
    """Of an engine that loads a checkpoint made of the same merged tensors."""
    merged = sent(model, wire_dtype=setup.dtype)
    return logprobs_in_a_process(save_merged(setup.directory, merged, tmp_path / "merged"), setup.dtype)


def as_json(found):
    return json.loads(json.dumps(found))


def test_synced_engine_computes_bitwise_what_one_from_disk_does_after_each_step(setup, model, tmp_path):
    base = logprobs(setup.llm)
    before = state(model)
    first_report = lora_stream.sync(model, setup.llm)
    assert_same_state(before, state(model))
    first = logprobs(setup.llm)
    assert first != base
    fill(model)  # the optimizer's step
    second_report = lora_stream.sync(model, setup.llm)
    second = logprobs(setup.llm)
    assert second != first
    assert (first_report.scope, second_report.scope) == ("all", "trained")
    assert second_report.num_bytes < first_report.num_bytes
    assert as_json(second) == logprobs_from_disk(setup, model, tmp_path)


def test_engine_and_trainer_agree_on_the_policy(setup, model):
    lora_stream.sync(model, setup.llm, full=True)
    with torch.no_grad():
        log_softmax = model(torch.tensor([PROMPTS[0]])).logits[0].float().log_softmax(-1)
    engine = [position[token] for position, token in zip(logprobs(setup.llm)[0], PROMPTS[0][1:], strict=True)]
    trainer = [log_softmax[i, token].item() for i, token in enumerate(PROMPTS[0][1:])]
    tolerance = 1e-4 if setup.dtype == torch.float32 else 0.15
    assert engine == pytest.approx(trainer, abs=tolerance)


@pytest.mark.parametrize("fail_at", [1, 5, "last"])
def test_a_source_that_fails_leaves_the_engine_on_its_old_weights_and_the_next_sync_works(setup, model, fail_at):
    lora_stream.sync(model, setup.llm, full=True, weight_version="old")
    old = logprobs(setup.llm)
    fill(model)
    seen = []

    def fail(meta, plan):
        seen.append(meta)
        if len(seen) == (len(plan.tasks) if fail_at == "last" else fail_at):
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match=r"trainer broke; the engine was put back on its old weights"):
        lora_stream.sync(model, setup.llm, on_tensor=fail, weight_version="new")
    assert logprobs(setup.llm) == old
    assert setup.llm.get_weight_version() == "old"
    lora_stream.sync(model, setup.llm, weight_version="new")
    new = logprobs(setup.llm)
    assert new != old
    lora_stream.sync(model, setup.llm, full=True, allow_unmoved=True)
    assert logprobs(setup.llm) == new


def test_an_interrupt_leaves_the_engine_on_its_old_weights_and_the_next_sync_works(setup, model):
    lora_stream.sync(model, setup.llm, full=True)
    old = logprobs(setup.llm)
    fill(model)
    seen = []

    def interrupt(meta, plan):
        seen.append(meta)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lora_stream.sync(model, setup.llm, on_tensor=interrupt)
    assert logprobs(setup.llm) == old
    lora_stream.sync(model, setup.llm)
    assert logprobs(setup.llm) != old


def test_a_non_finite_adapter_leaves_the_engine_on_its_old_weights(setup, model):
    lora_stream.sync(model, setup.llm, full=True)
    old = logprobs(setup.llm)
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    good = layer.lora_B["default"].weight.detach().clone()
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(lora_stream.SyncError, match=r"layers\.1\.mlp\.down_proj.*not finite"):
        lora_stream.sync(model, setup.llm)
    assert logprobs(setup.llm) == old
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(good)
    lora_stream.sync(model, setup.llm)
    assert logprobs(setup.llm) == old


def test_old_prefixes_are_forgotten(setup, model):
    """vLLM keeps the KV cache of old weights otherwise. Requests for prompt logprobs do not read it, so none here."""
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
    prompt = [{"prompt_token_ids": [i % 1000 for i in range(200)]}]

    def answer():
        (output,) = setup.llm.generate(prompt, sampling, use_tqdm=False)
        return output.num_cached_tokens, [next(iter(p.values())).logprob for p in output.outputs[0].logprobs]

    lora_stream.sync(model, setup.llm, full=True)
    answer()
    assert answer()[0] > 0, "the prefix cache is off, the test shows nothing"
    fill(model)
    lora_stream.sync(model, setup.llm)
    cached, after_sync = answer()
    assert cached == 0
    setup.llm.reset_prefix_cache()
    assert answer() == (0, after_sync)


def test_a_prefix_cache_that_cannot_be_reset_is_an_error(setup, model, monkeypatch):
    lora_stream.sync(model, setup.llm, full=True)
    fill(model)
    monkeypatch.setattr(setup.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(lora_stream.SyncError, match="could not reset its prefix cache"):
        lora_stream.sync(model, setup.llm)
    monkeypatch.undo()
    assert lora_stream.sync(model, setup.llm).scope == "all"


def test_outputs_carry_the_weight_version(setup, model):
    lora_stream.sync(model, setup.llm, full=True, weight_version="step-41")
    sampling = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
    (output,) = setup.llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    assert "step-41" in repr(output.outputs[0].weight_versions)


def test_an_engine_with_requests_in_flight_is_refused_untouched(setup, model):
    lora_stream.sync(model, setup.llm, full=True)
    old = logprobs(setup.llm)
    engine = setup.llm.llm_engine
    request = engine.add_request(
        "busy", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=50, detokenize=False)
    )
    fill(model)
    with pytest.raises(ValueError, match="unfinished requests"):
        lora_stream.sync(model, setup.llm)
    engine.abort_request([request or "busy"])
    while engine.has_unfinished_requests():
        engine.step()
    assert logprobs(setup.llm) == old
    lora_stream.sync(model, setup.llm)
    assert logprobs(setup.llm) != old


def test_an_engine_that_lost_its_weights_gets_all_of_them(setup, model):
    """As after sleep(level=2) on a GPU; on the CPU the weights survive it, so they are overwritten here."""
    lora_stream.sync(model, setup.llm, full=True)
    want = logprobs(setup.llm)
    engine_model = setup.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    with torch.no_grad():
        for parameter in engine_model.parameters():
            parameter.fill_(0.01)
    report = lora_stream.sync(model, setup.llm)
    assert report.scope == "all"
    assert logprobs(setup.llm) == want
    assert lora_stream.sync(model, setup.llm).scope == "trained"


def test_an_engine_that_was_reloaded_with_other_merged_targets_gets_everything(setup, model, tmp_path):
    """Case N13. Its norms and biases are the same as before."""
    lora_stream.sync(model, setup.llm)
    synced = logprobs(setup.llm)
    assert lora_stream.sync(model, setup.llm, allow_unmoved=True).scope == "trained"
    other = with_lora(setup.base(), target_modules=["o_proj", "down_proj"])
    path = save_merged(setup.directory, sent(other, wire_dtype=setup.dtype), tmp_path / "other")
    setup.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    setup.llm.reset_prefix_cache()
    assert logprobs(setup.llm) != synced
    assert lora_stream.sync(model, setup.llm, allow_unmoved=True).scope == "all"
    assert logprobs(setup.llm) == synced
    assert lora_stream.sync(model, setup.llm, allow_unmoved=True).scope == "trained"


def test_a_sleeping_engine_is_refused_until_its_weights_are_back(setup, model):
    lora_stream.sync(model, setup.llm, full=True)
    setup.llm.sleep(level=1)
    with pytest.raises(ValueError, match=r"sleeps.*wake_up\(tags="):
        lora_stream.sync(model, setup.llm)
    setup.llm.wake_up(tags=["weights"])
    lora_stream.sync(model, setup.llm)
    setup.llm.wake_up()
    assert logprobs(setup.llm)


def test_a_trained_tied_embedding_reaches_the_logits(setup, tmp_path):
    """On the CPU the tied head has a packed copy of its own, which loading the embedding alone would leave stale."""
    tied = setup.base().config.tie_word_embeddings
    extra = {"ensure_weight_tying": True} if tied else {}
    model = with_lora(setup.base(), modules_to_save=["embed_tokens"], **extra)
    embedding = model.get_base_model().model.embed_tokens.modules_to_save["default"]
    with torch.no_grad():
        embedding.weight.add_(torch.randn_like(embedding.weight) * 0.05)
    head = setup.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model().lm_head
    packed = head.cpu_linear
    lora_stream.sync(model, setup.llm, full=True)
    assert head.cpu_linear is not packed  # also where oneDNN on this processor happens to read the weight in place
    assert as_json(logprobs(setup.llm)) == logprobs_from_disk(setup, model, tmp_path)


def test_a_model_of_another_size_is_refused_untouched(setup, model):
    from transformers import AutoConfig, AutoModelForCausalLM

    lora_stream.sync(model, setup.llm, full=True)
    old = logprobs(setup.llm)
    config = AutoConfig.from_pretrained(setup.directory)
    config.intermediate_size = 96
    other = with_lora(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight"):
        lora_stream.sync(other, setup.llm)
    assert logprobs(setup.llm) == old
