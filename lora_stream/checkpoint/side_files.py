"""The files that go with a model's weights, by an allow-list: a directory of a model or an adapter is often also that of a
run, with its arguments, its state and its credentials, and what a merge writes is often published."""

import ast
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

# What transformers' tokenizers, processors and generation configs write, and the vocabularies that tokenizers are made of.
_NAMES = {
    "added_tokens.json",
    "audio_tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "feature_extractor_config.json",
    "generation_config.json",
    "image_processor_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
}
_VOCABULARIES = {".bpe", ".model", ".spm", ".tiktoken", ".vocab"}
_TEMPLATES = ("chat_templates", "additional_chat_templates")
_TERMS = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY")
_WITH_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def carry_over(directories: Iterable[Path], out: Path, *, base: Path | None) -> list[str]:
    """Copy tokenizer, processor and generation config, templates, code and terms; of each the first directory's that has it.

    Code is what an `auto_map` names, and what that imports from beside it; terms, which are license and README, are `base`'s.
    What is copied is not looked into: a file that transformers finds invalid is no reason to lose the weights.

    Returns their names.
    """
    copied = []
    for directory in directories:
        for path in _belonging(directory, with_terms=directory == base):
            relative = path.relative_to(directory)
            if (out / relative).exists():
                continue
            (out / relative).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(path, out / relative)  # through links, which a cache of downloads is made of
            copied.append(str(relative))
    return copied


def _belonging(directory: Path, *, with_terms: bool) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        is_terms = with_terms and path.name.split(".")[0].upper() in _TERMS
        if path.is_file() and (path.name in _NAMES or path.suffix in _VOCABULARIES or is_terms):
            yield path
    for name in _TEMPLATES:
        yield from sorted(path for path in (directory / name).glob("*.jinja") if path.is_file())
    if (directory / "config.json").exists():  # of a model: an adapter has no code
        yield from _code(directory)


def _code(directory: Path) -> list[Path]:
    """Modules that the configs' auto_map names, and those that they import relative to themselves."""
    modules = [module for name in _WITH_CODE for module in _named_by_auto_map(directory / name)]
    found: dict[Path, None] = {}
    while modules:
        path = directory / f"{modules.pop()}.py"
        if path in found or not path.is_file():
            continue
        found[path] = None
        modules += _imported_from_beside(path)
    return list(found)


def _named_by_auto_map(path: Path) -> list[str]:
    try:
        auto_map = json.loads(path.read_text(encoding="utf-8")).get("auto_map")
    except (OSError, ValueError, AttributeError):
        return []
    values = auto_map.values() if isinstance(auto_map, dict) else []
    # "module.Class", or a slow and a fast tokenizer's; "repository--module.Class" is code that lies elsewhere.
    references = [each for value in values for each in (value if isinstance(value, list) else [value])]
    found = [re.fullmatch(r"(\w+)\.\w+", each) for each in references if isinstance(each, str)]
    return [match[1] for match in found if match]


def _imported_from_beside(path: Path) -> list[str]:
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    except (SyntaxError, ValueError):
        return []
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
    return [
        module for node in imports for module in ([node.module] if node.module else [name.name for name in node.names])
    ]
