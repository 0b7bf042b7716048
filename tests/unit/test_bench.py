"""`lora-stream bench`: what may be said of figures, and that the command measures what it says. Unit layer; no figure is asserted."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lora_stream import _C
from lora_stream.bench import measuring, merge, models, plotting, results, showing
from lora_stream.bench.commands import app
from lora_stream.bench.results import Group, Result, Spread, Way


def run(*arguments, returncode=0):
    """The command's result and what it showed."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == returncode, done.output[-3000:]
    found = json.loads(done.stdout.splitlines()[-1]) if returncode == 0 else None
    return found, done.stderr


# -- what may be said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "is_difference"),
    [
        ([1.5, 1.51, 1.52], True),
        ([0.5, 0.51, 0.52], True),
        ([1.0, 1.0, 1.0], False),
        ([0.9, 1.05, 1.3], False),  # both sides of 1
        ([1.02, 1.05, 1.3], False),  # above 1, but less than it scatters
        ([1.3], True),
    ],
)
def test_a_difference_smaller_than_the_spread_is_never_called_one(ratios, is_difference):
    assert Spread.of(ratios).is_difference() == is_difference


def group(**seconds):
    ways = [Way(name=name, seconds=values) for name, values in seconds.items()]
    return Group(name="g", ceiling="copy", ours="ours", ways=ways)


def result(*groups, benchmark="merge"):
    versions = {"torch": "2"}
    return Result(
        benchmark=benchmark, machine={"cpu": "c"}, versions=versions, config={}, command="", groups=list(groups)
    )


def test_ways_are_compared_repeat_by_repeat_so_that_a_drifting_machine_meets_all_alike():
    drifting = group(copy=[1.0, 2.0, 4.0], ours=[1.5, 3.0, 6.0], rival=[3.0, 6.0, 12.0])
    assert drifting.way("ours").over(drifting.way("copy")) == (1.5, 1.5, 1.5)
    assert results.verdict(drifting.way("rival"), drifting.way("ours")) == "takes 2 times as long"
    assert results.verdict(drifting.way("copy"), drifting.way("ours")) == "takes 0.667 of the time"


def test_a_slower_machine_is_no_change():
    before = result(group(copy=[1.0, 1.1, 1.0], ours=[2.0, 2.2, 2.0]))
    after = result(group(copy=[3.0, 3.3, 3.0], ours=[6.0, 6.6, 6.0]))
    copy, ours = results.changes(before, after)
    assert (copy.unit, copy.verdict()) == ("s", "slower")
    assert (ours.unit, ours.verdict()) == ("ceiling", "within the spread")


def test_a_faster_kernel_is_one():
    before = result(group(copy=[1.0, 1.1, 1.0], ours=[2.0, 2.2, 2.0]))
    after = result(group(copy=[1.0, 1.1, 1.0], ours=[1.0, 1.1, 1.0]))
    assert [change.verdict() for change in results.changes(before, after)] == [
        "within the spread",
        "faster",
    ]


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = result(group(copy=[1.0], ours=[2.0]))
    with pytest.raises(ValueError, match="one is of `bench merge`, the other of `bench stream`"):
        results.changes(one, result(benchmark="stream"))
    with pytest.raises(ValueError, match="no way in common"):
        results.changes(one, result(Group(name="other", ceiling="copy", ours="ours")))
    path = tmp_path / "x.json"
    for text in ("", "no json", "[1]", '{"benchmark": "merge"}', '{"groups": [{"ways": [{"name": "a", "no": 1}]}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json"):
            showing.read(path)
        assert "refused" in run("compare", path, path, returncode=1)[1]


def test_a_way_that_was_not_measured_is_shown_with_its_reason_and_compared_with_nothing():
    found = group(copy=[1.0], ours=[2.0])
    found.ways.append(Way(name="peer", missing="not installed"))
    assert showing.rows(found)[2][:2] == ["peer", "not installed"]
    assert [change.way for change in results.changes(result(found), result(found))] == ["copy", "ours"]
    assert "| peer | not installed |" in showing.markdown_of(found)


# -- how it is measured ----------------------------------------------------------------------------------------------


def test_candidates_take_turns_and_the_first_round_does_not_count():
    log = []
    found = measuring.interleaved({name: lambda name=name: log.append(name) for name in "ab"}, 3)
    assert log == ["a", "b"] * 4
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}


def test_buffers_do_not_fit_into_the_cache():
    case = merge.Case(label="", rows=256, cols=512, rank=4, dtype=torch.float32, threads=1)
    buffers = merge.make_buffers(case, torch.device("cpu"))
    total = sum(t.nbytes for b in buffers for t in (b.base, b.out, b.full))
    assert total >= 2 * measuring.cache_bytes(torch.device("cpu")) > 0
    assert len({b.base.data_ptr() for b in buffers}) == len(buffers)


def test_what_does_not_fit_into_memory_is_said_and_not_tried():
    case = merge.Case(label="", rows=1 << 20, cols=1 << 20, rank=4, dtype=torch.float32, threads=1)
    found = merge.bench(case, paths=[], device=torch.device("cpu"), repeats=1, progress=print)
    assert found.ways == []
    assert "MiB are needed" in found.note


def test_extra_memory_is_what_came_on_top():
    memory = measuring.ExtraMemory(torch.device("cpu"))
    block = torch.ones(64 << 18)  # 64 MiB
    del block
    assert 60 << 20 < memory.num_bytes() < 90 << 20


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("llama-3-8b", 8.03), ("qwen3-32b", 32.76), ("llama-3-70b", 70.55)]
)
def test_named_models_are_as_large_as_the_published_ones(name, billions):
    size = models.SIZES[name]
    layer = sum(rows * cols for rows, cols in size.shapes().values())
    total = size.num_layers * layer + size.vocab * size.hidden * (1 if size.tied else 2)
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)  # without norms
    assert size.layers_for(1 << 50, 4) == size.num_layers
    assert size.layers_for(0, 4) == 1


