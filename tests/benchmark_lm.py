"""Speed, memory and latency of the language models at width 128, bytes, 4,096 tokens an update, on this machine.

    python tests/benchmark_lm.py       # 5 minutes on 2 cores; bf16, the last part, far longer on a CPU without AVX-512

1. Tokens/s of an update (forward, backward, both optimisers) in fp32 and, at the end, in bf16, each model in turn, the
   best of several; `share` = time of the matrix products alone, of weights and of attention, called as the script calls
   them / time of the update.
2. Peak memory of the process with segments of 64, 256 and 1,024 tokens (16 streams, L = 1, E = 16).
3. One-token latency with a full memory.
"""

import ctypes
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import lm_recurrent as recurrent  # noqa: E402
import lm_transformer as standard  # noqa: E402

CASES = [(recurrent, 1, 16), (recurrent, 2, 8), (recurrent, 4, 4), (recurrent, 16, 1), (standard, 16, 1)]


def make(script, layers, experts):
    torch.manual_seed(0)
    args = script.Args(layers=layers, experts=experts)
    model = script.Model(args, 257)
    return args, model, script.make_optimisers(model, args)


def update(script, args, model, optimisers, state, rows, length, amp):
    tokens = torch.randint(257, (rows, length + 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits, square, state = model(tokens[:, :-1], state)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + args.state_l2 * square
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()
    return state


def products_alone(script, layers, experts, rows, length, dtype):
    """Seconds of the products with the levels' weights: forward, both gradients."""
    d, steps, n = 128, (length, rows) if script is recurrent else (1, rows * length), 0.0
    # (heads x caches, queries, keys): a cache's two heads are shared by all experts, or four heads each read 256 tokens
    heads, queries, keys = (2 * rows, 2 * experts, 128) if script is recurrent else (4 * experts * rows, 256, 256)
    q, k, p = (torch.randn(heads, *shape).to(dtype) for shape in ((queries, 32), (keys, 32), (queries, keys)))
    for _ in range(layers):
        shapes = [(d, 2 * d), (d, d), (d, 4 * d), (4 * d, d)] + ([(d, d)] if script is recurrent else [])
        tensors = []
        for i, o in shapes:
            x, y, w = (torch.randn(experts, *s).to(dtype) for s in ((steps[1], i), (steps[1], o), (i, o)))
            tensors.append((x, y, w, torch.zeros_like(w)))
        start = time.perf_counter()
        for _ in range(steps[0]):
            for x, y, w, total in tensors:
                torch.bmm(x, w), torch.bmm(y, w.mT), total.baddbmm_(x.mT, y)
            for _ in range(3):  # attention: queries x keys, probabilities x values, and their four gradients
                torch.bmm(q, k.mT), torch.bmm(p, k)
        n += time.perf_counter() - start
        if script is recurrent:  # the tokens' share of W_in, for all of them at once
            x, w = torch.randn(experts, rows * length, d).to(dtype), torch.randn(experts, d, d).to(dtype)
            start = time.perf_counter()
            torch.bmm(x, w), torch.bmm(x, w.mT), torch.bmm(x.mT, x)
            n += time.perf_counter() - start
    return n


def speed(amp, turns):
    models = {}
    for case in CASES:
        rows, length = (64, 64) if case[0] is recurrent else (16, 256)
        models[case] = [*make(*case), None, rows, length, [], []]
    for turn in range(turns + 1):
        for case, m in models.items():
            args, model, optimisers, state, rows, length, seconds, bare = m
            start = time.perf_counter()
            m[3] = update(case[0], args, model, optimisers, state, rows, length, amp)
            seconds.append(time.perf_counter() - start)
            if turn and (case[1:] != (16, 1) or case[0] is standard):
                bare.append(products_alone(*case, rows, length, torch.bfloat16 if amp else torch.float32))
    best = {case: min(m[6][2:]) for case, m in models.items()}
    for case, m in models.items():
        share = f", share {min(m[7]) / best[case]:.2f}" if m[7] else ""
        ratio = best[case] / best[CASES[-1]]
        print(f"{'bf16' if amp else 'fp32'} {name(case)}: {4096 / best[case]:,.0f} tokens/s, {ratio:.2f} x the time of "
              f"the standard model{share}", flush=True)  # fmt: skip


def name(case):
    return f"{'recurrent' if case[0] is recurrent else 'standard'} L={case[1]} E={case[2]}"


def memory(length):
    """MB of a process that trains one segment of this length, 16 streams, L = 1, E = 16."""
    code = f"""
import sys; sys.path.insert(0, r"{ROOT / "tests"}"); import benchmark_lm as b, re
args, model, optimisers = b.make(b.recurrent, 1, 16)
b.update(b.recurrent, args, model, optimisers, None, 16, {length}, False)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)  # Linux; not the parent's peak
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@torch.no_grad()
def latency(case, batch):
    args, model, _ = make(*case)
    model.eval()
    state, token = (
        model.initial_state(batch) | {"position": 128, "filled": 128},
        torch.zeros(batch, 1, dtype=torch.long),
    )
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        model(token, state)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[10:])


if __name__ == "__main__":
    if sys.platform == "linux":  # as the scripts do
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0), mallopt(-1, -1)
    print(f"{torch.get_num_threads()} torch threads")
    speed(amp=False, turns=8)
    print("peak memory, segments of " + ", ".join(f"{n} tokens {memory(n):,.0f} MB" for n in (64, 256, 1024)))
    for case in CASES:
        print(
            f"latency {name(case)}: batch 1 {latency(case, 1):.2f} ms, batch 16 {latency(case, 16):.2f} ms", flush=True
        )
    speed(amp=True, turns=3)
