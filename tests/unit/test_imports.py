"""design picture: who may import whom, and that importing does no work. Reads import statements. Unit layer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lora_stream"

# Down the flow: a module imports only from those before it. Names are modules or, for vllm, the package.
ORDER = [
    "views",
    "samples",
    "plan",
    "packing",
    "rounding",
    "fidelity",
    "ops",
    "reference",
    "shards",
    "dora",
    "merging",
    "fsdp1",
    "held",
    "names",
    "peft",
    "gathering",
    "filling",
    "merged_weights",
    "report",
    "ring",
    "vllm",
    "engines",
    "engine_state",
    "engine_side",
    "engine_sync",
    "checkpoint",
    "integrations",
    "doctor",
    "demo",
    "bench",
    "cli",
]

# Third parties and the only modules that may import them at all, at the top or inside a function.
HOMES = {
    "peft": {"peft", "checkpoint", "demo", "bench"},
    "transformers": {"checkpoint", "demo", "bench"},
    "safetensors": {"checkpoint", "bench"},
    "vllm": {"vllm", "demo", "bench"},
    "httpx": {"vllm"},
    "ray": {"vllm"},
    "verl": {"integrations"},
    "trl": {"integrations"},
    "accelerate": {"integrations"},
    "rich": {"demo", "cli", "doctor", "bench"},
    "typer": {"cli", "bench"},
    "matplotlib": {"bench"},
    "triton": {"bench"},
    "pybind11": set(),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.name != "__init__.py":
            yield relative.parts[0].removesuffix(".py"), path


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def test_every_module_has_its_place_in_the_picture():
    assert {name for name, _ in modules()} == set(ORDER)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: str(value).rpartition("/")[2])
def test_imports_run_one_way_down_the_flow(name, path):
    for module, symbol in imported(path):
        parts = module.split(".")
        if parts[0] == "lora_stream":
            target = parts[1] if len(parts) > 1 else symbol
            if target in ORDER and target != name:
                assert ORDER.index(target) < ORDER.index(name), f"{path.name} imports {module}"
        else:
            assert name in HOMES.get(parts[0], {name}), f"{path.name} imports {module}"


def test_process_groups_and_sharded_tensors_have_one_home():
    """FSDP1's own class is looked up in its file; torch.distributed.checkpoint is a format of files."""
    users = {
        name
        for name, path in modules()
        for module, _ in imported(path)
        if module.startswith("torch.distributed") and not module.startswith("torch.distributed.checkpoint")
    }
    assert users - {"bench"} == {"shards", "fsdp1"}  # bench makes process groups of its own, to measure with


def test_plan_knows_torch_only():
    found = {module for name in ("plan", "views") for module, _ in imported(PACKAGE / f"{name}.py")}
    assert {module.split(".")[0] for module in found} - set(sys.stdlib_module_names) == {"torch", "lora_stream"}
    assert {module for module in found if module.startswith("lora_stream")} == {"lora_stream.views"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_nothing_heavy_and_starts_no_cuda():
    heavy = ["torch", "peft", "transformers", "vllm", "rich", "typer"]
    assert run(f"import sys, lora_stream; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"
    code = (
        "import sys, lora_stream; lora_stream.stream; lora_stream.sync; import lora_stream.ops, torch;"
        "print([m for m in ('peft', 'transformers', 'vllm', 'rich', 'typer') if m in sys.modules],"
        "torch.cuda.is_initialized())"
    )
    assert run(code).strip() == "[] False"


def test_public_names_exist():
    import lora_stream

    assert all(getattr(lora_stream, name) is not None for name in lora_stream.__all__)
    with pytest.raises(AttributeError):
        lora_stream.nothing  # noqa: B018
