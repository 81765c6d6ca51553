"""Recurrent Sokoban agent of "Temporal Recurrence Favors Fewer Layers" (arXiv 2609.12531): PPO on EnvPool.

The agent is `Parallel Experts` with ConvLSTM cells: L levels inside one environment step, E experts a level, width d.
Its state is carried from step to step and feeds back to the first level, so that depth can be traded for time.

    python sokoban_drc_ppo.py --levels easy --eval-levels easy --layers 2 --width 16 --total-timesteps 1_000_000
    python sokoban_drc_ppo.py --layers 4 --seed 1                             # the paper's best small-budget agent
    python sokoban_drc_ppo.py --evaluate runs/NAME/last.pt --capture-video    # solve rate and a GIF
    python sokoban_drc_ppo.py --resume runs/NAME                              # go on after a stop

Sections: Args, Levels, Environment, Model, Evaluation, Records, Setup, Loop.
"""

import csv
import ctypes
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, Optional

import envpool
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
from scipy.stats import binomtest
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import resource
except ImportError:  # Windows
    resource = None


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

    # Machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a GPU where there is one"""
    torch_threads: int = 0
    """CPU threads of torch (0: torch's own choice); with several processes on one machine use 1 each"""
    amp: bool = False
    """bf16 autocast"""
    compile: bool = False
    """fuse the gates with torch.compile instead of the hand-written backward pass"""

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
    """steps of a rollout, and of back-propagation through time"""
    gamma: float = 0.97
    """discount"""
    gae_lambda: float = 0.8
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches an epoch; each holds whole sequences of num_envs / num_minibatches environments"""
    update_epochs: int = 1
    """passes over a rollout; 1, with 1 minibatch, is the paper's advantage actor-critic"""
    norm_adv: bool = False
    """normalise advantages in each minibatch"""
    clip_coef: float = 0.2
    """PPO's clipping range"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 1.0
    """weight of the value loss, which is half the mean squared error"""
    logit_coef: float = 1e-4
    """weight of the penalty on squared logits"""
    max_grad_norm: float = 1.0
    """clip of the gradient's global norm"""
    bootstrap_time_limit: bool = False
    """add the last observation's value where the 120-step limit cuts an episode (the paper takes it as an end)"""

    # Evaluation and records
    eval_every: int = 500_000
    """steps between evaluations on the first 256 evaluation levels (0: only at the end)"""
    eval_sample: bool = False
    """sample actions in evaluations instead of taking the most likely"""
    thinking_steps: int = 0
    """extra network passes over the first observation of an evaluation episode"""
    capture_video: bool = False
    """write an animated GIF of the first four evaluation episodes"""
    checkpoint_every: int = 100_000
    """steps between checkpoints"""
    log_every: int = 10
    """iterations between records"""

    # Computed
    batch_size: int = field(init=False, default=0)
    """num_envs x num_steps"""
    num_iterations: int = field(init=False, default=0)
    """total_timesteps / batch_size"""


MODEL_ARGS = ("layers", "experts", "width")
RESUMABLE_ARGS = ("total_timesteps", "eval_every", "checkpoint_every", "log_every", "device", "torch_threads", "resume")
NOT_FROM_CHECKPOINT = ("resume", "device", "torch_threads", "thinking_steps", "eval_sample", "capture_video", "track")
LEAST = dict.fromkeys(("layers", "experts", "width", "num_envs", "num_steps", "num_minibatches", "update_epochs"), 1)
LEAST |= {"log_every": 1, "checkpoint_every": 1, "eval_every": 0, "thinking_steps": 0, "torch_threads": 0, "seed": 0}


def fail(message):
    """Stop with exit status 2: the user can fix this."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(argv=None):
    """Read and check the command line. With --resume or --evaluate the saved run's values are the defaults."""
    args = tyro.cli(Args, args=argv)
    if args.resume and args.evaluate:
        fail("--resume and --evaluate exclude each other")
    if args.resume or args.evaluate:
        if args.evaluate:
            saved, fixed = load_checkpoint(args.evaluate)["args"], MODEL_ARGS
            saved = {k: v for k, v in saved.items() if k not in NOT_FROM_CHECKPOINT}
        else:
            path = Path(args.resume) / "args.json"
            try:
                saved = json.loads(path.read_text())["args"]
            except (OSError, ValueError, KeyError, TypeError) as e:
                fail(f"--resume {args.resume}: no run folder, or its args.json is damaged ({e})")
            fixed = [f.name for f in fields(Args) if f.name not in RESUMABLE_ARGS]
        saved = {f.name: saved[f.name] for f in fields(Args) if f.init and f.name in saved}
        args = tyro.cli(Args, args=argv, default=Args(**saved))
        for name in fixed:
            if name in saved and getattr(args, name) != saved[name]:
                flag = "--" + name.replace("_", "-")
                fail(f"{flag} {getattr(args, name)} differs from the saved run's {saved[name]}; omit {flag}")
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if args.num_envs % args.num_minibatches:
        fail(f"--num-envs {args.num_envs} is not divisible by --num-minibatches {args.num_minibatches}")
    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // args.batch_size
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fail(f"the folder for levels cannot be made ({e}); name another one in the variable BOXOBAN_CACHE")
    if args.num_iterations < 1 and not args.evaluate:
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
for char, cell in {"#": (1, 0), " ": (0, 0), ".": (2, 0), "$": (0, 4), "@": (0, 3), "*": (2, 4), "+": (2, 3)}.items():
    CELLS[ord(char)] = cell


def level_ids(levels):
    """Content hash of each level, (N, 10, 10, 2) -> (N,) uint64."""
    digests = (hashlib.blake2b(level, digest_size=8).digest() for level in np.ascontiguousarray(levels))
    return np.frombuffer(b"".join(digests), np.uint64)


def canonical_ids(levels):
    """Content hash that is the same for the 8 rotations and reflections of a level, (N, 10, 10, 2) -> (N,) uint64."""
    sides = levels, levels[:, ::-1]
    return np.min([level_ids(np.rot90(side, k, (1, 2))) for side in sides for k in range(4)], axis=0)


