"""Recurrent Sokoban agent of "Temporal Recurrence Favors Fewer Layers" (arXiv 2609.12531): PPO on EnvPool.

The agent is `Parallel Experts` with ConvLSTM cells: L levels inside one environment step, E experts a level, width d.
Its state is carried from step to step and feeds back to the first level, so that depth can be traded for time.

    python sokoban_drc_ppo.py --levels easy --eval-levels easy --layers 2 --width 16 --total-timesteps 1_000_000
    python sokoban_drc_ppo.py --layers 4 --seed 1                             # the paper's best small-budget agent
    python sokoban_drc_ppo.py --evaluate runs/NAME/last.pt --capture-video    # solve rate and a GIF
    python sokoban_drc_ppo.py --resume runs/NAME                              # go on after a stop

Sections: Args, Levels, Environment, Model, Evaluation, Records, Setup, Loop.
"""

import contextlib
import ctypes
import functools
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import timeit
import urllib.request
import zipfile
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, Optional

import envpool
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from envpool.python.envpool import EnvPoolMixin
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ======================================================================================================================
# Args
# ======================================================================================================================
@dataclass
class Args:
    seed: int = 1
    """seed of the weights, the sampled actions and the order of levels (not of the level generator)"""
    runs_dir: str = "runs"
    """folder that receives one new folder a run"""
    resume: Optional[str] = None
    """run folder to go on with; its args.json gives every other setting"""
    evaluate: Optional[str] = None
    """checkpoint to evaluate, without training"""
    track: bool = False
    """also log to Weights & Biases (needs `pip install wandb`)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a GPU where there is one"""
    torch_threads: int = 0
    """CPU threads of torch (0: torch's own choice); with several processes on one machine use 1 each"""
    amp: bool = False
    """bf16 autocast"""
    compile: bool = False
    """fuse ConvLSTM's gates with torch.compile instead of the hand-written backward pass"""

    # Levels
    levels: str = "boxoban"
    """boxoban (official unfiltered-train), generated, medium-easy, easy, or a path (Boxoban text file/folder, .npy)"""
    eval_levels: str = "boxoban-test"
    """boxoban-test (999 levels inside EnvPool's wheel), generated, medium-easy, easy, or a path"""
    offline: bool = False
    """never download: --levels boxoban means generated levels unless they are in the cache"""

    # Model
    layers: int = 4
    """L, levels within one environment step"""
    experts: int = 1
    """E, parallel experts a level"""
    width: int = 64
    """d, channels of an expert"""
    cell: Literal["convlstm", "convglu"] = "convlstm"
    """convglu (App. K) has no state of its own: a recurrent agent then carries the experts' merged output alone"""
    aggregate: Literal["sqrt_sum", "sum", "mean", "gate"] = "sqrt_sum"
    """merge of a level's experts (App. D); gate: softmax of one learned logit per expert and level, x sqrt(E)"""
    comm_radius: Optional[int] = None
    """experts read only those within this distance on a ring (App. E); None: all"""
    budget: Optional[Literal["small", "medium", "large"]] = None
    """replaces --experts and --width by the paper's for --layers, the widest of its table (made for convlstm)"""

    # Training; defaults by measurement, the README has the paper's settings as a command
    total_timesteps: int = 50_000_000
    """environment steps, counting num_envs x num_steps an iteration"""
    learning_rate: float = 1e-3
    """Adam's rate at the start"""
    anneal_lr: bool = True
    """decrease the rate linearly to 0"""
    num_envs: int = 64
    """parallel environments"""
    num_steps: int = 20
    """steps of a rollout; the recurrent agent back-propagates through all of them"""
    max_episode_steps: int = 120
    """steps after which a training episode is cut; evaluation episodes always have 120"""
    gamma: float = 0.97
    """discount"""
    gae_lambda: float = 0.8
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches an epoch; each holds whole sequences of num_envs / num_minibatches environments"""
    update_epochs: int = 1
    """passes over a rollout; 1, with 1 minibatch, is the paper's advantage actor-critic"""
    clip_coef: float = 0.2
    """PPO's clipping range"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 1.0
    """weight of the value loss, which is half the mean squared error"""
    logit_coef: float = 1e-4
    """weight of the penalty on squared logits"""
    max_grad_norm: float = 1.0
    """clip of the gradient's global norm (0: none)"""
    bootstrap_time_limit: bool = False
    """add the last observation's value where the step limit cuts an episode (the paper takes it as an end)"""

    # Evaluation and records
    eval_every: int = 500_000
    """steps between evaluations on the first 256 evaluation levels (0: only at the end)"""
    eval_sample: bool = False
    """sample actions in evaluations instead of taking the most likely"""
    thinking_steps: int = 0
    """extra network passes over the first observation of an evaluation episode (no effect without recurrence)"""
    capture_video: bool = False
    """write an animated GIF of four evaluation episodes, the longest of those that were solved (then of the others)"""
    save_states: Optional[str] = None
    """with --evaluate: new folder for the network's states in evaluation episodes, which probe_plans.py reads"""
    state_episodes: int = 400
    """with --save-states: number of episodes, each on another level, none of them in the agent's training set"""
    checkpoint_every: int = 100_000
    """steps between checkpoints"""
    log_every: int = 10
    """iterations between records"""

    batch_size: int = field(init=False, default=0)
    num_iterations: int = field(init=False, default=0)


MODEL_ARGS = ("layers", "experts", "width", "cell", "aggregate", "comm_radius")
BUDGETS = {  # the paper's W, and for each number of layers the (experts, width) of its widest agent
    "small": (36_864, {1: (1, 128), 2: (2, 64), 3: (4, 32), 4: (1, 64), 8: (2, 32)}),
    "medium": (139_264, {1: (1, 256), 2: (2, 128), 3: (1, 128), 4: (1, 128), 8: (2, 64)}),
    "large": (2_129_920, {1: (1, 1024), 2: (2, 512), 3: (5, 256), 4: (1, 512), 8: (2, 256)}),
}
CHANGEABLE = ("total_timesteps", "eval_every", "checkpoint_every", "log_every", "device", "torch_threads", "resume")
POSITIVE = ("layers", "experts", "width", "num_envs", "num_steps", "max_episode_steps", "num_minibatches")
POSITIVE += ("update_epochs", "checkpoint_every", "log_every", "state_episodes")
INTERVAL = 0.5 if sys.stderr.isatty() else 30  # seconds between two lines of a progress bar


def fail(message):
    """Stop with exit status 2: the user can fix this."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def or_fail(message):
    """`fail` where the block raises an error, with the beginning of what it says."""
    try:
        yield
    except Exception as e:
        fail(f"{message} ({type(e).__name__}: {' '.join(str(e).split())[:200]})")


def work(cell, layers, experts, width):
    """The paper's proxy W of the work of one environment step."""
    return layers * experts * width * (32 + 2 * width if cell == "convlstm" else 16 + width / 2)


def parse_args(argv=None):
    """Read and check the command line; the saved run gives the defaults: with --resume all, with --evaluate some."""
    args, saved = tyro.cli(Args, args=argv), {}
    if args.resume is not None and args.evaluate is not None:
        fail("--resume and --evaluate exclude each other")
    if args.evaluate is not None and args.levels != Args.levels:
        fail("--evaluate plays --eval-levels; omit --levels")
    if args.save_states is not None and args.evaluate is None:
        fail("--save-states needs --evaluate CHECKPOINT")
    if args.save_states is not None and Path(args.save_states).exists():
        fail(f"--save-states {args.save_states} exists already; name a new folder")
    if path := args.evaluate or (args.resume and Path(args.resume) / "args.json"):
        with or_fail(f"{path} is missing or damaged; --resume takes a run's folder"):
            saved = load_checkpoint(path)["args"] if args.evaluate else json.loads(path.read_text())["args"]
            used = MODEL_ARGS + ("eval_levels", "seed", "amp") if args.evaluate else saved
            saved = {f.name: saved[f.name] for f in fields(Args) if f.init and f.name in used and f.name in saved}
        args = tyro.cli(Args, args=argv, default=Args(**saved))
    if args.budget:
        table = BUDGETS[args.budget][1]
        if args.layers not in table:
            fail(f"--budget {args.budget} has no agent of {args.layers} layers, only of {list(table)}")
        args.experts, args.width = table[args.layers]
    for name, value in vars(args).items():
        flag, low = "--" + name.replace("_", "-"), int(name in POSITIVE)
        high = 1 if name in ("gamma", "gae_lambda") else 2**31 - 1
        if value == "":
            fail(f"{flag} is empty")
        if isinstance(value, int | float) and not low <= value <= high:
            fail(f"{flag} must be from {low} to {high:,}, not {value!r}")
        if name in ("levels", "eval_levels") and value not in NAMES:
            value = str(Path(value).resolve())  # the same in another working directory
            setattr(args, name, value)
        may_differ = name not in MODEL_ARGS if args.evaluate else name in CHANGEABLE
        if name in saved and value != saved[name] and not may_differ:
            fail(f"{flag} {value} differs from the saved run's {saved[name]}; omit {flag}")
    if args.num_envs % args.num_minibatches:
        fail(f"--num-envs {args.num_envs} is not divisible by --num-minibatches {args.num_minibatches}")
    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // args.batch_size
    if args.num_iterations < 1:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout of {args.batch_size} steps")
    return args


