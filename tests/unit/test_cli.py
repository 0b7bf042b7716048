"""The commands, as a user calls them. Unit layer; the demo runs in tests/vllm."""

import json

import pytest
from typer.testing import CliRunner

from lora_stream.cli import app
from tests.models import llama, qwen2, with_lora

runner = CliRunner(env={"COLUMNS": "200"})


def invoke(*args):
    return runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def directories(tmp_path):
    base = qwen2(tied=True)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path


def test_plan_of_an_adapter_counts_what_a_sync_would_do(directories):
    result = invoke("plan", directories / "adapter", "--scope", "trained", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)["summary"]
    assert summary["merged"]["tensors"] == 6
    assert summary["copied"]["tensors"] == 2 + 6  # k, and the biases of q, k, v
    assert summary["consumed"]["tensors"] == 12
    # q and v [32 + 16, 32], down [32, 48], in bfloat16, of two layers
    assert summary["merged"]["bytes"] == 2 * 2 * (48 * 32 + 32 * 48)


def test_plan_is_that_of_the_loaded_model(directories):
    import lora_stream

    shown = json.loads(invoke("plan", directories / "adapter", "--json").output)["account"]
    account = lora_stream.MergedWeights(with_lora(qwen2(tied=True))).plan.account
    assert shown == {fqn: list(entry) for fqn, entry in account.items()}


def test_plan_of_a_plain_model_and_for_people(directories):
    result = invoke("plan", directories / "base", "--names")
    assert result.exit_code == 0, result.output
    assert "copied" in result.output
    assert "model.embed_tokens.weight" in result.output
    assert "tied to model.embed_tokens.weight" in result.output


def test_plan_prints_the_account_with_a_line_for_each_kind_of_tensor(directories, tmp_path):
    result = invoke("plan", directories / "adapter")
    (line,) = [line for line in result.output.splitlines() if "q_proj.base_layer.weight" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "merged",
        "2",
        "base_model.model.model.layers.*.self_attn.q_proj.base_layer.weight",
        "model.layers.*.self_attn.q_proj.weight",
    ]
    by_name = invoke("plan", directories / "adapter", "--names").output
    assert "layers.1.self_attn.q_proj.base_layer.weight" in by_name
    assert "layers.*" not in by_name


def test_plan_counts_all_parts_of_a_tensor_that_checkpoints_split(tmp_path):
    from tests.architectures import ARCHITECTURES, build

    base = build("mixtral")
    base.save_pretrained(tmp_path / "base")
    _, modules, parameters = ARCHITECTURES["mixtral"]
    with_lora(base, target_modules=modules, target_parameters=parameters).save_pretrained(tmp_path / "adapter")
    shown = json.loads(invoke("plan", tmp_path / "adapter", "--base", tmp_path / "base", "--json").output)
    assert sum(entry["bytes"] for entry in shown["summary"].values()) == 2 * sum(
        p.numel() for p in build("mixtral").parameters()
    )
    ends = {why for fqn, (fate, why) in shown["account"].items() if fate == "consumed" and "experts" in fqn}
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight and 7 more" in ends