def parse_levels(text, name):
    """Text in Boxoban's format (bytes) -> levels (N, 10, 10, 2). Stops with file and level where one is broken."""
    head, *levels = re.split(rb"(?m)^;.*$", text.replace(b"\r\n", b"\n"))
    if head.strip() or not levels:
        fail(f"{name}: not in Boxoban's text format (a line '; number', then 10 rows of 10 characters)")
    levels = [level.strip(b"\n") + b"\n" for level in levels]
    for k, level in enumerate(levels):
        if len(level) != 110 or level[10::11] != b"\n" * 10:
            fail(f"{name}, level {k} (from 0): not 10 rows of 10 characters")
    return check_levels(CELLS[np.frombuffer(b"".join(levels), np.uint8).reshape(-1, 10, 11)[..., :10]], name)


def check_levels(levels, name):
    """Stop with file and level unless each has 4 boxes, 4 targets, 1 player and a closed border."""
    fixed, movable = levels[..., 0].reshape(-1, 100), levels[..., 1].reshape(-1, 100)
    border = np.pad(np.zeros((8, 8), bool), 1, constant_values=True).ravel()
    checks = {
        "a character that is not one of '# .$@*+'": (fixed <= 2).all(1) & np.isin(movable, (0, 3, 4)).all(1),
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


def read_levels(path):
    """A Boxoban text file, a folder of them, or a .npy of (N, 10, 10, 2) uint8 -> checked levels."""
    path = Path(path)
    if not path.exists():
        fail(f"levels {path}: no such file or folder, and not one of boxoban, boxoban-test, {', '.join(KINDS)}")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        fail(f"{path}: no .txt file in this folder")
    if path.suffix != ".npy":
        return np.concatenate([parse_levels(f.read_bytes(), f) for f in files])
    try:
        levels = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
        fail(f"{path}: not a readable .npy file ({e})")
    if levels.dtype != np.uint8 or levels.shape[1:] != (10, 10, 2) or not len(levels):
        fail(f"{path}: {levels.dtype} {levels.shape}; uint8 (N, 10, 10, 2) wanted, [..., 0] fixed, [..., 1] movable")
    return check_levels(levels, path)


def write_atomically(path, data):
    """All of the bytes or none, also over a kill or a power cut."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def boxoban_train(offline):
    """Text of the official unfiltered-train levels, from the cache or downloaded; None where it cannot be had."""
    cached = CACHE / "unfiltered-train.txt"
    if cached.is_file():
        text = cached.read_bytes()
        if hashlib.sha256(text).hexdigest().startswith(TRAIN_SHA256):
            return text
        print(f"{cached} is damaged: not used")
    if offline:
        return None
    opened = [TimeoutError("no answer in 12 s")]

    def connect():
        try:
            opened.insert(0, urllib.request.urlopen(TRAIN_URL, timeout=10))
        except OSError as e:
            opened.insert(0, e)

    connection = threading.Thread(target=connect, daemon=True)  # a host name's look-up knows no time limit of its own
    connection.start()
    connection.join(12)
    try:
        if isinstance(response := opened[0], OSError):
            raise response
        if not response.geturl().startswith("https://"):
            raise OSError(f"redirected to {response.geturl()}, which is not HTTPS")
        size, data = int(response.headers.get("Content-Length") or 0), io.BytesIO()
        with tqdm(total=size or None, unit="B", unit_scale=True, desc="boxoban-levels") as bar:
            while block := response.read(1 << 16):
                bar.update(data.write(block))
        with zipfile.ZipFile(data) as z:  # read in memory: no path of the archive is ever used
            names = sorted(n for n in z.namelist() if "/unfiltered/train/" in n and n.endswith(".txt"))
            text = b"".join(z.read(n) for n in names)
        if not hashlib.sha256(text).hexdigest().startswith(TRAIN_SHA256):
            raise ValueError("the download's sha256 is wrong")
    except Exception as e:  # a network, a server and an archive fail in many ways
        print(f"download of {TRAIN_URL} failed: {e}")
        return None
    write_atomically(cached, text)
    return text


# The generator plays backwards: boxes start on the targets and a player pulls them off, so the reverse is a solution.
# Thousands of games at once: bit 8 * row + column of a uint64 is one of the 8 x 8 squares inside a level's border.
LEFT, RIGHT = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # the outer columns
NO_MOVE = 4  # the moves are 0 up, 1 right, 2 down, 3 left; the opposite of a move is move ^ 2
SHIFT = [lambda b: b >> 8, lambda b: (b & ~RIGHT) << 1, lambda b: b << 8, lambda b: (b & ~LEFT) >> 1]  # by one move
PAIRINGS = np.array(list(itertools.permutations(range(4))))
CHUNK, LEG, LOOK = 5000, 14, 3  # games at once; longest walk between two pulls; pulls between looks at the state
# boxes off their targets and pulls: from, to; least box-target distance; most moves: all, and before the first push
KINDS = {
    "generated": {"boxes": (4, 4), "pulls": (50, 50), "distance": 5, "max_moves": 119, "approach": LEG},
    "medium-easy": {"boxes": (2, 3), "pulls": (30, 30), "distance": 9, "max_moves": 119, "approach": LEG},
    "easy": {"boxes": (1, 2), "pulls": (2, 8), "distance": 2, "max_moves": 20, "approach": 1},
}


def go(bits, moves):
    return np.choose(moves, [shift(bits) for shift in SHIFT])


def any_bit(rng, bits):
    """One of the set bits, at random: the lowest after a random rotation."""
    by = rng.integers(1, 64, len(bits), dtype=np.uint64)
    turned = bits >> by | bits << 64 - by
    lowest = turned & -turned
    return lowest << by | lowest >> 64 - by


def carve_rooms(rng, n, steps=37):
    """The floor that random walks carve out of solid wall, each step a bar, an L or a block of 2 x 2."""
    at, move, floor = any_bit(rng, np.full(n, ~np.uint64(0))), rng.integers(4, size=n), np.zeros(n, np.uint64)
    for _ in range(steps):
        move = np.where(rng.random(n) < 0.35, rng.integers(4, size=n), move)
        ahead = go(at, move)
        at = np.where(ahead, ahead, at)
        up, right, down, left = (shift(at) for shift in SHIFT)
        shapes = left | right, up | down, left | down, right | down, left | down | left << 8
        floor |= at | np.choose(rng.integers(5, size=n), shapes)
    return floor


def spread(start, free):
    """The free squares within 0, 1, ..., LEG steps of the start."""
    reach = [start]
    for _ in range(LEG):
        up, right, down, left = (shift(reach[-1]) for shift in SHIFT)
        reach.append((reach[-1] | up | right | down | left) & free)
    return reach


def way_back(reach, square):
    """A shortest walk from the square to the start of the reach: LEG rows of moves, NO_MOVE where it is nearer."""
    moves = np.full((LEG, len(square)), NO_MOVE, np.uint8)
    for row, nearer in zip(moves, reach[-2::-1]):
        for move, shift in enumerate(SHIFT):
            step = (square & nearer == 0) & (shift(square) & nearer != 0)
            row[step], square = move, np.where(step, shift(square), square)
    return moves


def box_distance(boxes, targets):
    """Sum of the Manhattan distances of the four boxes to their targets, paired in the best way."""
    bits, squares = np.stack([boxes, targets]), np.zeros((4, 2, len(boxes)), np.int8)
    for square in squares:
        square[:] = np.bitwise_count((bits & -bits) - 1)  # the place of the lowest bit
        bits &= bits - 1
    (row, col), (to_row, to_col) = ((squares[:, i] >> 3, squares[:, i] & 7) for i in range(2))
    apart = abs(row[:, None] - to_row) + abs(col[:, None] - to_col)
    return sum(apart[i, PAIRINGS[:, i]] for i in range(4)).min(0)


def as_levels(*planes):
    """Levels of 10 x 10 squares from the bits of the floor, the targets, the boxes and the players."""
    rows = np.stack(planes, 1).view(np.uint8).reshape(-1, 4, 8)
    floor, targets, boxes, player = np.unpackbits(rows, 2, bitorder="little").reshape(-1, 4, 8, 8).swapaxes(0, 1)
    levels = np.zeros((len(rows), 10, 10, 2), np.uint8)
    levels[..., 0] = 1
    levels[:, 1:9, 1:9] = np.stack([1 - floor + 2 * targets, 3 * player + 4 * boxes], -1)
    return levels


def play_backwards(rng, want_paths, boxes, pulls, distance, max_moves, approach):
    """A chunk of random backward games: the best state of each that had a good one, and if wanted its solution."""
    floor = carve_rooms(rng, CHUNK)
    spots = floor & np.bitwise_or.reduce([shift(floor & shift(floor)) for shift in SHIFT])  # where boxes can be pulled
    usable = (np.bitwise_count(floor) >= 15) & (np.bitwise_count(spots) >= 4)
    floor, spots, n = floor[usable], spots[usable], usable.sum()
    up, right, down, left = (shift(floor) for shift in SHIFT)
    corners = floor & ~(up & down | left & right)  # a box cannot be pushed away from there: good to park it
    parking = np.where(np.bitwise_count(corners) >= 4, corners, spots)
    targets, first = np.zeros((2, n), np.uint64)  # first: where the boxes that will be moved start; the rest are parked
    for moved in rng.integers(boxes[0], boxes[1] + 1, (2, n)).min(0) > np.arange(4)[:, None]:
        spot = any_bit(rng, np.where(moved, spots, parking) & ~targets)
        targets, first = targets | spot, first | spot * moved
    start, parked, level = any_bit(rng, floor & ~targets), targets ^ first, np.arange(n)
    player, moving, last_box, move = start, first, 0 * start, 0 * level
    moves = pulled = restarted = 0 * level
    budget = rng.integers(pulls[0], pulls[1] + 1, (3, n)).min(0)  # more short games than long ones
    trail, ending = [], np.full((LEG, n), NO_MOVE)
    best = np.full(n, distance - 1), first, start, restarted, restarted
    for turn in range(pulls[1] + 1):
        free = floor & ~(moving | parked)
        reach = spread(player, free)
        if turn % LOOK == 0 or turn == pulls[1]:
            end = any_bit(rng, reach[approach] & ~targets)
            length = moves + sum(end & layer == 0 for layer in reach)
            score, off = box_distance(moving | parked, targets), np.bitwise_count(moving & ~targets)
            better = (score > best[0]) & (off >= boxes[0]) & (off <= boxes[1]) & (length <= max_moves) & (end != 0)
            best = [np.where(better, *pair) for pair in zip((score, moving | parked, end, restarted, turn), best)]
            ending = np.where(better, way_back(reach, end), ending) if want_paths else None
        # The boxes that can be pulled, by the player's move: the player can get to the square beside the box, and the
        # one after it is free. As a rule the last pull goes on; else a box that is still on its target comes first.
        pullable = np.stack([moving & SHIFT[m ^ 2](reach[-1]) & SHIFT[m ^ 2](SHIFT[m ^ 2](free)) for m in range(4)])
        keep_on = (pullable[move, level] & last_box != 0) & (rng.random(n) < 0.8)
        pullable = np.where((pullable & targets).any(0), pullable & targets, pullable)
        move = np.where(keep_on, move, (rng.random((4, n), np.float32) * (pullable != 0)).argmax(0))
        box = np.where(keep_on, last_box, any_bit(rng, pullable[move, level])) * (pulled < budget)  # 0: no pull
        pull, last_box = box != 0, go(box, move)  # it comes to where the player stood
        if want_paths:
            walk = way_back(reach, np.where(pull, last_box, player))
            trail.append(np.vstack([np.where(pull, move ^ 2, NO_MOVE), walk]))
        stuck = ~pull & (pulled < budget)  # no box can be pulled any more: start again
        moves = np.where(stuck, 0, moves + pull * (1 + sum(last_box & layer == 0 for layer in reach)))
        pulled, restarted = np.where(stuck, 0, pulled + pull), np.where(stuck, turn + 1, restarted)
        moving = np.where(stuck, first, moving ^ box ^ last_box)
        player = np.where(stuck, start, np.where(pull, go(last_box, move), player))
    good = np.flatnonzero(best[0] >= distance)
    levels = as_levels(*(bits[good] for bits in (floor, targets, *best[1:3])))
    if not want_paths:
        return levels, []
    restarted, turn, trail = best[3], best[4], np.array(trail)
    paths = [
        np.append(ending[:, i], trail[restarted[i] : turn[i], :, i][::-1])[:-LEG] for i in good
    ]  # up to the last push
    return levels, [path[path != NO_MOVE].astype(np.uint8) for path in paths]


def generate_levels(kind, count, seed, exclude=(), want_paths=False):
    """Distinct levels, (count, 10, 10, 2) uint8 with the fixed channel first, and if wanted the list of solutions."""
    rng, seen, levels, paths = np.random.default_rng(seed), {int(key) for key in exclude}, [], []
    for _ in range(20 + count // 100):
        chunk, ways = play_backwards(rng, want_paths, **KINDS[kind])
        new = [i for i, key in enumerate(canonical_ids(chunk).tolist()) if not (key in seen or seen.add(key))]
        levels.extend(chunk[new])
        paths.extend(ways[i] for i in new if want_paths)
        if len(levels) >= count:
            return np.array(levels[:count]), paths[:count]
    raise RuntimeError(f"only {len(levels)} of {count} {kind} levels after {20 + count // 100} chunks of games")


def load_levels(name, offline=False, exclude=None):
    """Levels by name or path -> (levels without duplicates, the set's real name).

    With `exclude` (evaluation levels) those are left out; generated ones also where rotated or mirrored.
    """
    if name == "boxoban":
        text = boxoban_train(offline)
        if text is None:
            print("!" * 100 + "\n!! Boxoban levels are not available: training on GENERATED levels instead.")
            print("!! Run once with network, or name a copy (--levels PATH).\n" + "!" * 100)
            name = "generated"
        else:
            levels = parse_levels(text, "Boxoban unfiltered-train")
    if name in KINDS:
        held_out = exclude is None
        seed = 2 * list(KINDS).index(name) + held_out  # fixed, whatever --seed is
        taken = () if held_out else canonical_ids(exclude)
        levels, _ = generate_levels(name, 1000 if held_out else 100_000, seed, taken)
    elif name == "boxoban-test":
        levels = np.load(EMBEDDED_TEST, allow_pickle=False)
    elif name != "boxoban":
        levels = read_levels(name)
    ids = level_ids(levels)
    _, first = np.unique(ids, return_index=True)
    keep = np.sort(first)
    if exclude is not None:
        keep = keep[~np.isin(ids[keep], level_ids(exclude))]
    if not len(keep):
        fail(f"--levels {name}: every level is also an evaluation level; none is left to train on")
    print(
        f"levels {name}: {len(keep)}, sha256 {level_hash(levels[keep])}; left out: {len(ids) - len(first)} duplicates, "
        f"{len(first) - len(keep)} evaluation levels"
    )
    return levels[keep], name


def level_hash(levels):
    return hashlib.sha256(levels.tobytes()).hexdigest()[:16]


# ======================================================================================================================
# Environment
# ======================================================================================================================
class Sokoban:
    """EnvPool's Sokoban-v0 in small pools, each with a level file of its own. A call steps all N environments.

    shards: level arrays, one a pool; env_seeds: as many lists of seeds, one seed an environment.
    A row that comes with done holds the last observation of its episode; the next call ignores the action and returns
    the first one of a new episode. Checked at start: EnvPool serves these levels (with a wrong path it serves one toy
    level for ever, without an error).
    """

    def __init__(self, shards, env_seeds):
        self.sizes = [len(s) for s in env_seeds]
        self.pools = []
        for levels, seeds in zip(shards, env_seeds):
            base = CACHE / "shards" / level_hash(levels)
            path = base / "jumanji" / "assets" / "boxoban" / "unfiltered-test.npy"  # the one name that EnvPool reads
            buffer = io.BytesIO()
            np.save(buffer, levels)
            if not path.is_file() or path.read_bytes() != buffer.getvalue():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, buffer.getvalue())
            pool = envpool.make(
                "Sokoban-v0",
                env_type="gymnasium",
                num_envs=len(seeds),
                num_threads=1,
                env_seed=[int(s) for s in seeds],
                base_path=str(base),
            )
            known = {level.tobytes() for level in levels[..., ::-1]}
            first = pool.reset()[0]["grid"]
            if not all(grid.tobytes() in known for grid in first):
                raise RuntimeError(f"EnvPool does not serve the levels of {path}")
            self.pools.append(pool)
            self.first = np.concatenate([self.first, first]) if self.pools[1:] else first

    def step(self, actions):
        """actions (N,) -> grid (N, 10, 10, 2) uint8, movable channel first; reward, done, timeout, solved (N,)"""
        for pool, a in zip(self.pools, np.split(actions.astype(np.int32), np.cumsum(self.sizes)[:-1])):
            pool.send(a)
        got = [pool.recv() for pool in self.pools]
        grid = np.concatenate([obs["grid"] for obs, *_ in got])
        reward, terminated, truncated = (np.concatenate([g[i] for g in got]) for i in (1, 2, 3))
        solved = np.concatenate([info["solved"] for *_, info in got])
        done = terminated | truncated
        return grid, reward, done, done & ~solved, done & solved  # a level solved on step 120 is no timeout


def training_shards(levels, num_envs, seed):
    """Pools of 16 environments or fewer, each with its part (shard) of the levels -> shards, seeds.

    EnvPool keeps a copy of the pool's shard for each environment; all copies together stay under 1 GB.
    """
    size = next(s for s in (16, 8, 4, 2, 1) if s == 1 or len(levels) * s * 228 < 1e9)
    n = -(-num_envs // size)
    seeds = np.random.SeedSequence(seed).generate_state(num_envs) >> 1
    return [levels[i % len(levels) :: n] for i in range(n)], np.array_split(seeds, n)


@functools.cache
def opening_seeds(n):
    """Seeds with which an environment opens with level 0, 1, ... n-1 of a file of n <= 100 levels.

    The level that EnvPool opens with depends on the seed and the number of levels alone, so any n levels will do to
    find out; `evaluate` checks the result.
    """
    levels = np.load(EMBEDDED_TEST, allow_pickle=False)[:n]
    index = {level.tobytes(): k for k, level in enumerate(levels[..., ::-1])}
    seeds = {}
    for start in itertools.count(0, 200):
        for seed, grid in enumerate(Sokoban([levels], [range(start, start + 200)]).first, start):
            seeds.setdefault(index[grid.tobytes()], seed)
        if len(seeds) == n:
            return [seeds[k] for k in range(n)]


# ======================================================================================================================
# Model
# ======================================================================================================================
EPS = 1e-5


def lstm_gates(z, u, c, scale):
    """RMS norm over an expert's 4d channels, then LSTM gates. z, u (B, E, 4d, H, W), c (B, E, d, H, W) -> h, c."""
    z = (z + u).float()
    z = z * torch.rsqrt(z.square().mean(2, keepdim=True) + EPS) * scale
    i, f, o, g = z.chunk(4, 2)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class LSTMGates(torch.autograd.Function):
    """`lstm_gates` with the backward pass by hand: fewer passes over memory, which is what a CPU waits for."""

    @staticmethod
    def forward(ctx, z, u, c, scale):
        z = (z + u).float()
        r = z.square().mean(2, keepdim=True).add_(EPS).rsqrt_()
        a = (z * r).mul_(scale)
        d = c.shape[2]
        i, f, o, g = a.split(d, 2)
        a[:, :, : 3 * d].sigmoid_()
        g.tanh_()
        c_new = (f * c).addcmul_(i, g)
        tanh_c = c_new.tanh()
        ctx.save_for_backward(z, r, a, c, tanh_c, scale)
        return o * tanh_c, c_new

    @staticmethod
    def backward(ctx, dh, dc):
        z, r, a, c, tanh_c, scale = ctx.saved_tensors
        B, E, channels = z.shape[:3]
        i, f, o, g = a.chunk(4, 2)
        dh_tanh_c = dh * tanh_c
        dc = torch.addcmul(dh, dh_tanh_c, tanh_c, value=-1).mul_(o).add_(dc)
        da = torch.addcmul(a, a, a, value=-1)  # sigmoid' = a - a^2
        di, df, do, dg = da.chunk(4, 2)
        di.mul_(dc).mul_(g)
        df.mul_(dc).mul_(c)
        do.mul_(dh_tanh_c)
        torch.mul(g, g, out=dg).neg_().add_(1).mul_(dc).mul_(i)  # tanh' = 1 - a^2
        dc.mul_(f)
        # y = scale r z with r = rsqrt(mean(z^2) + eps): dz = r (scale dy - z r^2 mean(scale dy z))
        az = (da * z).flatten(3)
        dscale = (az @ r.view(B, E, -1, 1)).sum(0).view_as(scale)
        mean = (scale.view(1, E, 1, channels) @ az).view_as(r) / channels
        dz = da.mul_(scale).addcmul_(z, mean.mul_(r).mul_(r), value=-1).mul_(r)
        return dz, dz, dc, dscale


class ConvLSTM(nn.Module):
    """All experts of one level. The 3x3 convolution of [x, s, h] -> 4d is the sum of three: x does not wait for the
    recurrence, s is the same for all experts, and h is each expert's own (groups)."""

    def __init__(self, inputs, width, experts):
        super().__init__()
        self.conv_x = nn.Conv2d(inputs, experts * 4 * width, 3, padding=1)
        self.conv_s = nn.Conv2d(width, experts * 4 * width, 3, padding=1, bias=False)
        self.conv_h = nn.Conv2d(experts * width, experts * 4 * width, 3, padding=1, bias=False, groups=experts)
        self.scale = nn.Parameter(torch.ones(experts, 4 * width, 1, 1))
        self.fan_in = 9 * (inputs + 2 * width)

    def read(self, planes, table):
        """conv_x of the encoding planes @ table (see Agent.encode)."""
        weight = torch.einsum("oihw,pi->ophw", self.conv_x.weight, table)
        return F.conv2d(planes, weight, self.conv_x.bias, padding=1)


class Agent(nn.Module):
    """Parallel Experts (Sec. 3 of the paper), ConvLSTM cells, policy and value heads."""

    def __init__(self, layers, experts, width):
        super().__init__()
        self.experts, self.width = experts, width
        # channels of the state: s, the c of every level, and with several experts their h (one expert's h is s)
        self.state_channels = [width] + [experts * width] * (layers + (experts > 1))
        self.embedding = nn.Parameter(torch.randn(2, 5, 16) * 0.1)  # torch's 1.0 learns 10x slower behind the norm
        self.cells = nn.ModuleList(ConvLSTM(32, width, experts) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width, 1))
        self.attention = nn.Linear(width, 1, bias=False)
        self.dense = nn.Linear(2 * width, 2 * 256)
        self.actor = nn.Linear(256, 4)
        self.critic = nn.Linear(256, 1)
        self.gates = LSTMGates.apply
        for name, p in self.named_parameters():  # LeCun normal
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("weight"):
                nn.init.normal_(p, std=(self.cells[0].fan_in if "cells" in name else p.shape[1]) ** -0.5)

    def initial_state(self, batch, device=None):
        """(batch, channels, 10, 10) of zeros."""
        return torch.zeros(batch, sum(self.state_channels), 10, 10, device=device)

    def encode(self, obs):
        """obs (N, 10, 10, 2) uint8 -> planes (N, 16, 10, 10) and table (16, 32), whose product is the encoding.

        The encoding x (32 channels, RMS over the board 1) is linear in one-hot planes, so the convolutions that read it
        take the planes and fold the table into their weights. 6 planes are 0: oneDNN, torch's library for CPUs,
        works in blocks of 16.
        """
        classes = torch.arange(8, dtype=torch.uint8, device=obs.device).view(8, 1, 1)
        planes = (obs.permute(0, 3, 1, 2).unsqueeze(2) == classes).flatten(1, 2).to(self.norm.dtype)
        table = torch.block_diag(*F.pad(self.embedding, (0, 0, 0, 3)))
        mean_square = planes.sum((2, 3)) @ table.square().sum(1) / (32 * 100)
        return planes * torch.rsqrt(mean_square + EPS).view(-1, 1, 1, 1), table

    def core(self, obs, first, state):
        """The recurrence, for a rollout (T = 1) and for training (T = n) alike.

        obs (T, B, 10, 10, 2) uint8; first (T, B), 1 where obs opens an episode: the state is zeroed before that step;
        state (B, channels, 10, 10) -> s^L of every step (T, B, d, 10, 10) and the state after the last.
        """
        T, B = first.shape
        E, d = self.experts, self.width
        planes, table = self.encode(obs.flatten(0, 1))
        u = [cell.read(planes, table).view(T, B, E, 4 * d, 10, 10).unbind(0) for cell in self.cells]
        # with one expert h is s: one convolution with the sum of the weights is exact and costs half
        weights = [cell.conv_s.weight + cell.conv_h.weight if E == 1 else cell.conv_s.weight for cell in self.cells]
        s, *c = state.split(self.state_channels, 1)
        h = c.pop() if E > 1 else None
        c = [c_l.view(B, E, d, 10, 10) for c_l in c]
        outputs = []
        for t in range(T):
            keep = (1 - first[t]).view(B, 1, 1, 1)
            s = s * keep
            h = h * keep if E > 1 else None
            c = [c_l * keep.unsqueeze(4) for c_l in c]
            for l, cell in enumerate(self.cells):
                z = F.conv2d(s, weights[l], padding=1)
                if E > 1:
                    z = z + cell.conv_h(h)
                h_l, c[l] = self.gates(z.view(B, E, 4 * d, 10, 10), u[l][t], c[l], cell.scale)
                h = h_l.flatten(1, 2)
                s = h if E == 1 else h_l.sum(1) * E**-0.5  # variance-normalising sum
            outputs.append(s)
        state = torch.cat([s] + [c_l.flatten(1, 2) for c_l in c] + ([h] if E > 1 else []), 1)
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
    """Generalised advantage estimation (Schulman et al. 2016) under next-step autoreset.

    rewards (T, B); values, dones, timeouts (T+1, B): dones[t] = 1 says that obs[t] is the last one of its episode (row
    t then is no step of any), timeouts[t] = 1 to bootstrap from its value. -> advantages (T, B), 0 in such rows.
    """
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])
    nextvalues = values * (1 - dones + dones * timeouts)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * nextvalues[t + 1] - values[t]
        lastgaelam = (delta + gamma * gae_lambda * (1 - dones[t + 1]) * lastgaelam) * (1 - dones[t])
        advantages[t] = lastgaelam
    return advantages


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def ppo_loss(agent, mb, args):
    """Loss of a minibatch of whole sequences, each entry of mb (T, B, ...) but for state (B, ...); rows that are no
    steps are left out of every mean. -> loss, dict of scalars"""
    logits, newvalue, _ = agent(mb["obs"], mb["firsts"], mb["state"])
    logp = logits.log_softmax(-1)
    newlogprob = logp.gather(-1, mb["actions"].unsqueeze(-1)).squeeze(-1)
    valid = 1 - mb["dones"]
    logratio = (newlogprob - mb["logprobs"]) * valid
    ratio = logratio.exp()
    advantages = mb["advantages"]
    if args.norm_adv:
        centred = advantages - masked_mean(advantages, valid)
        advantages = centred / (masked_mean(centred.square(), valid).sqrt() + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = masked_mean(torch.max(pg_loss1, pg_loss2), valid)
    v_loss = 0.5 * masked_mean((newvalue - mb["returns"]).square(), valid)
    entropy = masked_mean(-(logp.exp() * logp).sum(-1), valid)
    logit_loss = masked_mean(logits.square().sum(-1), valid)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss + args.logit_coef * logit_loss
    with torch.no_grad():
        scalars = {
            "policy_loss": pg_loss,
            "value_loss": v_loss,
            "entropy": entropy,
            "squared_logits": logit_loss,
            "approx_kl": masked_mean((ratio - 1) - logratio, valid),
            "clipfrac": masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid),
        }
    return loss, scalars