# ======================================================================================================================
# Levels: uint8 (N, 10, 10, 2), [..., 0] fixed (0 floor, 1 wall, 2 target), [..., 1] movable (0 empty, 3 agent, 4 box)
# ======================================================================================================================
CACHE = Path(os.environ.get("BOXOBAN_CACHE") or Path.home() / ".cache" / "boxoban")
TRAIN_URL = "https://github.com/google-deepmind/boxoban-levels/archive/refs/heads/master.zip"
TRAIN_SHA256 = "a952bc817fc1fc96"  # first 16 hex digits, over the 900 files of unfiltered/train in order of their names
EMBEDDED_TEST = Path(envpool.__file__).parent / "jumanji" / "assets" / "boxoban" / "unfiltered-test.npy"
CELLS = np.full((256, 2), 255, np.uint8)  # character -> (fixed, movable)
CELLS[list(b"# .$@*+")] = (1, 0), (0, 0), (2, 0), (0, 4), (0, 3), (2, 4), (2, 3)


def level_ids(levels):
    """Content hash of each level, (N, 10, 10, 2) -> (N,) uint64."""
    digests = (hashlib.blake2b(level, digest_size=8).digest() for level in np.ascontiguousarray(levels))
    return np.frombuffer(b"".join(digests), np.uint64)


def canonical_ids(levels):
    """Content hash that is the same for the 8 rotations and reflections of a level, (N, 10, 10, 2) -> (N,) uint64."""
    sides = levels, levels[:, ::-1]
    return np.min([level_ids(np.rot90(side, k, (1, 2))) for side in sides for k in range(4)], axis=0)


def check_levels(levels, name):
    """Stop with file and level unless each has 4 boxes, 4 targets, 1 player and a closed border."""
    if levels.dtype != np.uint8 or levels.shape[1:] != (10, 10, 2) or not len(levels):
        fail(f"{name}: {levels.dtype} {levels.shape}; uint8 (N, 10, 10, 2) wanted, [..., 0] fixed, [..., 1] movable")
    fixed, movable = levels[..., 0].reshape(-1, 100), levels[..., 1].reshape(-1, 100)
    border = np.pad(np.zeros((8, 8), bool), 1, constant_values=True).ravel()
    checks = {
        "a square that is none of '# .$@*+'": (fixed <= 2).all(1) & np.isin(movable, (0, 3, 4)).all(1),
        "not exactly 4 boxes": (movable == 4).sum(1) == 4,
        "not exactly 4 targets": (fixed == 2).sum(1) == 4,
        "not exactly 1 player": (movable == 3).sum(1) == 1,
        "an open border": (fixed[:, border] == 1).all(1),
        "a box or the player inside a wall": ~((fixed == 1) & (movable != 0)).any(1),
        "all boxes on targets already": ((fixed == 2) & (movable == 4)).sum(1) < 4,
    }
    for fault, ok in checks.items():
        if not ok.all():
            fail(f"{name}, level {np.flatnonzero(~ok)[0]} (from 0): {fault}")
    return levels


