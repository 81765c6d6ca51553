"""How fast the Sokoban agents train here, and how much of that time its convolutions need when called alone.

    python tests/benchmark_sokoban.py                 # about 8 minutes on 2 cores

For each (layers, experts, width): `share` = time of the convolutions alone, called as the script calls them (20
single-step forward passes without gradient, then the training forward and backward pass) / time of the whole loop of
the script, which runs as a user would: 32 environments x 20 steps, one epoch. Both are measured in turn, twice. The
yardstick is measured before and after each loop, so that both see the same machine.
"""

import csv
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import sokoban_drc_ppo as drc  # noqa: E402
import sokoban_ff_ppo as ff  # noqa: E402

T, N = 20, 32


def recorded_convolutions(agent, steps):
    """The convolutions of one forward pass over `steps` steps: [(input shape, has a gradient, weight shape, has a bias,
    groups)]."""
    calls, conv2d = [], F.conv2d

    def record(x, weight, bias=None, padding=0, groups=1):
        calls.append((x.shape, x.requires_grad, weight.shape, bias is not None, groups))
        return conv2d(x, weight, bias, padding=padding, groups=groups)

    F.conv2d = record
    obs = torch.zeros(steps, N, 10, 10, 2, dtype=torch.uint8)
    agent(obs, torch.zeros(steps, N), agent.initial_state(N))
    F.conv2d = conv2d
    return calls


def time_convolutions(calls, train):
    """Seconds of these convolutions, forward or forward and backward."""
    tensors = {}
    for call in calls:
        x, x_grad, w, has_bias, _ = call
        bias = torch.randn(w[0], requires_grad=train) if has_bias else None
        x, weight = torch.randn(x, requires_grad=train and x_grad), torch.randn(w, requires_grad=train)
        tensors[call] = x, weight, bias, torch.randn(len(x), w[0], 10, 10)
    start = time.perf_counter()
    for call in calls:
        x, weight, bias, grad = tensors[call]
        y = F.conv2d(x, weight, bias, padding=1, groups=call[-1])
        if train:
            y.backward(grad)
    return time.perf_counter() - start


def loop_seconds(script, shape, iterations):
    """Run the script itself -> seconds an iteration, and the environment's share of them, from its own records."""
    with tempfile.TemporaryDirectory() as folder:
        levels = Path(folder) / "levels.npy"
        np.save(levels, script.generate_levels("easy", 1000, seed=7)[0])
        np.save(Path(folder) / "eval.npy", script.generate_levels("easy", 8, seed=8)[0])
        command = [sys.executable, script.__file__, "--levels", levels, "--eval-levels", f"{folder}/eval.npy"]
        for flag, value in zip(("--layers", "--experts", "--width"), shape):
            command += [flag, value]
        command += ["--num-envs", N, "--num-steps", T, "--update-epochs", 1, "--num-minibatches", 1, "--eval-every", 0]
        command += ["--total-timesteps", iterations * N * T, "--log-every", iterations // 10, "--runs-dir", folder]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        (path,) = Path(folder).glob("*/metrics.csv")
        rows = list(csv.DictReader(open(path)))
    rates = [float(r["value"]) for r in rows if r["name"] == "charts/SPS"][2:]  # the first ones hold the warm-up
    environment = [float(r["value"]) for r in rows if r["name"] == "stats/time_environment"][2:]
    return N * T / statistics.median(rates), statistics.median(environment)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.platform == "linux":  # as the scripts do; or else the convolutions alone are slower here than there
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0), mallopt(-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    print(f"{torch.get_num_threads()} torch threads, {N} environments x {T} steps, fp32; medians of 2 turns")
    rates = {}
    yardstick = [((N, 160, 10, 10), True, (256, 160, 3, 3), False, 1)] * 20
    shapes = {(drc, 4, 1, 64): 10, (drc, 2, 6, 32): 10, (drc, 1, 1, 16): 200, (ff, 8, 2, 32): 10, (ff, 4, 1, 64): 10}
    for (script, *shape), iterations in shapes.items():
        agent = script.Agent(*shape)
        rollout, training = recorded_convolutions(agent, 1) * T, recorded_convolutions(agent, T)
        loops, environments, convolutions, pass_seconds = [], [], [], []
        for _ in range(2):
            pass_seconds.append(time_convolutions(yardstick, True) / 20)
            seconds, environment = loop_seconds(script, shape, iterations)
            loops.append(seconds)
            environments.append(environment)
            time_convolutions(training, True)
            repeats = 2 if shape[2] > 16 else 10
            alone = [time_convolutions(rollout, False) + time_convolutions(training, True) for _ in range(repeats)]
            convolutions.append(statistics.median(alone))
            pass_seconds.append(time_convolutions(yardstick, True) / 20)
        shares = [c / s for c, s in zip(convolutions, loops)]
        rates[script, *shape] = N * T / statistics.median(loops)
        bare = N / (4 * statistics.median(pass_seconds))
        print(
            f"{script.__name__} (L, E, d) = {tuple(shape)}: {rates[script, *shape]:,.0f} training steps/s, "
            f"convolutions' share {statistics.median(shares):.2f} ({', '.join(f'{x:.2f}' for x in shares)}), "
            f"environment {statistics.median(environments):.1%} of the loop, yardstick {bare:,.0f} bare steps/s",
            flush=True,
        )
    print("yardstick: 4 bare forward and backward passes of a 3x3 convolution 160 -> 256 a step and environment")
    print(f"recurrent / non-recurrent time at (4, 1, 64): {rates[ff, 4, 1, 64] / rates[drc, 4, 1, 64]:.2f}")
