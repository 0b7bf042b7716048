"""A PeftModel that is a part of a larger module: names, ties and dtypes are those of the model that owns the tensors. Case N11.
Unit layer."""

import pytest
import torch
from torch import nn

import lora_stream
from tests.architectures import ARCHITECTURES
from tests.models import fill, llama, with_lora

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")


class Policy(nn.Module):
    """As TRL's models with a value head are."""

    def __init__(self, llm):
        super().__init__()
        self.llm = llm
        self.value_head = nn.Linear(32, 1)


class WithCritic(nn.Module):
    def __init__(self, actor, critic):
        super().__init__()
        self.actor, self.critic = actor, critic


def streamed(model, **kwargs):
    return dict(lora_stream.stream(model, **kwargs))


def test_a_tie_that_adapters_break_is_refused_below_another_module():
    """Case N11."""
    policy = Policy(with_lora(llama(tied=True), target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ValueError, match="tied in this model's checkpoints"):
        streamed(policy)
    assert {"llm.lm_head.weight", "llm.model.embed_tokens.weight"} <= streamed(policy, untie=True).keys()


def test_a_tied_head_is_left_out_below_another_module():
    """Case N11."""
    model = with_lora(llama(tied=True))
    alone = streamed(model)
    below = streamed(Policy(model))
    assert below.keys() == {f"llm.{name}" for name in alone} | {"value_head.weight", "value_head.bias"}
    assert all(torch.equal(below[f"llm.{name}"], tensor) for name, tensor in alone.items())


def test_two_models_in_one_module_each_have_their_own_ties():
    """Case N11: a policy and its critic."""
    names = set(streamed(WithCritic(with_lora(llama(tied=True)), llama())))
    assert "actor.lm_head.weight" not in names
    assert "critic.lm_head.weight" in names


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_on_a_part_of_a_model_give_the_names_that_the_whole_writes(tmp_path, wrapped):
    """Case N11: PEFT on the language model of a vision model alone."""
    from safetensors import safe_open

    whole = ARCHITECTURES["gemma3"][0]()
    whole.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    whole.model.language_model = with_lora(whole.model.language_model, target_modules=["q_proj"], task_type=None)
    got = streamed(torch.compile(whole) if wrapped else whole, wire_dtype=None)
    assert got.keys() == written.keys()
    changed = {name for name, tensor in got.items() if not torch.equal(tensor, written[name])}
    assert changed == {name for name in written if "q_proj" in name and "vision" not in name}


def test_adapters_on_a_part_and_on_the_whole_are_streamed_alike():
    """Case N11."""
    torch.manual_seed(3)
    part = ARCHITECTURES["gemma3"][0]()
    torch.manual_seed(3)
    whole = with_lora(ARCHITECTURES["gemma3"][0](), target_modules=r".*language_model.*q_proj", task_type=None)
    part.model.language_model = with_lora(part.model.language_model, target_modules=["q_proj"], task_type=None)
    for model in (part, whole):
        torch.manual_seed(5)
        fill(model)
    got, want = streamed(part), streamed(whole)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_what_stays_in_float32_stays_so_below_another_module():
    """Case N11."""
    model = with_lora(llama())
    model.base_model.model._keep_in_fp32_modules_strict = ["norm"]
    below = streamed(Policy(model))
    assert below["llm.model.norm.weight"].dtype == torch.float32
    assert below["llm.model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
