"""Engines for the tests of this folder. Imports vLLM: import it after `pytest.importorskip`."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import vllm.envs
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

SIZES = {
    "vocab_size": 1021,  # not a multiple of vLLM's padding
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PROMPTS = [list(range(1, 40)), list(range(500, 511))]


def make_llm(directory: Path, dtype: str, **kwargs) -> LLM:
    vllm.envs.disable_envs_cache()  # an engine that was started before in this process has fixed vLLM's settings
    kwargs = {"distributed_executor_backend": "uni", **kwargs}
    return LLM(
        str(directory),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        **kwargs,
    )


def make_llm_in_processes(directory: Path, dtype: str, num_workers: int, **kwargs) -> LLM:
    """Its engine core and each of its workers in a process of its own, as vLLM does by default."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if num_workers > 1:  # otherwise vLLM looks for as many NUMA nodes
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(num_workers))
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        return make_llm(
            directory,
            dtype,
            tensor_parallel_size=num_workers,
            distributed_executor_backend="mp",
            weight_transfer_config={"backend": "lora_stream"},
            **kwargs,
        )
    finally:
        os.environ.clear()
        os.environ.update(before)


def shut_down(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()


def logprobs(llm: LLM, prompts=PROMPTS) -> list:
    """Everything the engine computes for the prompts: logprobs of their tokens and of a greedy continuation."""
    sampling = SamplingParams(
        max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [
        [{token: entry.logprob for token, entry in position.items()} for position in positions]
        for output in outputs
        for positions in (output.prompt_logprobs[1:], output.outputs[0].logprobs)
    ]


def save_merged(base: Path, merged: dict[str, torch.Tensor], directory: Path) -> Path:
    """The base checkpoint with other weights."""
    shutil.copytree(base, directory)
    save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def logprobs_in_a_process(directory: Path, dtype: torch.dtype, prompts=PROMPTS, *, one_by_one: bool = False) -> list:
    """Of an engine in a process of its own that loads the checkpoint. Only one engine at a time can live in a process:
    shutting one down takes vLLM's process groups with it."""
    code = (
        "import json, sys, tests.conftest; from tests.vllm.live import logprobs, make_llm;"
        "llm = make_llm(sys.argv[1], sys.argv[2]); prompts = json.loads(sys.argv[3]);"
        "found = sum([logprobs(llm, [p]) for p in prompts], []) if int(sys.argv[4]) else logprobs(llm, prompts);"
        "print('LOGPROBS' + json.dumps(found))"
    )
    command = [sys.executable, "-c", code, str(directory), str(dtype).removeprefix("torch.")]
    command += [json.dumps(prompts), str(int(one_by_one))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("LOGPROBS")]
    return json.loads(line.removeprefix("LOGPROBS"))


def save_tokenizer(directory: Path, size: int) -> None:
    """A word for each token, for who wants texts: w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "w0", "pad_token": "w1", "eos_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


class Server:
    """A vLLM API server in processes of its own: the server, its engine core and a worker."""

    def __init__(self, directory: Path, log: Path, *, port: int | None = None, dtype: str = "bfloat16") -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", dtype, "--enforce-eager"]
        command += ["--skip-tokenizer-init", "--enable-scale-out", "--max-model-len", "512", "--max-num-seqs", "8"]
        command += ["--weight-transfer-config", json.dumps({"backend": "lora_stream"})]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.pids = [self.process.pid]
        self.shared: set[str] = set()  # vLLM's own shared memory, which it leaves behind when it is killed

    def wait_until_up(self) -> "Server":
        for _ in range(1200):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    # Now: a server that is killed leaves its engine core and its worker to nobody.
                    self.pids = [self.process.pid, *(pid for pid, _ in descendants(self.process.pid))]
                    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in self.pids]
                    self.shared = set(re.findall(r"/dev/shm/(?:psm|sem)[\w.-]+", "\n".join(maps)))
                    return self
            time.sleep(0.25)
        raise TimeoutError(self.log.read_text()[-3000:])

    def worker(self) -> int:
        """Process id of the worker."""
        (found,) = [pid for pid, name in descendants(self.process.pid) if name.startswith("VLLM::Worker")]
        return found

    def generate(self, token_ids: list[int], *, max_tokens: int = 6) -> dict:
        sampling = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 3, "detokenize": False, "ignore_eos": True}
        answer = httpx.post(
            f"{self.url}/inference/v1/generate",
            json={"token_ids": token_ids, "sampling_params": sampling},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def answers(self) -> list:
        """What the server computes for each of the prompts, alone: tokens and their logprobs."""
        return [(choice["token_ids"], choice["logprobs"]) for choice in map(self.generate, PROMPTS)]

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for pid in [*self.pids, *(pid for pid, _ in descendants(self.process.pid))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for path in self.shared:
            Path(path).unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descendants(root: int) -> list[tuple[int, str]]:
    """Process ids and names of all processes below `root`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                command = (entry / "cmdline").read_text().partition("\0")[0]
                parents[int(entry.name)] = (int(rest.split()[1]), command or name)
    found, level = [], [root]
    while level:
        level = [pid for pid, (parent, _) in parents.items() if parent in level]
        found += [(pid, parents[pid][1]) for pid in level]
    return found


def rss(pid: int | str = "self") -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass
class Setup:
    directory: Path
    dtype: torch.dtype
    llm: LLM

    def base(self) -> torch.nn.Module:
        """The model that the engine was started on, in a trainer."""
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=self.dtype).eval()


SETUPS = {
    "bfloat16, tied": (torch.bfloat16, True),
    "float32, untied, biases": (torch.float32, False),
}


def save_base(dtype: torch.dtype, tied: bool, directory: Path) -> None:
    """A random model's checkpoint."""
    torch.manual_seed(1)
    if tied:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.to(dtype).save_pretrained(directory)


def start(kind: str, directory: Path) -> Setup:
    """An engine of the kind, in this process, on a random model that is saved in `directory`."""
    dtype, tied = SETUPS[kind]
    save_base(dtype, tied, directory)
    return Setup(directory, dtype, make_llm(directory, str(dtype).removeprefix("torch.")))
