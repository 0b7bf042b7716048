"""Documents tell the truth about what exists. Unit layer."""

import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted([*ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("docs/**/*.md")])),
]
FOLDERS = "csrc|lora_stream|tests|benchmarks|examples|docs"


def code_spans(document):
    text = (ROOT / document).read_text()
    spans = re.findall(r"`([^`\n]+)`", text)
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    return spans, blocks


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document):
    spans, blocks = code_spans(document)
    paths = {s for s in spans if re.fullmatch(rf"({FOLDERS})(/[\w./-]*)", s)}
    paths |= set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]+", "\n".join(blocks)))
    paths |= {s for s in spans if re.fullmatch(r"[\w-]+\.(md|py|toml)", s) and "/" not in document}
    missing = [path for path in paths if not (ROOT / path).exists() and not path.startswith("lora_stream/_C")]
    assert missing == []


def test_documents_name_paths_at_all():
    assert sum(bool(re.search(rf"`({FOLDERS})/", (ROOT / document).read_text())) for document in DOCUMENTS) > 4


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_a_document_names_exists(document):
    spans, blocks = code_spans(document)
    targets = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(spans + blocks)))
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def commands(document):
    """Command lines, without what is a comment or sets the environment: in blocks, and in the text where they name one of ours."""
    spans, blocks = code_spans(document)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*spans, *lines]:
        words = re.sub(r"^(\w+=('[^']*'|\S+) +)+", "", line.split("  ")[0].split(" # ")[0].strip())
        words = words.replace("[", "").replace("]", "").replace(" | ", " ")
        if re.match(r"(lora-stream|python|bash|torchrun) ", words):
            yield shlex.split(words)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_that_a_document_names_exists_with_its_options(document):
    from typer.main import get_command

    from lora_stream.cli import app

    for words in commands(document):
        options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--standalone"]
        if words[0] == "lora-stream":
            command = get_command(app)
            rest = words[1:]
            while hasattr(command, "commands"):
                assert rest, words
                if rest[0] == "bench" and len(rest) == 1:
                    break
                assert rest[0] in command.commands, f"{document}: {words}"
                command = command.commands[rest.pop(0)]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert set(options) <= known, f"{document}: {words}"
        elif scripts := [word for word in words if word.endswith((".py", ".sh"))]:
            text = (ROOT / scripts[0]).read_text()
            own = words[words.index(scripts[0]) + 1 :]
            for option in (word.partition("=")[0] for word in own if word.startswith("--")):
                assert f'"{option}"' in text, f"{document}: {words}"


def test_documents_name_commands_at_all():
    found = [words[:3] for document in DOCUMENTS for words in commands(document)]
    for wanted in (
        ["lora-stream", "bench", "merge"],
        ["lora-stream", "merge", "SOURCE"],
        ["python", "examples/grpo_loop.py"],
    ):
        assert any(words[: len(wanted)] == wanted for words in found), wanted
    assert len(found) > 15


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_name_of_the_package_that_a_document_names_exists(document):
    text = (ROOT / document).read_text()
    for name in set(re.findall(r"(?<![\w.])lora_stream(?:\.[a-zA-Z_]\w*)+", text)):
        if name.endswith(("verl", "trl", "verl_external_lib")):  # they import what may not be installed
            assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name
            continue
        parts = name.split(".")
        found = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], 1):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[: i + 1]))
            found = getattr(found, part)


def test_every_environment_variable_that_contributing_lists_is_read_somewhere():
    listed = set(re.findall(r"`(LORA_STREAM_[A-Z_]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    sources = [ROOT / "setup.py", *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "lora_stream").rglob("*.py")]
    read = set(re.findall(r"LORA_STREAM_[A-Z_]+", "\n".join(path.read_text() for path in sources)))
    assert listed
    assert listed <= read


def test_a_build_that_was_asked_for_cuda_never_becomes_a_cpu_build_silently(tmp_path):
    import sys

    def build(**environment):
        command = [sys.executable, "setup.py", "--version"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)

    no_nvcc = build(LORA_STREAM_CUDA="1", PATH=str(tmp_path))
    assert no_nvcc.returncode != 0
    assert "no nvcc was found: set CUDA_HOME" in no_nvcc.stderr
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.0, V12.0.1'\n")
    (tmp_path / "nvcc").chmod(0o755)
    old_nvcc = build(LORA_STREAM_CUDA="1", PATH=str(tmp_path))
    assert old_nvcc.returncode != 0
    assert "nvcc is release 12.0, older than 12.1" in old_nvcc.stderr
    wrong = build(LORA_STREAM_CUDA="yes", PATH=str(tmp_path))
    assert "must be auto, 0 or 1, got 'yes'" in wrong.stderr


def test_every_listed_case_has_a_test_that_names_it():
    listed = re.findall(r"^\| ([B\d][\dB, to]*) \|", (ROOT / "tests" / "CASES.md").read_text(), re.MULTILINE)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    edge = "\n".join(re.findall(r"[Ee]dge cases? [\d, toand]+", tests))
    public = "\n".join(re.findall(r"[Cc]ases? B[\dB, toand]+", tests))
    wanted = numbers("\n".join(listed))
    assert set(range(1, 66)) <= wanted
    assert wanted - numbers(edge) == set()
    cases = {case for line in listed for case in re.findall(r"B\d+", line)}
    assert len(cases) > 15
    assert cases - set(re.findall(r"B\d+", public)) == set()


def numbers(text):
    """Of lines such as "9 to 11, 13 and 15"."""
    ranges = re.findall(r"(?<![B\d])(\d+) to (\d+)", text)
    return {n for low, high in ranges for n in range(int(low), int(high) + 1)} | {
        int(n) for n in re.findall(r"(?<![B\d])\d+", text)
    }


def test_readme_example_is_python_and_uses_what_exists():
    import ast

    import lora_stream

    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    used = set()
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lora_stream":
                used.add(node.attr)
    assert used == {"sync", "stream", "MergedWeights"}
    assert used <= set(lora_stream.__all__)