def parse_levels(text, name):
    """Text in Boxoban's format (bytes) -> levels (N, 10, 10, 2). Stops with file and level where one is broken."""
    head, *levels = re.split(rb"(?m)^;.*$", text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"))
    if head.strip() or not levels:
        fail(f"{name}: not in Boxoban's text format (a line '; number', then 10 rows of 10 characters)")
    levels = [level.strip(b"\n") + b"\n" for level in levels]
    for k, level in enumerate(levels):
        if len(level) != 110 or level[10::11] != b"\n" * 10:
            fail(f"{name}, level {k} (from 0): not 10 rows of 10 characters")
    return check_levels(CELLS[np.frombuffer(b"".join(levels), np.uint8).reshape(-1, 10, 11)[..., :10]], name)


def write_atomically(path, write):
    """write(file) fills it: all of the bytes or none, also over a kill or a power cut. OSError where that fails."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    tmp.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def boxoban_train(offline):
    """File of the official unfiltered-train levels, in the cache or downloaded there; None where it cannot be had."""
    cached = CACHE / "unfiltered-train.txt"
    if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest().startswith(TRAIN_SHA256):
        return cached
    if offline:
        return None
    try:  # in a thread, since the look-up of a host's name knows no time limit
        response = ThreadPoolExecutor(1).submit(urllib.request.urlopen, TRAIN_URL, timeout=10).result(12)
        size, data = int(response.headers.get("Content-Length") or 0) or None, io.BytesIO()
        with tqdm.wrapattr(response, "read", size, desc="boxoban-levels") as body:
            shutil.copyfileobj(body, data)
        with zipfile.ZipFile(data) as z:  # read in memory: no path of the archive is ever used
            names = sorted(n for n in z.namelist() if "/unfiltered/train/" in n and n.endswith(".txt"))
            text = b"".join(map(z.read, names))
        https = response.geturl().startswith("https://")  # a redirect might lead elsewhere
        if not https or not hashlib.sha256(text).hexdigest().startswith(TRAIN_SHA256):
            raise ValueError("not over HTTPS, or not the sha256 of the official levels")
        write_atomically(cached, lambda f: f.write(text))
        return cached
    except Exception as e:  # a network, a server, an archive and a disk fail in many ways
        print(f"download of {TRAIN_URL} to {cached} failed: {e!r}")


# The generator plays backwards: boxes start on the targets and a player pulls them off, so the reverse is a solution.
# Thousands of games at once: bit 8 * row + column of a uint64 is one of the 8 x 8 squares inside a level's border.
LEFT, RIGHT = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # the outer columns
SHIFT = [lambda b: b >> 8, lambda b: (b & ~RIGHT) << 1, lambda b: b << 8, lambda b: (b & ~LEFT) >> 1]
REACH = 8  # rounds of a flood fill, each up to 4 steps: a longer detour of the player counts as out of reach
# boxes off their targets and pushes (from, to; few are more likely), rounds to the first push
KINDS = {"generated": (4, 4, 12, 30, REACH), "medium-easy": (2, 3, 10, 30, REACH), "easy": (1, 2, 2, 8, 0)}
NAMES = ("boxoban", "boxoban-test", *KINDS)


def any_bit(rng, bits):
    """One of the set bits, at random: the lowest after a random rotation."""
    by = rng.integers(1, 64, len(bits), dtype=np.uint64)
    turned = bits >> by | bits << 64 - by
    lowest = turned & -turned
    return lowest << by | lowest >> 64 - by


def generate_levels(kind, count, seed, exclude=(), n=5000):
    """Distinct levels, also when rotated or mirrored, without those of the canonical ids `exclude` -> levels (count,
    10, 10, 2); the pushes that solve them (count, pulls_to, 2) uint8: bit number of the box (64: no push), move (0 up,
    1 right, 2 down, 3 left)."""
    boxes_from, boxes_to, pulls_from, pulls_to, last_rounds = KINDS[kind]
    rng, seen, kept = np.random.default_rng(seed), set(map(int, exclude)), []
    while sum(len(levels) for levels, _ in kept) < count:
        # n rooms: random walks carve the floor out of solid wall, each step a bar, an L or a block of 2 x 2
        at, move, floor = any_bit(rng, np.full(n, ~np.uint64(0))), rng.integers(4, size=n), np.zeros(n, np.uint64)
        for _ in range(40):
            move = np.where(rng.random(n) < 0.35, rng.integers(4, size=n), move)
            ahead = np.choose(move, [shift(at) for shift in SHIFT])
            at = np.where(ahead, ahead, at)
            up, right, down, left = (shift(at) for shift in SHIFT)
            shapes = left | right, up | down, left | down, right | down, left | down | left << 8
            floor |= at | np.choose(rng.integers(5, size=n), shapes)
        # four targets where a box can be pulled; the boxes on some of them will move, the others are parked
        spots = floor & np.bitwise_or.reduce([shift(floor & shift(floor)) for shift in SHIFT])
        targets, moving = np.zeros((2, n), np.uint64)
        for moves in rng.integers(boxes_from, boxes_to + 1, (3, n)).min(0) > np.arange(4)[:, None]:
            spot = any_bit(rng, spots & ~targets)
            targets, moving = targets | spot, moving | spot * moves
        parked, player = targets ^ moving, any_bit(rng, floor & ~targets)
        box, budget, pushes = 0 * player, rng.integers(pulls_from, pulls_to + 1, (3, n)).min(0), []
        for turn in range(pulls_to + 1):  # in the last one nothing is pulled: it is where the player may start
            free, reach = floor & ~(moving | parked), player
            for _ in range(REACH if turn < pulls_to else last_rounds):
                for shift in SHIFT:
                    reach = reach | free & shift(reach)
            if turn == pulls_to:
                break
            # a box can be pulled by a move from the square beside it to the next; one still on its target comes first
            pullable = np.stack([moving & SHIFT[m ^ 2](reach) & SHIFT[m ^ 2](SHIFT[m ^ 2](free)) for m in range(4)])
            again = np.choose(move, pullable) & box * (rng.random(n) < 0.8)  # as a rule the last pull goes on
            pullable = np.where((pullable & targets).any(0), pullable & targets, pullable)
            move = np.where(again, move, (rng.random((4, n), np.float32) * (pullable != 0)).argmax(0))
            pulled = np.where(again, again, any_bit(rng, np.choose(move, pullable))) * (turn < budget)
            box = np.choose(move, [shift(pulled) for shift in SHIFT])
            moving ^= pulled | box
            player = np.where(pulled, np.choose(move, [shift(box) for shift in SHIFT]), player)
            pushes.append((np.bitwise_count(box - 1), move ^ 2))
        # keep the games that went well, and of those the levels not seen before
        player, off = any_bit(rng, reach & ~targets), np.bitwise_count(moving & ~targets)
        pushes = np.array(pushes[::-1], np.uint8).transpose(2, 0, 1)
        good = (off >= boxes_from) & (off <= boxes_to) & (player != 0) & (np.bitwise_count(targets) == 4)
        good &= (pushes[:, :, 0] < 64).sum(1) >= pulls_from
        planes = np.stack([floor, targets, moving | parked, player], 1)[good].view(np.uint8).reshape(-1, 4, 8)
        floor, targets, boxes, player = np.unpackbits(planes, 2, bitorder="little").reshape(-1, 4, 8, 8).swapaxes(0, 1)
        levels = np.full((len(planes), 10, 10, 2), (1, 0), np.uint8)
        levels[:, 1:9, 1:9] = np.stack([1 - floor + 2 * targets, 3 * player + 4 * boxes], -1)
        new = [i for i, key in enumerate(canonical_ids(levels).tolist()) if not (key in seen or seen.add(key))]
        kept.append((levels[new], pushes[good][new]))
    return tuple(np.concatenate(parts)[:count] for parts in zip(*kept))


def load_levels(name, offline=False, exclude=None):
    """Levels by name or path -> (levels without duplicates, their real name, number and hash). `exclude`: evaluation
    levels, which are left out; from generated levels also where they are rotated or mirrored."""
    path = EMBEDDED_TEST if name == "boxoban-test" else boxoban_train(offline) if name == "boxoban" else Path(name)
    if not path:
        print("!" * 100 + "\n!! Boxoban levels are not available: GENERATED levels instead.")
        print("!! Run once with network, or name a copy (--levels PATH).\n" + "!" * 100)
        name = "generated"
    if name in KINDS:
        seed = 2 * list(KINDS).index(name) + (exclude is None)  # fixed, whatever --seed is
        count, ids = (1000, ()) if exclude is None else (100_000, canonical_ids(exclude))
        levels, _ = generate_levels(name, count, seed, ids)
    else:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path] * path.exists()
        if not files:
            fail(f"{path}: no such file, or no .txt file in that folder; the names are {', '.join(NAMES)}")
        with or_fail(f"{path}: not a readable level file"):
            if path.suffix == ".npy":
                levels = check_levels(np.array(np.lib.format.open_memmap(path, mode="r")), path)
            else:
                levels = np.concatenate([parse_levels(file.read_bytes(), file) for file in files])
    ids = level_ids(levels)
    distinct = np.sort(np.unique(ids, return_index=True)[1])
    keep = distinct if exclude is None else distinct[~np.isin(ids[distinct], level_ids(exclude))]
    if not len(keep):
        fail(f"--levels {name}: every level is also an evaluation level; none is left to train on")
    facts = {"name": name, "count": len(keep), "sha256": hashlib.sha256(levels[keep].tobytes()).hexdigest()[:16]}
    left_out = f"{len(ids) - len(distinct)} duplicates, {len(distinct) - len(keep)} evaluation levels"
    print(f"levels {name}: {len(keep)}, sha256 {facts['sha256']}; left out: {left_out}")
    return levels[keep], facts


# ======================================================================================================================
# Environment
# ======================================================================================================================
class Sokoban:
    """EnvPool's Sokoban-v0 in small pools, each with a level file (shard) of its own, each environment with its seed.
    A row that comes with done holds the last observation of its episode; the next call ignores the action and returns
    the first one of a new episode."""

    def __init__(self, shards, env_seeds, max_episode_steps=120):
        self.pools, first = [], []
        self.edges = np.cumsum([len(seeds) for seeds in env_seeds])[:-1]
        for levels, seeds in zip(shards, env_seeds):
            base = CACHE / "shards" / hashlib.sha256(levels.tobytes()).hexdigest()[:16]
            path = base / "jumanji" / "assets" / "boxoban" / "unfiltered-test.npy"  # the one name that EnvPool reads
            with or_fail("cannot write EnvPool's level file; name another folder in the variable BOXOBAN_CACHE"):
                if not path.is_file():
                    write_atomically(path, lambda f, levels=levels: np.save(f, levels))
            options = {"num_envs": len(seeds), "num_threads": 1, "env_seed": [int(s) for s in seeds]}
            options |= {"base_path": str(base), "max_episode_steps": max_episode_steps}
            self.pools.append(envpool.make("Sokoban-v0", env_type="gymnasium", **options))
            first.append(self.pools[-1].reset()[0]["grid"])
            if not np.isin(level_ids(first[-1][..., ::-1]), level_ids(levels)).all():  # a wrong path gives a toy level
                raise RuntimeError(f"EnvPool does not serve the levels of {path}")
        self.first = np.concatenate(first)

    def step(self, actions):
        """actions (N,) -> grid (N, 10, 10, 2) uint8, movable channel first; reward, done, timeout, solved (N,)"""
        for pool, a in zip(self.pools, np.split(actions.astype(np.int32), self.edges)):
            pool.send(a)
        # pool.recv() would copy each board for drawing, which takes longer than the step
        obs, *got, info = zip(*(EnvPoolMixin.recv(pool) for pool in self.pools))
        reward, terminated, truncated = map(np.concatenate, got)
        grid, solved = np.concatenate([o["grid"] for o in obs]), np.concatenate([i["solved"] for i in info])
        done = terminated | truncated
        return grid, reward, done, done & ~solved, done & solved  # a level solved on its last step is no timeout


def training_shards(levels, num_envs, seed):
    """Pools of 16 environments or fewer, each with its part of the levels, which alone it plays -> shards, seeds.
    EnvPool keeps a copy of the pool's shard for each environment; all copies together stay under 1 GB."""
    size = next(s for s in (16, 8, 4, 2, 1) if s == 1 or len(levels) * s * 228 < 1e9)  # bytes a level takes there
    n = -(-num_envs // size)  # with fewer levels than pools some pools share one
    seeds = np.random.SeedSequence(seed).generate_state(num_envs) >> 1
    return [levels[i % len(levels) :: n] for i in range(n)], np.array_split(seeds, n)


@functools.cache
def opening_seeds(n):
    """Seeds with which an environment opens with level 0, 1, ... n-1 of a file of n <= 100 levels: EnvPool has no other
    way to choose. Which one depends on seed and n alone, so any n levels will do to find out; `evaluate` checks it."""
    levels = np.load(EMBEDDED_TEST, allow_pickle=False)[:n]
    opened = level_ids(Sokoban([levels], [range(20 * n)]).first[..., ::-1])  # enough seeds to open with each level
    return [np.flatnonzero(opened == level)[0] for level in level_ids(levels)]


# ======================================================================================================================
# Model
# ======================================================================================================================
EPS = 1e-5


def lstm_gates(z, c, scale):
    """RMS norm over an expert's 4d channels, then LSTM gates. z (B, E, 4d, H, W), c (B, E, d, H, W) -> h, c."""
    z = z.float()
    i, f, o, g = (z * torch.rsqrt(z.square().mean(2, keepdim=True) + EPS) * scale).chunk(4, 2)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class LSTMGates(torch.autograd.Function):
    """`lstm_gates` with the backward pass by hand: fewer passes over memory, which is what a CPU waits for."""

    @staticmethod
    def forward(ctx, z, c, scale):
        z = z.float()
        r = z.square().mean(2, keepdim=True).add_(EPS).rsqrt_()
        a = (z * r).mul_(scale)
        i, f, o, g = a.chunk(4, 2)
        g.mul_(2)
        a.sigmoid_()
        g.mul_(2).sub_(1)  # tanh(g), in a fifth of the time that torch's own takes on a CPU
        c_new = (f * c).addcmul_(i, g)
        tanh_c = c_new.mul(2).sigmoid_().mul_(2).sub_(1)
        ctx.save_for_backward(z, r, a, c, tanh_c, scale)
        return o * tanh_c, c_new

    @staticmethod
    def backward(ctx, dh, dc):
        z, r, a, c, tanh_c, scale = ctx.saved_tensors
        i, f, o, g = a.chunk(4, 2)
        dh_tanh_c = dh * tanh_c
        dc = torch.addcmul(dh, dh_tanh_c, tanh_c, value=-1).mul_(o).add_(dc)
        da = torch.addcmul(a, a, a, value=-1)  # sigmoid' = a - a^2
        di, df, do, dg = da.chunk(4, 2)
        di.mul_(dc).mul_(g)
        df.mul_(dc).mul_(c)
        do.mul_(dh_tanh_c)
        torch.mul(g, g, out=dg).neg_().add_(1).mul_(dc).mul_(i)  # tanh' = 1 - a^2
        # y = scale r z with r = rsqrt(mean(z^2) + eps): dz = r (scale dy - z r^2 mean(scale dy z))
        az = (da * z).flatten(3)
        dscale = (az @ r.flatten(3).mT).sum(0).view_as(scale)
        mean = (scale.flatten(1).unsqueeze(1) @ az).view_as(r) / az.shape[2]
        dz = da.mul_(scale).addcmul_(z, mean.mul_(r).mul_(r), value=-1).mul_(r)
        return dz, dc.mul_(f), dscale


def lecun_normal(module, fan_in):
    for name, p in module.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(p, std=fan_in**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class ConvLSTM(nn.Module):
    """All experts of one level. The 3x3 convolution of [x, s, h] -> 4d is the sum of three: of x, the observation; of
    s, the merged output of the level below; of h, the same expert's own output there, not at this level as in a usual
    ConvLSTM. Below the first level lies the last one, a step ago (without recurrence: nothing). c is a level's own."""

    def __init__(self, inputs, width, experts):
        super().__init__()
        self.conv_x = nn.Conv2d(inputs, experts * 4 * width, 3, padding=1)
        self.conv_s = nn.Conv2d(width, experts * 4 * width, 3, padding=1, bias=False)
        self.conv_h = nn.Conv2d(experts * width, experts * 4 * width, 3, padding=1, bias=False, groups=experts)
        self.scale = nn.Parameter(torch.ones(experts, 4 * width, 1, 1))
        self.gates = LSTMGates.apply
        lecun_normal(self, 9 * (inputs + 2 * width))

    def kernel(self):
        """The weights that read s and h; one expert's h is s, so that the sum of both is exact."""
        pair = self.conv_s.weight, self.conv_h.weight
        return sum(pair) if self.conv_h.groups == 1 else torch.cat(pair, 1)

    def reads(self, s, h):
        """s (B, d or E d, 10, 10), h (B, E, d, 10, 10) -> what `kernel` reads, expert by expert (B, ..., 10, 10)"""
        if self.conv_h.groups == 1:
            return s
        return torch.cat([s.unflatten(1, (-1, h.shape[2])).expand_as(h), h], 2).flatten(1, 2)

    def forward(self, z, c):
        """z (B, E, 4d, 10, 10), the convolution; c (B, E, d, 10, 10) -> h like c, c"""
        return self.gates(z, c, self.scale)


class ConvGLU(nn.Module):
    """All experts of one level, without a state of their own (App. K): 3x3 convolution of [x, s] -> value and gate."""

    def __init__(self, inputs, width, experts):
        super().__init__()
        self.conv_x = nn.Conv2d(inputs, experts * 2 * width, 3, padding=1)
        self.conv_s = nn.Conv2d(width, experts * 2 * width, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.ones(experts, width, 1, 1))
        lecun_normal(self, 9 * (inputs + width))

    def kernel(self):
        return self.conv_s.weight

    def reads(self, s, h):
        return s

    def forward(self, z, c):
        """As ConvLSTM's; c is not read. RMS norm over each expert's channels and board."""
        z = F.glu(z.float(), 2)
        return z * torch.rsqrt(z.square().mean((2, 3, 4), keepdim=True) + EPS) * self.scale, c


class Agent(nn.Module):
    """Parallel Experts (Sec. 3 of the paper), policy and value heads."""

    def __init__(self, layers, experts, width, cell="convlstm", aggregate="sqrt_sum", comm_radius=None):
        super().__init__()
        self.experts, self.width, self.aggregate = experts, width, aggregate
        self.embedding = nn.Parameter(torch.randn(2, 5, 16) * 0.1)  # torch's 1.0 learns 10x slower behind the norm
        cells = {"convlstm": ConvLSTM, "convglu": ConvGLU}
        self.cells = nn.ModuleList(cells[cell](32, width, experts) for _ in range(layers))
        self.merge_logits = nn.Parameter(torch.zeros(layers, experts)) if aggregate == "gate" else None
        # hears[f, e] = 1 where reader f hears expert e; one row where all readers hear all experts
        ring = torch.arange(experts)
        ring = torch.min((ring - ring[:, None]) % experts, (ring[:, None] - ring) % experts)
        local = comm_radius is not None and comm_radius < experts // 2
        self.register_buffer("hears", (ring <= comm_radius).float() if local else torch.ones(1, experts), False)
        # channels of the state: s of the last level, c of every level, h of the last level (one expert's h is s)
        private = experts * width * (cell == "convlstm")
        self.state_channels = [len(self.hears) * width] + [private] * layers + [private * (experts > 1)]
        self.norm = nn.Parameter(torch.ones(width, 1))
        self.attention = nn.Linear(width, 1, bias=False)
        self.dense = nn.Linear(2 * width, 2 * 256)
        self.actor = nn.Linear(256, 4)
        self.critic = nn.Linear(256, 1)
        for layer in (self.attention, self.dense, self.actor, self.critic):
            lecun_normal(layer, layer.in_features)

    def initial_state(self, batch, device=None):
        return torch.zeros(batch, sum(self.state_channels), 10, 10, device=device)

    def encode(self, obs):
        """obs (N, 10, 10, 2) uint8, movable channel first -> x (N, 6, 10, 10), one-hot: empty, agent, box; floor, wall,
        target; r (N, 1, 1, 1); kernels of the levels, which read r x. The paper embeds each channel's class, 2 x 16
        channels, and takes the RMS norm over channels and board. A 3x3 convolution of that is r times one of the
        classes themselves, 2 x 3 channels, with embedding x kernel as its kernel."""
        classes = torch.tensor([[[0], [3], [4]], [[0], [1], [2]]], dtype=torch.uint8, device=obs.device)
        one_hot = (obs.view(-1, 1, 100, 2).permute(0, 3, 1, 2) == classes).to(self.embedding.dtype)
        table = self.embedding[[[0], [1]], classes[..., 0].long()]  # (2, 3, 16)
        mean_square = (one_hot.mean(3) * table.square().mean(2)).sum((1, 2)) / 2
        r = torch.rsqrt(mean_square + EPS).view(-1, 1, 1, 1)
        kernels = [(table @ cell.conv_x.weight.view(-1, 2, 16, 9)).view(-1, 6, 3, 3) for cell in self.cells]
        return one_hot.view(-1, 6, 10, 10), r, kernels

    def merge(self, h, l, hears=None):
        """The outputs of level l's experts (B, E, d, 10, 10), summed for each row of hears (None: one row, of all)
        -> (B, rows x d, 10, 10)"""
        if self.experts == 1:
            return h.flatten(1, 2)
        hears = torch.ones_like(self.hears[:1]) if hears is None else hears
        n = hears.sum(1, keepdim=True)
        if self.aggregate == "gate":
            weights = (self.merge_logits[l] + hears.log()).softmax(1) * n.sqrt()
        else:
            weights = hears / n ** {"sqrt_sum": 0.5, "sum": 0, "mean": 1}[self.aggregate]
        return (weights @ h.flatten(2)).view(len(h), -1, 10, 10)

    def core(self, obs, first, state):
        """The recurrence, for a rollout (T = 1) and for training (T = n) alike.

        obs (T, B, 10, 10, 2) uint8; first (T, B), 1 where obs opens an episode: the state is zeroed before that step;
        state (B, channels, 10, 10) -> what the readout sees at every step (T, B, d, 10, 10), the state after the last.
        """
        (T, B), E = first.shape, self.experts
        x, r, kernels = self.encode(obs.flatten(0, 1))
        u = [F.conv2d(x, kernel, padding=1) for kernel in kernels]  # each level's share of the observations is r u
        u, r = [u_l.view(T, B, -1, 10, 10).unbind(0) for u_l in u], r.view(T, B, 1, 1, 1)
        s, *parts = state.split(self.state_channels, 1)
        *c, h = [p.view(B, E, p.shape[1] // E, 10, 10) for p in parts]  # h has no channels where `reads` takes s alone
        kernels, outputs = [cell.kernel() for cell in self.cells], []
        for t, opens in enumerate(first.any(1).tolist()):
            if opens:
                keep = (1 - first[t]).view(B, 1, 1, 1, 1)
                s, h, c = s * keep[:, 0], h * keep, [c_l * keep for c_l in c]
            for l, cell in enumerate(self.cells):
                read = cell.reads(s, h)
                groups = read.shape[1] // kernels[l].shape[1]
                z = F.conv2d(read, kernels[l], cell.conv_x.bias, padding=1, groups=groups)
                h, c[l] = cell(z.addcmul_(u[l][t], r[t]).view(B, E, -1, 10, 10), c[l])
                s = self.merge(h, l, self.hears)
            outputs.append(s if len(self.hears) == 1 else self.merge(h, l))
        state = torch.cat([s, *(c_l.flatten(1, 2) for c_l in c), h.flatten(1, 2)[:, : self.state_channels[-1]]], 1)
        return torch.stack(outputs), state

    def forward(self, obs, first, state):
        """-> logits (T, B, 4), value (T, B), state after the last step (see `core`)."""
        s, state = self.core(obs, first, state)
        s = s.flatten(3).float()
        s = s * torch.rsqrt(s.square().mean(2, keepdim=True) + EPS) * self.norm  # (T, B, d, 100)
        attention = torch.softmax(self.attention.weight @ s, -1)  # (T, B, 1, 100)
        pooled = torch.cat([(s @ attention.transpose(2, 3)).squeeze(3), s.mean(3)], 2)
        hidden = F.glu(self.dense(pooled))  # value * sigmoid(gate)
        return self.actor(hidden).float(), self.critic(hidden).squeeze(2).float(), state


def gae(rewards, values, dones, timeouts, gamma, gae_lambda):
    """Generalised advantage estimation (Schulman et al. 2016) under next-step autoreset. rewards (T, B); values, dones,
    timeouts (T+1, B): dones[t] = 1 says that obs[t] is the last one of its episode (row t then is no step of any),
    timeouts[t] = 1 to bootstrap from its value. -> advantages (T, B), 0 in such rows."""
    advantages, lastgaelam, nextvalues = torch.zeros_like(rewards), 0, values * (1 - dones + timeouts)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * nextvalues[t + 1] - values[t]
        advantages[t] = lastgaelam = (delta + gamma * gae_lambda * lastgaelam) * (1 - dones[t])
    return advantages


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def masked_variance(x, mask):
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def ppo_loss(agent, mb, args):
    """Loss of a minibatch of whole sequences, each entry of mb (T, B, ...) but for state (B, ...); rows that are no
    steps are left out of every mean. As in the paper, advantages are not normalised. -> loss, dict of scalars"""
    logits, newvalue, _ = agent(mb["obs"], mb["firsts"], mb["state"])
    logp, valid = logits.log_softmax(-1), 1 - mb["dones"]
    logratio = (logp.gather(-1, mb["actions"].unsqueeze(-1)).squeeze(-1) - mb["logprobs"]) * valid
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = masked_mean(torch.max(-mb["advantages"] * ratio, -mb["advantages"] * clipped), valid)
    v_loss = 0.5 * masked_mean((newvalue - mb["returns"]).square(), valid)
    entropy = masked_mean(-(logp.exp() * logp).sum(-1), valid)
    logit_loss = masked_mean(logits.square().sum(-1), valid)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss + args.logit_coef * logit_loss
    scalars = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy, "squared_logits": logit_loss}
    scalars["approx_kl"] = masked_mean((ratio - 1) - logratio, valid)
    scalars["clipfrac"] = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid)
    return loss, {k: v.detach() for k, v in scalars.items()}


# ======================================================================================================================
# Evaluation
# ======================================================================================================================
@torch.no_grad()
def evaluate(agent, levels, device, sample=False, thinking_steps=0, seed=0, stop=()):
    """Play each level once, 120 steps at most, without touching the training's random state. levels (N, 10, 10, 2),
    all different -> dict of solved, returns, lengths (N,), actions (N, 120); None as soon as `stop` is not empty."""
    generator = torch.Generator(device=device).manual_seed(seed)
    played, taken = np.zeros((3, len(levels))), np.zeros((len(levels), 120), np.int8)  # solved, return, length; actions
    for start in range(0, len(levels), 1000):
        batch = levels[start : start + 1000]
        shards, n = np.split(batch, range(100, len(batch), 100)), len(batch)
        envs = Sokoban(shards, [opening_seeds(len(s)) for s in shards])
        grid = envs.first
        if not (grid == batch[..., ::-1]).all():
            raise RuntimeError("EnvPool does not open with the wanted levels; is this envpool 1.2.5?")
        state, first, alive = agent.initial_state(n, device), torch.ones(1, n, device=device), np.arange(n)
        for t in tqdm(range(-thinking_steps, 120), "evaluation", leave=False, mininterval=INTERVAL):
            if stop:
                return None
            logits, _, state = agent(torch.from_numpy(grid[alive]).to(device).unsqueeze(0), first, state)
            first = torch.zeros_like(first)
            if t < 0:  # the same observation again
                continue
            probs, actions = logits[0].softmax(-1), np.zeros(n, int)
            choice = torch.multinomial(probs, 1, generator=generator)[:, 0] if sample else probs.argmax(-1)
            actions[alive] = choice.cpu().numpy()
            grid, reward, done, _, solved = envs.step(actions)
            taken[start + alive, t] = actions[alive]
            played[:, start + alive] += np.stack([solved, reward, np.ones(n)])[:, alive]
            running = ~done[alive]  # finished episodes leave the batch
            alive, state, first = alive[running], state[torch.from_numpy(running)], first[:, : running.sum()]
            if not len(alive):
                break
    return {"solved": played[0] > 0, "returns": played[1], "lengths": played[2].astype(int), "actions": taken}


@torch.no_grad()
def save_states(folder, networks, levels, result, thinking_steps, meta):
    """Play `levels` again with the actions of `result` (see `evaluate`) and write what probe_plans.py reads.

    networks: {"trained": agent, "untrained": agent}. All arrays but terminal_grid have one row a pass: `t` counts the
    steps of `episode`, below 0 are thinking steps. NETWORK_h1.npy, ..., float16 (rows, 10, 10, channels), are the
    states after the layer's update: h and c of all experts; s, their merge, where it is not h itself; s alone where
    experts have no state of their own.
    """
    agent, device, passed = networks["trained"], networks["trained"].embedding.device, []
    count = result["lengths"] + thinking_steps
    start, episode = count.cumsum() - count, np.arange(len(levels), dtype=np.int32).repeat(count)
    t = np.arange(len(episode), dtype=np.int32) - start[episode].astype(np.int32) - thinking_steps
    tables = {"episode": episode, "t": t, "level_id": level_ids(levels)[episode], "solved": result["solved"][episode]}
    tables["action"] = np.where(t < 0, np.int8(-1), result["actions"][episode, t.clip(0)])
    tables |= {"grid": np.zeros((len(t), 10, 10, 2), np.uint8), "terminal_grid": np.zeros_like(levels)}
    kinds = dict.fromkeys("hc", agent.experts * agent.width) if any(agent.state_channels[1:]) else {}
    kinds |= {"s": agent.width} if agent.experts > 1 or not kinds else {}
    parts = list(itertools.product(networks, kinds, range(len(agent.cells))))
    size = sum(200 * len(t) * kinds[kind] for _, kind, _ in parts) + sum(a.nbytes for a in tables.values())
    tmp = Path(f"{Path(folder)}.half-written")  # a name that nobody else gives; Path drops a slash at the end
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # of a start that was killed
        tmp.mkdir(parents=True)
        free = shutil.disk_usage(tmp).free
        print(f"{len(levels)} episodes, {len(t):,} passes: {size / 1e6:,.1f} MB to write, {free / 1e6:,.0f} MB free")
        if free < 2 * size:
            fail(f"{folder} needs twice that to be free; lower --state-episodes, or name a folder on another disk")
        new = functools.partial(np.lib.format.open_memmap, mode="w+", dtype=np.float16)
        files = {(n, k, l): new(tmp / f"{n}_{k}{l + 1}.npy", shape=(len(t), 10, 10, kinds[k])) for n, k, l in parts}
        for file in tmp.iterdir() if hasattr(os, "posix_fallocate") else ():  # a map on a full disk ends in SIGBUS
            with open(file, "r+b") as f:
                os.posix_fallocate(f.fileno(), 0, file.stat().st_size)
        for cell in (cell for network in networks.values() for cell in network.cells):
            cell.register_forward_hook(lambda cell, inputs, output: passed.append(output))
        batches = np.split(np.arange(len(levels)), range(100, len(levels), 100))
        for batch in tqdm(batches, "states", leave=False, mininterval=INTERVAL):
            envs = Sokoban([levels[batch]], [opening_seeds(len(batch))])
            grid, states = envs.first, {name: agent.initial_state(len(batch), device) for name in networks}
            for now in range(-thinking_steps, result["lengths"][batch].max()):
                alive = np.flatnonzero(result["lengths"][batch] > now)
                row, obs = start[batch[alive]] + thinking_steps + now, torch.from_numpy(grid[alive]).to(device)
                tables["grid"][row] = grid[alive]
                for name, network in networks.items():
                    passed.clear()
                    first = torch.zeros(1, len(alive), device=device)  # the state is zero already
                    states[name][alive] = network(obs.unsqueeze(0), first, states[name][alive])[2]
                    for l, (h, c) in enumerate(passed):
                        s = network.merge(h, l)
                        for kind in kinds:
                            x = {"h": h, "c": c, "s": s}[kind].reshape(len(alive), -1, 10, 10)
                            files[name, kind, l][row] = x.movedim(1, 3).half().cpu().numpy()
                if now >= 0:
                    grid = envs.step(result["actions"][batch, now])[0]
                    tables["terminal_grid"][batch[alive]] = grid[alive]  # the last one stays
        for name, array in tables.items():
            np.save(tmp / f"{name}.npy", array)
        meta |= {"kinds": kinds, "episodes": len(levels), "passes": len(t), "thinking_steps": thinking_steps}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        tmp.rename(folder)
    except OSError as e:
        fail(f"{folder} cannot be written ({e})")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def summarise(result):
    """Solve rate with Wilson's 95 % interval, mean return, mean length -> dict of eval/ scalars; prints them."""
    solved, n, z = int(result["solved"].sum()), len(result["solved"]), 1.959964
    centre, half = solved + z**2 / 2, z * math.sqrt(solved * (n - solved) / n + z**2 / 4)  # Wilson 1927
    low, high = (centre - half) / (n + z**2), (centre + half) / (n + z**2)
    returns, lengths = result["returns"].mean(), result["lengths"].mean()
    tqdm.write(f"evaluation: {solved} of {n} levels solved, {solved / n:.2%} (95 % interval {low:.2%} to "
               f"{high:.2%}), mean return {returns:.2f}, mean length {lengths:.1f}")  # fmt: skip
    return {"eval/solve_rate": solved / n, "eval/episodic_return": returns, "eval/episodic_length": lengths}


def write_gif(path, levels, result):
    """The four longest solved episodes of `result` (see `evaluate`), played again side by side, 16 pixels a square."""
    chosen = np.argsort(-(result["solved"] * result["lengths"]), kind="stable")[:4]
    length, boards = result["lengths"][chosen], [levels[chosen, ..., ::-1]]
    envs = Sokoban([levels[chosen]], [opening_seeds(len(chosen))])
    for t in range(length.max()):
        grid = envs.step(result["actions"][chosen, t])[0]
        boards.append(np.where((t < length)[:, None, None, None], grid, boards[-1]))
    colours, wall = np.zeros((5, 3, 3), np.uint8), (84, 84, 92)
    colours[0] = (222, 214, 196), wall, (232, 150, 140)  # nothing on floor, wall, target
    colours[3], colours[4] = (58, 110, 200), ((176, 120, 60), wall, (80, 160, 80))  # the agent; a box
    movable, fixed = np.moveaxis(np.concatenate(np.swapaxes(boards, 0, 1), 2), 3, 0)  # (frames, 10, K x 10)
    pixels = colours[movable, fixed].repeat(16, 1).repeat(16, 2)
    pixels[:, ::16] = pixels[:, :, ::16] = wall
    images = [Image.fromarray(image).quantize(16) for image in pixels]
    durations = [1000] + [150] * (len(images) - 2) + [2000]
    with or_fail(f"could not write {path}"):
        images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0)
    print(f"wrote {path}")


# ======================================================================================================================
# Records
# ======================================================================================================================
class Records:
    """Scalars to TensorBoard and metrics.csv. What an earlier start of the run wrote after `step` is dropped."""

    def __init__(self, run_dir, step):
        self.run_dir, path = run_dir, run_dir / "metrics.csv"
        for half_written in run_dir.glob("*.tmp"):  # by a start that was killed
            half_written.unlink()
        text = path.read_text(errors="replace") if path.exists() else ""
        rows = [row for row, at in re.findall(r"^((\d+),.+,.+)$", text, re.M) if int(at) <= step]
        write_atomically(path, lambda f: f.write("\n".join(["step,name,value", *rows, ""]).encode()))
        while [*run_dir.glob(f"events.*.{int(time.time())}.*")]:  # read in the order of the second in their names
            time.sleep(0.1)
        self.file, self.writer = open(path, "a"), SummaryWriter(run_dir, purge_step=step + 1)

    def write(self, step, scalars):
        try:
            for name, value in scalars.items():
                self.file.write(f"{step},{name},{float(value)}\n")
                self.writer.add_scalar(name, float(value), step)
            self.file.flush()
            self.writer.flush()
        except OSError as e:  # a full disk must not end a training
            tqdm.write(f"could not write the scalars of step {step}: {e}")
            self.writer = SummaryWriter(self.run_dir)  # its thread has ended


def load_checkpoint(path):
    """Stops with a message where the file is missing, truncated or not one of this script's."""
    with or_fail(f"there is no checkpoint {path}, or no whole checkpoint"):
        if bad := zipfile.ZipFile(path).testzip():  # torch.load does not look at the checksums
            raise ValueError(f"wrong checksum of {bad}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
    if script != Path(__file__).stem:
        fail(f"{path} was written by {script}.py, not by {Path(__file__).name}")
    return checkpoint


def peak_memory(device):
    """Peak MB of the process, on a GPU of the tensors there; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    with contextlib.suppress(ImportError):  # Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e6 / 1024)
    return 0


if __name__ == "__main__":
    # ==================================================================================================================
    # Setup
    # ==================================================================================================================
    args = parse_args()
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    if sys.platform == "linux":  # keep freed memory: fetching it anew from the kernel costs a third of an update
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(-4, 0), mallopt(-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with or_fail(f"--device {args.device} cannot be used here"):
        device = torch.empty(0, device=gpu if args.device == "auto" else args.device).device
    device_rng = getattr(torch, device.type) if device.type != "cpu" else torch  # torch, torch.cuda or torch.mps
    torch.manual_seed(args.seed)
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=args.amp)

    agent = Agent(args.layers, args.experts, args.width, args.cell, args.aggregate, args.comm_radius).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-6)
    if args.compile and args.cell == "convlstm":
        for cell in agent.cells:
            cell.gates = torch.compile(lstm_gates)
    W = work(args.cell, args.layers, args.experts, args.width)
    model_facts = {"parameters": sum(p.numel() for p in agent.parameters()), "W": W}
    model_facts |= {f"W / {name} budget": round(W / budget, 3) for name, (budget, _) in BUDGETS.items()}
    for batch in (32, 1):
        board = torch.zeros(1, batch, 10, 10, 2, dtype=torch.uint8, device=device)
        inputs = board, torch.ones(1, batch, device=device), agent.initial_state(batch, device)
        with torch.no_grad(), autocast():
            seconds = timeit.repeat(lambda inputs=inputs: agent(*inputs)[0].cpu(), number=1, repeat=10)
        model_facts[f"latency_ms_batch_{batch}"] = round(1000 * float(np.median(seconds)), 3)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        agent(*inputs)
    model_facts["flops_per_step"] = counter.get_total_flops()  # forward
    machine = f"{platform.platform()}, {device}, {torch.get_num_threads()} torch threads"
    print(f"{machine}\nagent L={args.layers} E={args.experts} d={args.width}: {model_facts}")

    # where a run begins, or goes on
    checkpoint = {"iteration": 0, "global_step": 0, "evaluated": 0, "best": -1.0, "elapsed": 0.0, "episodes": []}
    counters = list(checkpoint)
    if path := args.evaluate or args.resume and Path(args.resume) / "last.pt":
        checkpoint |= load_checkpoint(path)
        with or_fail(f"{path} holds an agent of another shape"):
            agent.load_state_dict(checkpoint["agent"])
    iteration, global_step, evaluated, best, elapsed, episodes = map(checkpoint.get, counters)
    episodes = deque(episodes, maxlen=400)  # [return, length, solved] of the last ones

    signals = []  # those that came while training
    eval_levels, eval_facts = load_levels(args.eval_levels, args.offline)
    args.eval_levels = eval_facts["name"]

    def play(levels):
        with autocast():
            return evaluate(agent, levels, device, args.eval_sample, args.thinking_steps, args.seed, signals)

    if args.evaluate:
        if args.save_states is not None:
            trained_on = checkpoint["args"]
            if args.eval_levels != trained_on["eval_levels"] or args.eval_levels not in (*KINDS, "boxoban-test"):
                held_out, _ = load_levels(trained_on["eval_levels"], args.offline)
                levels, facts = load_levels(trained_on["levels"], args.offline, exclude=held_out)
                if facts["sha256"] != checkpoint["levels"]["sha256"]:
                    fail(f"cannot tell which levels are new: the agent was trained on {checkpoint['levels']}")
                eval_levels = eval_levels[~np.isin(canonical_ids(eval_levels), canonical_ids(levels))]
            if len(eval_levels) < args.state_episodes:
                fail(f"{args.eval_levels} has {len(eval_levels)} levels new to the agent; lower --state-episodes")
            eval_levels = eval_levels[: args.state_episodes]
        result = play(eval_levels)
        summarise(result)
        if args.save_states is not None:
            meta = {"script": Path(__file__).stem, "args": checkpoint["args"], "step": global_step}
            meta |= {"eval_sample": args.eval_sample, "seed": args.seed, "amp": args.amp, "levels": eval_facts}
            meta["checkpoint_sha256"] = hashlib.sha256(Path(args.evaluate).read_bytes()).hexdigest()
            meta["levels"] |= {"count": len(eval_levels), "sha256": hashlib.sha256(eval_levels).hexdigest()[:16]}
            fresh = Agent(*(getattr(args, name) for name in MODEL_ARGS)).to(device)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-written stays
            networks = {"trained": agent, "untrained": fresh}
            with autocast():
                save_states(args.save_states, networks, eval_levels, result, args.thinking_steps, meta)
        if args.capture_video:
            write_gif(Path(args.evaluate).with_suffix(".gif"), eval_levels, result)
        sys.exit()

    levels, facts = load_levels(args.levels, args.offline, exclude=eval_levels)
    args.levels = facts["name"]
    if args.resume:
        if checkpoint["finished"] and iteration >= args.num_iterations:
            fail(f"{args.resume} is finished; raise --total-timesteps, or use --evaluate {path}")
        for was, now in (checkpoint["levels"], facts), (checkpoint["eval_levels"], eval_facts):
            if was["sha256"] != now["sha256"]:
                fail(f"{args.resume} has played the levels {was}, and those available now are {now}")
        if checkpoint["optimizer"] is None:
            fail(f"{path} has no optimizer's state: it is a copy of best.pt")
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"][0])
        if checkpoint["device"] == device.type:  # a GPU's state means nothing to another kind of device
            device_rng.set_rng_state(checkpoint["rng"][1])
        print(f"going on at step {global_step:,}; new episodes begin, from zero state: EnvPool cannot be saved")
    # other seeds after a resume: the same ones would bring the same levels again
    envs = Sokoban(*training_shards(levels, args.num_envs, [args.seed, iteration]), args.max_episode_steps)
    print(f"EnvPool serves {args.levels} in {len(envs.pools)} pools: first observations checked")

    status, commit = subprocess.getstatusoutput(f'git -C "{Path(__file__).parent}" rev-parse HEAD')
    versions = {m.__name__: str(m.__version__) for m in (torch, envpool, np)} | {"python": sys.version.split()[0]}
    about = {"args": asdict(args), "levels": facts, "eval_levels": eval_facts, "model": model_facts}
    about |= {"versions": versions, "git_commit": None if status else commit, "machine": machine}
    name = f"L{args.layers}E{args.experts}d{args.width}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    name = f"{Path(__file__).stem}__{Path(args.levels).name[:100]}__{name}"
    run_dir = Path(args.resume or Path(args.runs_dir) / name)
    with contextlib.ExitStack() as undo, or_fail(f"{run_dir} cannot be written to"):
        for i in itertools.count(2) if not args.resume else ():
            with contextlib.suppress(FileExistsError):
                os.makedirs(run_dir)
                undo.callback(shutil.rmtree, run_dir)
                break
            run_dir = Path(args.runs_dir) / f"{name}-{i}"  # two runs that start in the same second get two folders
        if args.track:  # before the first SummaryWriter, which it watches
            with or_fail("--track needs Weights & Biases: pip install wandb, then wandb login"):
                import wandb

                options = {"project": "temporal-recurrence", "resume": "allow", "sync_tensorboard": True}
                wandb.init(id=run_dir.name, config=about, **options)
        write_atomically(run_dir / "args.json", lambda f: f.write((json.dumps(about, indent=1) + "\n").encode()))
        records = Records(run_dir, global_step)
        undo.pop_all()  # all is well: the folder stays

    def save(name, finished=False):
        seconds = elapsed + time.time() - start_time
        state = dict(zip(counters, (iteration, global_step, evaluated, best, seconds, list(episodes))))
        state |= about | {"script": Path(__file__).stem, "finished": finished}
        state |= {"rng": [torch.get_rng_state(), device_rng.get_rng_state()], "device": device.type}
        state["agent"] = agent.state_dict()
        state["optimizer"] = optimizer.state_dict() if name == "last.pt" else None  # the best one is for evaluation
        try:
            write_atomically(run_dir / name, lambda f: torch.save(state, f))
        except (OSError, RuntimeError) as e:  # torch.save answers a full disk with either
            tqdm.write(f"could not write {run_dir / name}: {e}; the previous one stays")
            return False
        return True

    def on_signal(signum, frame):  # finish the iteration and save
        signals.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

    # ==================================================================================================================
    # Loop
    # ==================================================================================================================
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros(T, N, 10, 10, 2, dtype=torch.uint8, device=device)
    actions = torch.zeros(T, N, dtype=torch.long, device=device)
    logprobs, rewards, firsts = (torch.zeros(T, N, device=device) for _ in range(3))
    values, dones, timeouts = (torch.zeros(T + 1, N, device=device) for _ in range(3))

    next_obs = torch.from_numpy(envs.first).to(device)
    next_done = next_timeout = torch.zeros(N, device=device)
    next_first = torch.ones(N, device=device)  # next_obs opens an episode
    next_state = agent.initial_state(N, device)
    episode, was_done = np.zeros((2, N)), np.zeros(N, bool)  # return and length so far
    bar = tqdm(total=args.total_timesteps, initial=iteration * args.batch_size, unit="step", unit_scale=True,
               mininterval=INTERVAL)  # fmt: skip
    timers, losses = defaultdict(float), defaultdict(list)
    start_time = logged_time = time.time()
    logged_step, stop = global_step, False

    while iteration < args.num_iterations and not stop:
        iteration, before = iteration + 1, global_step
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / args.num_iterations) * args.learning_rate

        # rollout; with the last observation of an episode comes dones = 1, the row after it, with the first one of the
        # next, has firsts = 1: the step from the one to the other is EnvPool's reset, and counts for nothing
        rollout_state = next_state
        for step in range(T):
            clock = time.perf_counter()
            obs[step], dones[step], timeouts[step], firsts[step] = next_obs, next_done, next_timeout, next_first
            with torch.no_grad(), autocast():
                logits, value, next_state = agent(next_obs.unsqueeze(0), next_first.unsqueeze(0), next_state)
            logp = logits[0].log_softmax(-1)
            action = torch.multinomial(logp.exp(), 1)
            values[step], actions[step], logprobs[step] = value[0], action[:, 0], logp.gather(1, action)[:, 0]
            action = action[:, 0].cpu().numpy()
            timers["inference"] += time.perf_counter() - clock

            clock = time.perf_counter()
            next_first = next_done  # where next_obs was an episode's last, this step is the autoreset
            grid, reward, done, timeout, solved = envs.step(action)
            timers["environment"] += time.perf_counter() - clock
            rewards[step] = torch.from_numpy(reward).to(device)
            next_obs = torch.from_numpy(grid).to(device)
            next_done, next_timeout = (torch.from_numpy(x).to(device, torch.float32) for x in (done, timeout))
            episode += np.stack([reward, ~was_done])
            global_step += int(N - was_done.sum())
            episodes.extend(np.stack([*episode, solved], 1)[done].tolist())
            episode[:, done] = 0
            was_done = done

        # advantages; the state after the value call is dropped: the next rollout reads this observation again
        with torch.no_grad(), autocast():
            values[T] = agent(next_obs.unsqueeze(0), next_first.unsqueeze(0), next_state)[1][0]
        dones[T], timeouts[T] = next_done, next_timeout
        advantages = gae(rewards, values, dones, timeouts * args.bootstrap_time_limit, args.gamma, args.gae_lambda)
        returns = advantages + values[:T]
        batch = {"obs": obs, "firsts": firsts, "dones": dones[:T], "actions": actions, "logprobs": logprobs}
        batch |= {"advantages": advantages, "returns": returns}

        # update
        clock = time.perf_counter()
        for _ in range(args.update_epochs):
            order = torch.randperm(N) if args.num_minibatches > 1 else torch.arange(N)
            for mb_envs in order.to(device).chunk(args.num_minibatches):
                mb = {k: v[:, mb_envs] for k, v in batch.items()} | {"state": rollout_state[mb_envs]}
                with autocast():
                    loss, scalars = ppo_loss(agent, mb, args)
                optimizer.zero_grad()
                loss.backward()
                scalars["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
                optimizer.step()
                for k, v in scalars.items():
                    losses[k].append(v)
        if not math.isfinite(sum(p.detach().sum() for p in agent.parameters())):  # waits for a GPU
            fail(f"the weights are not finite after step {global_step:,}; {run_dir} keeps what was saved before it")
        timers["update"] += time.perf_counter() - clock
        bar.update(args.batch_size)

        # evaluation
        last, result = iteration == args.num_iterations, None
        if args.eval_every and not last and global_step // args.eval_every > evaluated // args.eval_every:
            clock = time.perf_counter()
            result = play(eval_levels[:256])
            evaluated = global_step if result else evaluated  # where a stop cut it short a resume makes up for it
            timers["evaluation"] += time.perf_counter() - clock

        # records
        stop = bool(signals)
        saving = last or stop or global_step // args.checkpoint_every > before // args.checkpoint_every
        if result or saving or iteration % args.log_every == 0:
            seconds, valid = time.time() - logged_time, 1 - dones[:T]
            unexplained = masked_variance(returns - values[:T], valid) / masked_variance(returns, valid).clamp(min=1e-8)
            scalars = {f"losses/{k}": float(sum(v)) / len(v) for k, v in losses.items()}
            scalars["losses/explained_variance"] = 1 - float(unexplained)
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars["charts/SPS"] = (global_step - logged_step) / seconds
            scalars["charts/env_SPS"] = (global_step - logged_step) / timers["environment"]
            scalars |= {f"stats/time_{k}": v / seconds for k, v in timers.items()}  # shares of the wall-clock time
            scalars["stats/peak_memory_MB"] = peak_memory(device)
            if episodes:
                means = np.mean(episodes, 0)
                scalars |= dict(zip(("charts/episodic_return", "charts/episodic_length", "charts/solve_rate"), means))
                bar.set_postfix_str("return {:.2f}, length {:.0f}, solved {:.1%}".format(*means), False)
            if result:
                scalars |= summarise(result)
            records.write(global_step, scalars)
            timers.clear(), losses.clear()
            logged_time, logged_step = time.time(), global_step
        if result and scalars["eval/solve_rate"] > best and save("best.pt"):
            best, saving = scalars["eval/solve_rate"], True  # a resume must know of it
        if saving:
            save("last.pt")
    bar.close()

    # the whole evaluation set, once
    result = None if stop else play(eval_levels)
    if not result:
        print(f"stopped by signal {signals[0]}; go on with: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(128 + signals[0])
    scalars = summarise(result)
    records.write(global_step, scalars)
    if best < 0 and save("best.pt"):  # there was no evaluation before
        best = scalars["eval/solve_rate"]
    if not save("last.pt", finished=True):
        sys.exit(1)
    if args.capture_video:
        write_gif(run_dir / "evaluation.gif", eval_levels, result)
    print(f"{global_step:,} steps in {elapsed + time.time() - start_time:,.0f} s, peak memory "
          f"{peak_memory(device):,.0f} MB; records and checkpoints in {run_dir}")  # fmt: skip