# ======================================================================================================================
# Evaluation
# ======================================================================================================================
@torch.no_grad()
def evaluate(agent, levels, device, sample=False, thinking_steps=0, seed=0, film=0, stopped=lambda: False):
    """Play each level once, 120 steps at most, without touching the training's random state.

    levels (N, 10, 10, 2), all different -> dict of solved, returns, lengths (N,) and frames, a list of grids
    (film, 10, 10, 2); None where `stopped` answers True.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    results, frames = [], []
    for batch in np.split(levels, range(1000, len(levels), 1000)):
        shards = np.split(batch, range(100, len(batch), 100))
        envs = Sokoban(shards, [opening_seeds(len(s)) for s in shards])
        grid = envs.first
        if not (grid == batch[..., ::-1]).all():
            raise RuntimeError("EnvPool does not open with the wanted levels; is this envpool 1.2.5?")
        solved, returns, lengths = np.zeros(len(batch), bool), np.zeros(len(batch)), np.zeros(len(batch), int)
        state = agent.initial_state(len(batch), device)
        first = torch.ones(1, len(batch), device=device)
        alive = np.arange(len(batch))  # finished episodes leave the batch
        thinking = thinking_steps
        filmed_rows = np.arange(min(film, len(batch)) if not results else 0)
        filmed = np.ones(len(filmed_rows), bool)
        while len(alive):
            if stopped():
                return None
            logits, _, state = agent(torch.from_numpy(grid[alive]).to(device).unsqueeze(0), first, state)
            first = torch.zeros(1, len(alive), device=device)
            if thinking:
                thinking -= 1
                continue
            if filmed.any():
                frames.append(grid[filmed_rows] if not frames else np.where(filmed, grid[filmed_rows], frames[-1]))
            probs = logits[0].softmax(-1)
            choice = torch.multinomial(probs, 1, generator=generator).squeeze(1) if sample else probs.argmax(-1)
            actions = np.zeros(len(batch), np.int32)
            actions[alive] = choice.cpu().numpy()
            grid, reward, done, _, success = envs.step(actions)
            returns[alive] += reward[alive]
            lengths[alive] += 1
            solved[alive] = success[alive]
            filmed = np.isin(filmed_rows, alive).reshape(-1, 1, 1, 1)
            running = ~done[alive]
            alive, state, first = alive[running], state[torch.from_numpy(running)], first[:, : running.sum()]
        if filmed.any():
            frames.append(np.where(filmed, grid[filmed_rows], frames[-1]))
        results.append((solved, returns, lengths))
    solved, returns, lengths = (np.concatenate(r) for r in zip(*results))
    return {"solved": solved, "returns": returns, "lengths": lengths, "frames": frames}


def summarise(result):
    """Solve rate with Wilson's 95 % interval, mean return, mean length -> dict of eval/ scalars; prints them."""
    solved, n = int(result["solved"].sum()), len(result["solved"])
    interval = binomtest(solved, n).proportion_ci(0.95, "wilson")
    returns, lengths = result["returns"].mean(), result["lengths"].mean()
    tqdm.write(
        f"evaluation: {solved} of {n} levels solved, {solved / n:.2%} (95 % interval {interval.low:.2%} to "
        f"{interval.high:.2%}), mean return {returns:.2f}, mean length {lengths:.1f}"
    )
    return {"eval/solve_rate": solved / n, "eval/episodic_return": returns, "eval/episodic_length": lengths}