def test_a_model_of_a_named_size_computes_and_its_tie_holds():
    model = models.with_lora(models.make_model(models.SIZES["tiny"], 2, torch.float32), 4)
    assert torch.isfinite(model(torch.arange(9).unsqueeze(0)).logits).all()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(p.any() for name, p in model.named_parameters() if "lora_" in name)


# -- the command -----------------------------------------------------------------------------------------------------


def test_merge_measures_every_way_and_writes_json_and_a_picture(tmp_path):
    path = next(name for name, supported in reversed(_C.cpu_paths()) if supported)
    files = ["--json", tmp_path / "m.json", "--plot", tmp_path / "m.png"]
    cases = ["--shape", "70x130", "--ranks", "4,6", "--dtypes", "float32", "--threads", "1,2"]
    found, shown = run("merge", *cases, "--paths", path, "--repeats", 2, *files)
    assert json.loads((tmp_path / "m.json").read_text()) == found
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert len(found["groups"]) == 4
    for each in found["groups"]:
        ways = {way["name"]: way for way in each["ways"]}
        measured = {"copy", "ours", f"ours, {path}", "eager", "addmm", "addmm_", "PEFT"}
        measured |= {"ours, with statistics", "ours, dithered", "ours, dithered, with statistics"}
        assert {name for name, way in ways.items() if len(way["seconds"]) == 2} == measured
        assert ways["Triton"]["missing"]
    assert found["machine"]["cpu_path"] == _C.cpu_path()
    assert found["versions"]["torch"] == torch.__version__
    assert "over copy" in shown
    dora, _ = run("merge", "--shape", "70x130", "--repeats", 1, "--dora", "--ranks", 4, "--dtypes", "float32")
    assert {way["name"] for way in dora["groups"][0]["ways"]} == {"ours, without DoRA", "ours", "PEFT"}
    compared, shown = run("compare", tmp_path / "m.json", tmp_path / "m.json", "--plot", tmp_path / "c.png")
    assert len(compared["changes"]) == 4 * 10
    assert {change["verdict"] for change in compared["changes"]} == {"within the spread"}
    assert all(change["ratio"][1] == 1 for change in compared["changes"])
    assert "within the spread" in shown
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_stream_accounts_for_every_byte_plain_and_sharded_and_beside_peers(tmp_path):
    peer = tmp_path / "peer.py"
    (tmp_path / "a_neighbour_of_the_peer.py").write_text("NAME = 'peer'\n")
    peer.write_text(
        "from a_neighbour_of_the_peer import NAME\n"
        "def fails():\n"
        "    raise RuntimeError('not on this model')\n"
        "def ways(model):\n"
        "    return {NAME: lambda: iter([]), 'failing peer': fails}\n"
    )
    absent = tmp_path / "absent.py"
    absent.write_text("import a_package_that_nobody_has\n")
    peers = ["--peer", peer, "--peer", absent]
    found, shown = run(
        "stream", "--model", "tiny", "--ranks", "0,2", "--repeats", 1, *peers, "--plot", tmp_path / "s.svg"
    )
    plain, sharded = ({way["name"]: way for way in each["ways"]} for each in found["groups"])
    tiny = models.make_model(models.SIZES["tiny"], 2, torch.float32)
    all_bytes = 2 * sum(p.numel() for p in tiny.parameters())
    for ways in (plain, sharded):
        ours, trained = ways["ours"]["num_bytes"], ways["ours, trained scope"]["num_bytes"]
        assert ours["merged"] + ours["copied"] == all_bytes
        assert ours["left"] == 0
        assert trained["merged"] == ours["merged"]
        assert trained["left"] == all_bytes - trained["merged"] - trained["copied"] > 0
        assert len(ways["peer"]["seconds"]) == len(ways["PEFT"]["seconds"]) == 1
        assert "not on this model" in ways["failing peer"]["missing"]
        assert "a_package_that_nobody_has" in ways["absent"]["missing"]
        assert sum(ways["ours"]["phases"].values()) == pytest.approx(ways["ours"]["seconds"][0], rel=0.01)
    assert plain["ours"]["num_bytes"]["gathered"] == 0
    assert sharded["ours"]["num_bytes"]["gathered"] > all_bytes // 3
    assert "ours, to one sender" in sharded
    assert "<svg" in (tmp_path / "s.svg").read_text()
    assert "a_package_that_nobody_has" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["merge", "--shape", "4096"], "--shape must be ROWSxCOLS, like 4096x4096, got '4096'"),
        (["merge", "--shape", "0x4"], "--shape must be ROWSxCOLS"),
        (["merge", "--model", "gpt-9"], "--model must be one of ['tiny', 'qwen3-0.6b'"),
        (["merge", "--model", "tiny", "--shape", "4x4"], "give --model or --shape, not both"),
        (["merge", "--ranks", "0"], "--ranks must be numbers from 1 on"),
        (["merge", "--dtypes", "int8"], "a dtype must be one of"),
        (["merge", "--paths", "sse"], "--paths sse: this processor supports"),
        (["merge", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["stream", "--model", "tiny", "--ranks", "two"], "--ranks must be numbers from 0 on"),
        (["stream", "--model", "tiny", "--peer", "nowhere.py"], "nowhere.py: no Python file"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_expected(arguments, reason):
    shown = " ".join(run(*arguments, returncode=1)[1].split())
    assert reason in shown


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        plotting.plot(result(), tmp_path / "x.png")
