"""Draw learning curves from the metrics.csv of any number of runs, every run one line. Of agents also print how soon
each one solved 50 % and 90 % of the held-out levels (the first evaluation at which it did), of language models the last
validation loss.

python figures/learning_curves.py runs/A runs/B --output curves.png
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run folders"""
    output: Path = Path("learning_curves.png")
    """picture to write"""


def read(run_dir, name):
    """Steps and values of one scalar."""
    if not (run_dir / "metrics.csv").is_file():
        raise SystemExit(f"{run_dir} is no run folder: it has no metrics.csv")
    with open(run_dir / "metrics.csv") as f:
        rows = [(int(r["step"]), float(r["value"])) for r in csv.DictReader(f) if r["name"] == name]
    return zip(*rows) if rows else ((), ())


AGENT = {"charts/episodic_return": "return, sampled policy", "eval/solve_rate": "held-out levels solved, greedy"}
LANGUAGE = {"losses/train": "training loss, nats a token", "eval/loss": "validation loss, nats a token"}

if __name__ == "__main__":
    args = tyro.cli(Args)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4 + 0.2 * len(args.runs)), constrained_layout=True)
    language = [any(read(run_dir, "losses/train")) for run_dir in args.runs]
    if any(language) and not all(language):
        raise SystemExit(f"{args.runs[language.index(False)]} is no language model's run, others are: draw them apart")
    names = LANGUAGE if any(language) else AGENT
    for axis, (name, title) in zip(axes, names.items()):
        for k, run_dir in enumerate(args.runs):
            colour = plt.cm.viridis(k / max(len(args.runs) - 1, 1))
            axis.plot(*read(run_dir, name), marker=".", markersize=3, color=colour, label=run_dir.name)
        axis.set(title=title, xlabel="tokens" if names is LANGUAGE else "environment steps")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    if names is AGENT:
        axes[1].set_ylim(0, 1)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    figure.savefig(args.output, dpi=110)
    for run_dir in args.runs:
        evaluations = list(zip(*read(run_dir, [*names][1])))
        if names is LANGUAGE:
            last = "{1:.3f} at token {0:,}".format(*evaluations[-1]) if evaluations else "no evaluation yet"
            print(f"{run_dir.name}: last validation loss: {last}")
            continue
        first = [next((f"{step:,} steps" for step, rate in evaluations if rate >= aim), "never") for aim in (0.5, 0.9)]
        last = "{1:.1%} at step {0:,}".format(*evaluations[-1]) if evaluations else "no evaluation yet"
        print(f"{run_dir.name}: 50 % solved: {first[0]}, 90 %: {first[1]}; last: {last}")
    print(f"wrote {args.output}")