def write_gif(path, frames):
    """frames: list of grids (K, 10, 10, 2), movable channel first -> K boards side by side, 16 pixels a square."""
    floor, wall, target, agent, box, placed = (
        (222, 214, 196), (84, 84, 92), (232, 150, 140), (58, 110, 200), (176, 120, 60), (80, 160, 80))  # fmt: skip
    colours = np.zeros((5, 3, 3), np.uint8)
    colours[0], colours[3], colours[4] = (floor, wall, target), (agent, wall, agent), (box, wall, placed)
    images = []
    for grids in frames:
        pixels = colours[grids[..., 0], grids[..., 1]]  # (K, 10, 10, 3)
        pixels = np.concatenate(list(pixels), 1).repeat(16, 0).repeat(16, 1)
        pixels[::16] = pixels[:, ::16] = wall
        images.append(Image.fromarray(pixels).quantize(16))
    durations = [1000] + [150] * (len(images) - 2) + [2000]
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations[: len(images)], loop=0)
    print(f"wrote {path}")


# ======================================================================================================================
# Records
# ======================================================================================================================
class Records:
    """Scalars to TensorBoard and metrics.csv. A resume at `step` drops all that came later."""

    def __init__(self, run_dir, step=None):
        self.writer = SummaryWriter(run_dir, purge_step=None if step is None else step + 1)
        path, rows = Path(run_dir) / "metrics.csv", []
        if step is not None and path.is_file():
            with open(path, newline="") as f:
                rows = [r for r in csv.reader(f) if len(r) == 3 and r[0].isdigit() and int(r[0]) <= step]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([["step", "name", "value"], *rows])
        write_atomically(path, text.getvalue().encode())
        self.file = open(path, "a", newline="")

    def write(self, step, scalars):
        try:
            csv.writer(self.file).writerows([step, name, float(value)] for name, value in scalars.items())
            self.file.flush()
            for name, value in scalars.items():
                self.writer.add_scalar(name, float(value), step)
            self.writer.flush()
        except OSError as e:  # a full disk must not end a training
            tqdm.write(f"could not write the scalars of step {step}: {e}")


