"""Does the engine follow its trainer? examples/grpo_loop.py with every way into the engine, learning rate and seed.

    python benchmarks/grpo_rounding.py --steps 10 --json grpo.json --plot grpo.png

Of every run: the reward, and over all sampled tokens mean |p_engine - p_trainer| and the correlation of the two, of the last half
of the steps. Each pair of learning rate and seed draws the same prompts. An hour on two cores; ends in one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lora_stream.demo import load_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_loop.py"
WAYS = ["dither", "nearest", "adapter"]
MEASURES = {"reward": "mean reward", "diff": "mean |p_engine - p_trainer|", "corr": "correlation"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=12, help="of each sample")
    parser.add_argument("--learning-rates", default="1e-5,1e-4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--model", help="a Hugging Face model directory; otherwise SmolLM2-135M-Instruct")
    parser.add_argument("--json", type=Path, help="where all steps go")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            model, tokenizer = load_model()
            model.to(torch.bfloat16).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        for learning_rate in map(float, args.learning_rates.split(",")):
            for seed in map(int, args.seeds.split(",")):
                for way in WAYS:
                    runs.append(run(args, args.model or directory, learning_rate, seed, way))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                    if args.json:
                        args.json.write_text(json.dumps(runs))
    print(table(runs))
    if args.plot:
        plot(runs, args.plot)
    print(json.dumps({"benchmark": "grpo_rounding", "runs": len(runs), "summary": summary(runs)}))


def run(args: argparse.Namespace, model: str, learning_rate: float, seed: int, way: str) -> dict:
    options = {"steps": args.steps, "samples": args.samples, "tokens": args.tokens, "seed": seed}
    options |= {"learning-rate": learning_rate, "way": way, "model": model}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, EXAMPLE, *arguments], stdout=subprocess.PIPE, check=True, text=True)
    return {"learning_rate": learning_rate, **json.loads(done.stdout.splitlines()[-1])}


def summary(runs: list[dict]) -> list[dict]:
    """Means over the last half of the steps and over all seeds."""
    found = []
    for learning_rate, way in dict.fromkeys((run["learning_rate"], run["way"]) for run in runs):
        own = [run["steps"] for run in runs if (run["learning_rate"], run["way"]) == (learning_rate, way)]
        late = [step for steps in own for step in steps[len(steps) // 2 :]]
        means = {name: statistics.fmean(step[name] for step in late) for name in MEASURES}
        captured = [step["captured"] for step in late if step["captured"] is not None]
        means["captured"] = statistics.fmean(captured) if captured else None
        found.append({"learning_rate": learning_rate, "way": way, "seeds": len(own), **means})
    return found


def table(runs: list[dict]) -> str:
    lines = ["| learning rate | way | reward | diff | corr | captured |", "|---|---|---|---|---|---|"]
    for row in summary(runs):
        captured = "" if row["captured"] is None else f"{row['captured']:.1%}"
        lines.append(
            f"| {row['learning_rate']:g} | {row['way']} | {row['reward']:.3f} | {row['diff']:.5f} | {row['corr']:.5f} | "
            f"{captured} |"
        )
    return "\n".join(lines)


def plot(runs: list[dict], path: Path) -> None:
    """A line for each way: the mean of the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(run["learning_rate"] for run in runs))
    figure, axes = pyplot.subplots(len(MEASURES), len(rates), figsize=(5 * len(rates), 8), squeeze=False)
    for column, rate in enumerate(rates):
        for row, (measure, label) in enumerate(MEASURES.items()):
            axis = axes[row][column]
            for way in dict.fromkeys(run["way"] for run in runs):
                own = [
                    [step[measure] for step in run["steps"]]
                    for run in runs
                    if (run["learning_rate"], run["way"]) == (rate, way)
                ]
                steps = list(zip(*own, strict=True))
                (line,) = axis.plot([statistics.fmean(values) for values in steps], label=way)
                low, high = [min(values) for values in steps], [max(values) for values in steps]
                axis.fill_between(range(len(steps)), low, high, color=line.get_color(), alpha=0.15)
            axis.set_ylabel(label)
            if row == 0:
                axis.set_title(f"learning rate {rate:g}")
                axis.legend()
        axes[-1][column].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