def test_plan_of_a_tied_pair_and_of_an_untied_engine(tmp_path):
    model = with_lora(llama(tied=True), target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    llama(tied=True).save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    account = json.loads(invoke("plan", tmp_path / "adapter", "--base", tmp_path / "base", "--json").output)["account"]
    assert account["base_model.model.lm_head.base_layer.weight"] == ["left", "tied to model.embed_tokens.weight"]
    both = json.loads(invoke("plan", tmp_path / "adapter", "--base", tmp_path / "base", "--json", "--untie").output)
    assert both["account"]["base_model.model.lm_head.base_layer.weight"] == ["merged", "lm_head.weight"]


def test_plan_shows_a_refusal_and_fails(directories, tmp_path):
    with_lora(llama(), alora_invocation_tokens=[1]).save_pretrained(tmp_path / "alora")
    result = invoke("plan", tmp_path / "alora", "--base", directories / "base")
    assert result.exit_code == 1
    assert "refused" in result.output
    assert "alora_invocation_tokens=[1]" in result.output
    assert (
        "alora_invocation_tokens=[1]"
        in json.loads(invoke("plan", tmp_path / "alora", "--base", directories / "base", "--json").output)["refused"]
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config", "has no config.json"), ("base", "is no local directory")],
)
def test_plan_says_which_file_it_misses(directories, tmp_path, missing, message):
    target = tmp_path / "empty"
    target.mkdir()
    if missing == "base":
        target = directories / "adapter"
        config = json.loads((target / "adapter_config.json").read_text())
        (target / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/model"}))
    result = invoke("plan", target)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_doctor_tells_kernel_engine_and_limits_each_with_advice():
    findings = {finding["what"]: finding for finding in json.loads(invoke("doctor", "--json").output)}
    assert {"torch", "CPU kernel", "CUDA kernel", "vLLM", "locked memory", "/dev/shm"} <= findings.keys()
    assert "in use" in findings["CPU kernel"]["found"]
    assert all(finding["advice"] for finding in findings.values() if not finding["ok"])
    assert invoke("doctor").exit_code == 0


def test_doctor_sees_what_keeps_the_plugin_out(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    findings = {finding["what"]: finding for finding in json.loads(invoke("doctor", "--json").output)}
    assert not findings["vLLM plugin"]["ok"]
    assert "add lora_stream" in findings["vLLM plugin"]["advice"]
    monkeypatch.setenv("LORA_STREAM_CPU", "nonsense")
    findings = {finding["what"]: finding for finding in json.loads(invoke("doctor", "--json").output)}
    assert "LORA_STREAM_CPU=nonsense" in findings["CPU kernel"]["advice"]


# -- merge and inspect ---------------------------------------------------------------------------------------------------


def test_merge_writes_the_checkpoint_and_says_what_it_did(directories, tmp_path):
    out = tmp_path / "out"
    result = invoke("merge", directories / "adapter", "--base", directories / "base", "--out", out, "--with-adapter")
    assert result.exit_code == 0, result.output
    assert "adapter default, r=4, lora_alpha=32" in " ".join(result.output.replace("│", " ").split())
    assert (out / "model.safetensors").exists()
    assert (out / "lora_adapter" / "adapter_config.json").exists()


def test_merge_for_scripts_is_one_json_object_and_an_exit_status(directories, tmp_path):
    arguments = ["merge", directories / "adapter", "--base", directories / "base", "--out", tmp_path / "out", "--json"]
    result = invoke(*arguments, "--dtype", "float32", "--max-shard-size", "30KB")
    found = json.loads(result.stdout)
    assert (found["r"], found["lora_alpha"], found["dtype"], found["kind"]) == (4, 32, "float32", "PEFT adapter")
    assert "model.safetensors.index.json" in found["files"]
    again = invoke(*arguments)
    assert again.exit_code == 1
    assert "is there already" in json.loads(again.stdout)["refused"]
    for option, value, part in [
        ("--dtype", "int8", "--dtype must be one of"),
        ("--max-shard-size", "many", "look like 5GB"),
        ("--rank", "0", "r must be a positive integer"),
        ("--adapter-name", "other", "no adapter"),
    ]:
        refused = invoke(*arguments[:4], "--out", tmp_path / "other", "--json", option, value)
        if option != "--adapter-name":  # a PEFT directory holds one, and its names do not tell which
            assert refused.exit_code == 1
            assert part in json.loads(refused.stdout)["refused"]
            assert not (tmp_path / "other").exists()


def test_merge_of_the_adapter_alone(directories, tmp_path):
    result = invoke(
        "merge", directories / "adapter", "--base", directories / "base", "--out", tmp_path / "out", "--adapter-only"
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("form", ["peft", "verl", "dcp", "full"])
def test_inspect_tells_what_a_directory_is_and_its_command_merges_it(form, tmp_path):
    from tests.checkpoints import save_source

    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, r=4, lora_alpha=6.5, use_rslora=True, modules_to_save=["lm_head"])
    source = save_source(form, model, tmp_path / "source")
    found = json.loads(invoke("inspect", source, "--json").stdout)
    assert (found["adapter_name"], found["r"], found["lora_alpha"], found["scaling"]) == ("default", 4, 6.5, 3.25)
    assert (found["targets"], found["modules_to_save"]) == (["down_proj", "q_proj", "v_proj"], ["lm_head"])
    assert found["variants"] == ["use_rslora"]
    assert found["has_base"] == (form != "peft")
    assert [("--base" in text) for text in found["missing"]] == ([True] if form == "peft" else [])
    command = found["command"].replace(" BASE", f" {tmp_path / 'base'}").replace(" OUT", f" {tmp_path / 'out'}").split()
    assert command[:2] == ["lora-stream", "merge"]
    result = invoke(*command[1:])
    assert result.exit_code == 0, result.output
    shown = invoke("inspect", source)
    for text in (found["kind"], "6.5", "3.25", "use_rslora", "lm_head"):
        assert text in shown.output


def test_inspect_tells_what_is_missing(tmp_path):
    """What a merge would stop at, and with which options it would not."""
    from tests.checkpoints import save_source

    model = with_lora(llama())
    source = save_source("verl", model, tmp_path / "source", meta=False)
    found = json.loads(invoke("inspect", source, "--json").stdout)
    assert (found["kind"], found["r"], found["adapter_names"]) == ("verl FSDP checkpoint", None, ["default"])
    assert "--rank and --lora-alpha" in found["missing"][0]
    assert "--rank R --lora-alpha ALPHA" in found["command"]
    (source / "model_world_size_2_rank_0.pt").write_bytes(b"")
    found = json.loads(invoke("inspect", source, "--json").stdout)
    assert "keep those of one save" in found["missing"][0]
    assert found["command"] is None
    llama().save_pretrained(tmp_path / "plain")
    found = json.loads(invoke("inspect", tmp_path / "plain", "--json").stdout)
    assert found["kind"] == "Hugging Face model (LlamaForCausalLM) without adapter"
    assert "nothing to merge" in found["missing"][0]
    refused = invoke("inspect", tmp_path)
    assert refused.exit_code == 1
    assert "did you mean" in " ".join(refused.output.split())
    assert invoke("inspect", tmp_path / "nowhere").exit_code == 1