def save_checkpoint(path, checkpoint):
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as e:
        tqdm.write(f"could not write {path}: {e}; the previous one stays")


def load_checkpoint(path):
    """Stops with a message where the file is missing, truncated or not one of this script's."""
    if not Path(path).is_file():
        fail(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
    except Exception as e:  # torch.load raises half a dozen kinds on a damaged file
        fail(f"{path} is no whole checkpoint ({type(e).__name__})")
    if script != Path(__file__).stem:
        fail(f"{path} was written by {script}.py, not by {Path(__file__).name}")
    return checkpoint


def peak_memory(device):
    """Peak bytes of the process, on a GPU of the tensors there; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0
    return peak if sys.platform == "darwin" else peak * 1024


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
    try:
        device = torch.empty(0, device=gpu if args.device == "auto" else args.device).device
    except (RuntimeError, AssertionError) as e:
        fail(f"--device {args.device} cannot be used here ({str(e).splitlines()[0]})")
    device_rng = getattr(torch, device.type) if device.type != "cpu" else None  # torch.cuda or torch.mps
    torch.manual_seed(args.seed)
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=args.amp)

    agent = Agent(args.layers, args.experts, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-6)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        board = torch.zeros(1, args.num_envs, 10, 10, 2, dtype=torch.uint8, device=device)
        agent(board, torch.ones(board.shape[:2], device=device), agent.initial_state(args.num_envs, device))
    if args.compile:
        agent.gates = torch.compile(lstm_gates)
    model_facts = {
        "parameters": sum(p.numel() for p in agent.parameters()),
        "W": args.layers * args.experts * args.width * (32 + 2 * args.width),  # the paper's proxy of work
        "flops_per_step": counter.get_total_flops() // args.num_envs,  # forward
    }
    print(f"agent L={args.layers} E={args.experts} d={args.width}: {model_facts}")
    print(f"{device}, {torch.get_num_threads()} torch threads")

    iteration, global_step, best, elapsed = 0, 0, -1.0, 0.0
    episodes = deque(maxlen=400)  # [return, length, solved] of the last episodes
    if path := args.evaluate or args.resume and Path(args.resume) / "last.pt":
        checkpoint = load_checkpoint(path)
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as e:
            fail(f"{path} holds an agent of another shape: {str(e).splitlines()[1].strip()}")
        iteration, global_step, best, elapsed = (checkpoint[k] for k in ("iteration", "global_step", "best", "elapsed"))
        episodes.extend(checkpoint["episodes"])
    if args.resume and checkpoint["finished"] and iteration >= args.num_iterations:
        fail(f"{args.resume} is finished; raise --total-timesteps, or use --evaluate {path}")

    eval_levels, args.eval_levels = load_levels(args.eval_levels, args.offline)
    play = functools.partial(
        evaluate, agent, device=device, sample=args.eval_sample, thinking_steps=args.thinking_steps, seed=args.seed
    )
    film = 4 if args.capture_video else 0
    if args.evaluate:
        with autocast():
            result = play(eval_levels, film=film)
        summarise(result)
        if film:
            write_gif(Path(args.evaluate).with_suffix(".gif"), result["frames"])
        sys.exit()

    levels, args.levels = load_levels(args.levels, args.offline, exclude=eval_levels)
    levels_sha256 = level_hash(levels)
    if args.resume:
        run_dir = Path(args.resume)
        if checkpoint["levels_sha256"] != levels_sha256:
            fail(f"{run_dir} was trained on {checkpoint['levels']} levels, which are not those available now")
        optimizer.load_state_dict(checkpoint["optimizer"])
        about = json.loads((run_dir / "args.json").read_text()) | {"args": asdict(args)}  # lengths may be new
        print(f"going on at step {global_step:,}; new episodes begin, from zero state: EnvPool cannot be saved")
    else:
        shape = f"L{args.layers}E{args.experts}d{args.width}"
        run_name = (
            f"{Path(__file__).stem}__{Path(args.levels).name}__{shape}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        )
        for i in itertools.count(1):  # two runs that start in the same second get two folders
            run_dir = Path(args.runs_dir) / (run_name + (f"-{i}" if i > 1 else ""))
            try:
                run_dir.mkdir(parents=True)
                break
            except FileExistsError:
                continue
            except OSError as e:
                fail(f"--runs-dir {args.runs_dir} cannot be written to ({e})")
        status, commit = subprocess.getstatusoutput(f'git -C "{Path(__file__).parent}" rev-parse HEAD')
        about = {
            "args": asdict(args),
            "levels": {"name": args.levels, "count": len(levels), "sha256": levels_sha256},
            "eval_levels": {"name": args.eval_levels, "count": len(eval_levels), "sha256": level_hash(eval_levels)},
            "model": model_facts,
            "versions": {m.__name__: m.__version__ for m in (torch, envpool, np)} | {"python": sys.version.split()[0]},
            "git_commit": None if status else commit,
            "machine": f"{platform.platform()}, {device}, {torch.get_num_threads()} torch threads",
        }
    write_atomically(run_dir / "args.json", (json.dumps(about, indent=1) + "\n").encode())
    if args.track:
        import wandb

        facts = {"project": "temporal-recurrence", "id": run_dir.name, "config": asdict(args)}
        wandb.init(**facts, resume="allow", sync_tensorboard=True)
    records = Records(run_dir, global_step if args.resume else None)

    # other seeds after a resume: the same ones would bring the same levels again
    envs = Sokoban(*training_shards(levels, args.num_envs, [args.seed, iteration]))
    print(f"EnvPool serves {args.levels} in {len(envs.pools)} pools: first observations checked")
    if args.resume:  # last, since what came before may have drawn random numbers
        torch.set_rng_state(checkpoint["rng"][0])
        if device_rng and len(checkpoint["rng"]) > 1:
            device_rng.set_rng_state(checkpoint["rng"][1])

    def save(name, finished=False):
        checkpoint = {
            "script": Path(__file__).stem,
            "args": asdict(args),
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict() if name == "last.pt" else None,  # the best one is for evaluation
            "iteration": iteration,
            "global_step": global_step,
            "best": best,
            "elapsed": elapsed + time.time() - start_time,
            "episodes": list(episodes),
            "rng": [torch.get_rng_state()] + ([device_rng.get_rng_state()] if device_rng else []),
            "levels": args.levels,
            "levels_sha256": levels_sha256,
            "finished": finished,
        }
        save_checkpoint(run_dir / name, checkpoint)

    signals = []

    def on_signal(signum, frame):  # finish the iteration and save; a second Ctrl-C does not wait for that
        signals.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

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
    episode_return, episode_length, was_done = np.zeros(N), np.zeros(N, int), np.zeros(N, bool)
    bar = tqdm(
        total=args.total_timesteps,
        initial=iteration * args.batch_size,
        unit="step",
        unit_scale=True,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )
    timers, sums, updates = defaultdict(float), defaultdict(float), 0
    start_time = logged_time = time.time()
    logged_step, first_iteration = global_step, iteration + 1
    saved, evaluated = global_step // args.checkpoint_every, global_step // max(args.eval_every, 1)

    for iteration in range(first_iteration, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / args.num_iterations) * args.learning_rate

        # rollout
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
            next_done = torch.from_numpy(done).to(device, torch.float32)
            next_timeout = torch.from_numpy(timeout).to(device, torch.float32)
            episode_return += reward
            episode_length += ~was_done
            global_step += int(N - was_done.sum())
            for i in np.flatnonzero(done):
                episodes.append([float(episode_return[i]), int(episode_length[i]), bool(solved[i])])
            episode_return[done] = episode_length[done] = 0
            was_done = done

        # advantages; the state after the value call is dropped: the next rollout reads this observation again
        with torch.no_grad(), autocast():
            values[T] = agent(next_obs.unsqueeze(0), next_first.unsqueeze(0), next_state)[1][0]
        dones[T], timeouts[T] = next_done, next_timeout
        counted = timeouts if args.bootstrap_time_limit else torch.zeros_like(timeouts)
        advantages = gae(rewards, values, dones, counted, args.gamma, args.gae_lambda)
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
                scalars["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                updates += 1
                for k, v in scalars.items():
                    sums[k] += v.detach()
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that the timers tell the truth
        timers["update"] += time.perf_counter() - clock
        bar.update(args.batch_size)

        # evaluation
        last, result = iteration == args.num_iterations, None
        if args.eval_every and not last and global_step // args.eval_every > evaluated:
            evaluated = global_step // args.eval_every
            clock = time.perf_counter()
            with autocast():
                result = play(eval_levels[:256], stopped=lambda: signals)
            timers["evaluation"] += time.perf_counter() - clock

        # records
        stop = bool(signals)
        saving = global_step // args.checkpoint_every > saved or last or stop
        if result or saving or iteration % args.log_every == 0:
            seconds, steps, valid = time.time() - logged_time, global_step - logged_step, 1 - dones[:T]
            variance = masked_mean((returns - masked_mean(returns, valid)).square(), valid)
            scalars = {f"losses/{k}": float(v) / updates for k, v in sums.items()}
            unexplained = masked_mean((returns - values[:T]).square(), valid) / variance.clamp(min=1e-8)
            scalars["losses/explained_variance"] = 1 - float(unexplained)
            if not all(map(math.isfinite, scalars.values())):
                fail(f"a loss is not finite at step {global_step:,}: {scalars}; {run_dir}/last.pt is from before")
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars["charts/SPS"] = steps / seconds
            scalars["charts/env_SPS"] = steps / timers["environment"]
            scalars |= {f"stats/time_{k}": v / seconds for k, v in timers.items()}  # shares of the wall-clock time
            scalars["stats/peak_memory_MB"] = peak_memory(device) / 1e6
            if episodes:
                names = ("charts/episodic_return", "charts/episodic_length", "charts/solve_rate")
                scalars |= dict(zip(names, np.mean(episodes, 0)))
                bar.set_postfix_str("return {:.2f}, length {:.0f}, solved {:.1%}".format(*np.mean(episodes, 0)), False)
            if result:
                scalars |= summarise(result)
            records.write(global_step, scalars)
            timers.clear(), sums.clear()
            logged_time, logged_step, updates = time.time(), global_step, 0
        if result and scalars["eval/solve_rate"] > best:
            best = scalars["eval/solve_rate"]
            save("best.pt")
        if saving:
            saved = global_step // args.checkpoint_every
            save("last.pt")
        if stop:
            break
    bar.close()

    # the whole evaluation set, once
    result = None
    if not signals:
        with autocast():
            result = play(eval_levels, film=film, stopped=lambda: signals)
    if not result:
        print(f"stopped by signal {signals[0]}; go on with: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(128 + signals[0])
    scalars = summarise(result)
    records.write(global_step, scalars)
    if film:
        write_gif(run_dir / "evaluation.gif", result["frames"])
    if best < 0:  # there was no evaluation before
        best = scalars["eval/solve_rate"]
        save("best.pt")
    save("last.pt", finished=True)
    print(f"{global_step:,} steps in {elapsed + time.time() - start_time:,.0f} s, peak memory "
          f"{peak_memory(device) / 1e6:,.0f} MB; records and checkpoints in {run_dir}")  # fmt: skip
