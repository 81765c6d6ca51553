"""Probes that read plans from a Sokoban agent's states, after "Temporal Recurrence Favors Fewer Layers" (Fig. 4, 12).

For every square of the board a logistic regression reads from the network's state how the agent will next step onto
it, how it will next leave it, and how a box will next be pushed off it (Bush et al. 2025, Taufeeque et al. 2024). The
agent's own finished episode tells what came true. Is a shallow recurrent agent's plan less complete at first, and does
it catch up? Save the states with the agent's script, then probe them:

    python sokoban_drc_ppo.py --evaluate figures/easy_agent.pt --save-states states/easy
    python probe_plans.py states/easy --text                          # tables, pictures, a board in the terminal
    python probe_plans.py states/L1 states/L2 states/L4 --sides 1 3   # agents on the same levels; 3x3 probes as well
    python probe_plans.py states/L1_think8 states/L4_think8           # saved with --thinking-steps 8: one more curve

Sections: Args, States, Labels, Probes, Scores, Boards, Setup, Loop, Pictures.
"""

import csv
import functools
import itertools
import json
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import matplotlib.pyplot as plt
import numpy as np
import tyro
from scipy.sparse import csr_matrix, issparse
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm


# ======================================================================================================================
# Args
# ======================================================================================================================
@dataclass
class Args:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders that --save-states has written, on the same levels"""
    output: Path = Path("probes")
    """folder for results.csv, curves.csv, plan_recall.png, probes.png and board.png"""
    seed: int = 1
    """seed of the split, the drawn squares, the shuffled labels and the bootstrap"""
    sides: tuple[Literal[1, 3], ...] = (1,)
    """a probe sees one square (1) or its 3x3 neighbourhood (3); `1 3` trains both"""
    test_share: float = 0.25
    """share of the levels that is held out"""
    max_rows: int = 40_000
    """squares that a probe is trained on, drawn at random, every episode as often; all of the test levels are scored"""
    bootstrap: int = 1000
    """resamples of the test episodes for the 95 % intervals"""
    curve_state: Literal["s", "c"] = "s"
    """state of the last layer for curves and boards: s, what the readout sees, or c, where saved"""
    cohort: Optional[int] = None
    """the fixed cohort: test levels on which every agent plays at least so many steps; None: the median"""
    text: bool = False
    """also draw a board in the terminal"""


def fail(message):
    """Stop with exit status 2: the user can fix this."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ======================================================================================================================
# States
# ======================================================================================================================
BOARD = (10, 10, 2)
TABLES = {"episode": (), "t": (), "level_id": (), "action": (), "solved": (), "grid": BOARD, "terminal_grid": BOARD}


def open_array(folder, *name):
    """A memory-mapped array, of states ("trained", "h1") float16 (rows, 10, 10, channels)."""
    return np.load(folder / f"{'_'.join(name)}.npy", mmap_mode="r", allow_pickle=False)


def read_states(folder):
    """-> meta.json's dict, {table: array}, [(network, state), ...] of the saved states (see `open_array`), labels (see
    `plan_labels`)"""
    if not folder.is_dir():
        fail(f"{folder} does not exist; make it with --save-states of a Sokoban script")
    try:
        meta = json.loads((folder / "meta.json").read_text())
        about, layers = [meta["script"], meta["levels"]["name"], meta["levels"]["sha256"]], meta["args"]["layers"]
        if not all(isinstance(x, str) for x in about) or not all(meta["args"][k] > 0 for k in ("experts", "width")):
            raise ValueError("meta.json has other contents")
        states = [f"{kind}{l}" for kind in meta["kinds"] for l in range(1, layers + 1)]
        states = [*itertools.product(("trained", "untrained"), states)]
        shapes = {f"{network}_{state}": (10, 10, meta["kinds"][state[0]]) for network, state in states}
        if not shapes or min(meta["kinds"].values()) < 1 or len(shapes) < len([*folder.glob("*trained_*")]):
            raise ValueError("meta.json tells of other states")
        for name, shape in (TABLES | shapes).items():
            array, rows = open_array(folder, name), meta["episodes" if name == "terminal_grid" else "passes"]
            if array.shape != (rows, *shape) or (array.dtype == np.float16) != (name in shapes):  # states are float16
                raise ValueError(f"{name} is {array.dtype} {array.shape}, meta.json says {(rows, *shape)}")
        tables = {name: np.array(open_array(folder, name)) for name in TABLES}
        episode, t, level_id = tables["episode"], tables["t"], tables["level_id"]
        ordered = t + meta["thinking_steps"] == np.arange(len(t)) - np.searchsorted(episode, episode)
        if not ordered.all() or (np.unique(episode) != np.arange(meta["episodes"])).any():
            raise ValueError("the rows are not whole episodes in order")
        levels = level_id[t == 0]
        if len(np.unique(levels)) < 2:
            fail(f"{folder} has one level only; the probes are tested on levels that they were not trained on")
        if len(np.unique(levels)) < len(levels) or (level_id != levels[episode]).any():
            raise ValueError("the episodes are not on different levels")
        labels = plan_labels(*(tables[k] for k in ("grid", "terminal_grid", "action", "episode")))
    except Exception as e:  # a damaged file raises many kinds
        fail(f"{folder} is damaged or no folder of --save-states ({type(e).__name__}: {e}); save the states again")
    if meta["episodes"] < 20:
        fail(f"{folder} has {meta['episodes']} episodes; at least 20 are needed (--state-episodes)")
    return meta, tables, states, labels


def split_levels(level_id, test_share, seed):
    """level_id (rows,) -> (rows,) bool, True on the test levels: no level is on both sides."""
    levels = np.unique(level_id)
    count = min(max(round(len(levels) * test_share), 1), len(levels) - 1)
    return np.isin(level_id, np.random.default_rng(seed).permutation(levels)[:count])


# ======================================================================================================================
# Labels
# ======================================================================================================================
CONCEPTS = ("agent onto", "agent off", "box off")
CLASSES = ("up", "right", "down", "left", "never")
NEVER = 4


def plan_labels(grid, terminal_grid, action, episode):
    """What happens next to every square, by one backward pass over all episodes side by side.

    grid (rows, 10, 10, 2), action and episode (rows,), the rows of an episode in order; terminal_grid (episodes, 10,
    10, 2) -> (3, rows, 100) int8: class of the move by which the agent next steps onto the square, by which it next
    leaves it, and by which a box is next pushed off it. The row's own action counts, a blocked move does not.
    ValueError where the agent moves otherwise than the action says.
    """
    movable, length = grid[..., 0].reshape(-1, 100), np.bincount(episode)
    start, ends = length.cumsum() - length, length.cumsum() - 1
    player = (movable == 3).argmax(1)
    after = np.roll(player, -1)
    after[ends] = (terminal_grid[..., 0].reshape(-1, 100) == 3).argmax(1)
    moved = after != player
    if (after - player != np.array([-10, 1, 10, -1])[action])[moved].any():
        raise ValueError("the boards do not follow from the actions")
    pushed = moved & (movable[np.arange(len(grid)), after] == 4)  # the box stood where the agent stands now
    labels = np.empty((3, *movable.shape), np.int8)
    following = np.full((3, len(length), 100), NEVER, np.int8)
    for step in reversed(range(length.max())):
        episodes = np.flatnonzero(length > step)
        row = start[episodes] + step
        for concept, happens, square in zip(following, (moved, moved, pushed), (after, player, after)):
            now = happens[row]
            concept[episodes[now], square[row[now]]] = action[row[now]]
        labels[:, row] = following[:, episodes]
    return labels


# ======================================================================================================================
# Probes: square 64 * row + k is the k-th of the 8 x 8 squares inside the border of a row's board
# ======================================================================================================================
def squares(rows):
    return (rows[:, None] * 64 + np.arange(64)).ravel()


def draw_squares(rows, episode, count, rng):
    """rows and their episode (rows,) -> (count,) sorted squares, drawn with replacement, from every episode as often:
    most rows belong to the few episodes in which the agent is stuck until the time limit."""
    share = 1 / np.bincount(episode)[episode]
    return np.sort(64 * rng.choice(rows, count, p=share / share.sum()) + rng.integers(64, size=count))


def patches(board, index, side):
    """board (rows, 10, 10, C), index (n,) of squares -> (n, side * side * C): a square and its neighbours."""
    row, y, x = index // 64, index % 64 // 8 + 1, index % 8 + 1
    near = range(-(side // 2), side // 2 + 1)
    seen = np.concatenate([board[row, y + i, x + j] for i in near for j in near], 1).astype(np.float32)
    if not np.isfinite(seen).all():
        fail(f"{getattr(board, 'filename', 'a state')} holds numbers that are not finite; save the states again")
    return seen


def one_hot(grid, index, side):
    """grid (rows, 10, 10, 2), index (n,) -> sparse (n, side * side * 16): the observation, 15 is off the board."""
    row, y, x = index // 64, index % 64 // 8 + 1, index % 8 + 1
    seen = np.arange(side * side)
    y, x = y[:, None] + seen // side - side // 2, x[:, None] + seen % side - side // 2
    kind = grid[row[:, None], y.clip(0, 9), x.clip(0, 9)].astype(np.int32) @ np.array([1, 5], np.int32)
    kind[(y < 0) | (y > 9) | (x < 0) | (x > 9)] = 15
    ends = np.arange(0, kind.size + 1, side * side)
    return csr_matrix((np.ones(kind.size, np.float32), (kind + 16 * seen).ravel(), ends), (len(index), 16 * len(seen)))


def fit(x, labels, components=None):
    """One probe a row of labels (k, n) on features x (n, F), reduced to `components` by PCA if given.

    -> a function from features (m, F) to classes (k, m)
    """
    # sparse features keep their mean, which the intercept takes up: the same probe
    reduce = PCA(components, random_state=0) if components else "passthrough"
    prepare = make_pipeline(StandardScaler(with_mean=not issparse(x)), reduce)
    z = prepare.fit_transform(x)
    probes = [LogisticRegression(max_iter=300).fit(z, y) for y in labels]

    def decode(x):
        z = prepare.transform(x)
        return np.stack([probe.predict(z) for probe in probes])

    return decode


def confusions(decode, read, rows, labels):
    """True and predicted classes of all squares of `rows` -> counts (k, rows, 25), entry 5 * true + predicted."""
    counts = []
    for part in np.array_split(rows, -(-len(rows) // 1000)):
        index = squares(part)
        predicted = decode(read(index))
        true = np.tile(labels[:, index], (len(predicted) // len(labels), 1))
        entries = 25 * np.arange(len(part)).repeat(64) + 5 * true + predicted
        counts.append([np.bincount(k, minlength=25 * len(part)).reshape(-1, 25) for k in entries])
    return np.concatenate(counts, 1).astype(np.uint8)


# ======================================================================================================================
# Scores
# ======================================================================================================================
MAIN, ENDS = ("macro_f1", "plan_recall"), ("", "_low", "_high")  # the limits of the interval


def ratio(part, whole, otherwise):
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), otherwise)


def scores(counts):
    """counts (..., 25) -> dict of precision, recall, f1 (..., 5), macro_f1 and plan_recall (...).

    Plan recall: share of the squares with another label than never that are predicted exactly; NaN without any.
    """
    counts = counts.reshape(*counts.shape[:-1], 5, 5)
    hits, true, predicted = np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1), counts.sum(-2)
    f1 = ratio(2 * hits, true + predicted, 0)
    result = {"precision": ratio(hits, predicted, 0), "recall": ratio(hits, true, 0), "f1": f1}
    plan_recall = ratio(hits[..., :NEVER].sum(-1), true[..., :NEVER].sum(-1), np.nan)
    return result | {"macro_f1": f1.mean(-1), "plan_recall": plan_recall}


def interval(name, value, resampled):
    """-> record of the value and both limits of its 95 % bootstrap interval; resampled (resamples,), NaN left out."""
    resampled = resampled[np.isfinite(resampled)]
    limits = np.percentile(resampled, [2.5, 97.5]) if len(resampled) else (np.nan, np.nan)
    return dict(zip((name + end for end in ENDS), (value, *limits)))


def with_intervals(counts, episode, draws):
    """counts (rows, 25), episode (rows,), draws (resamples, episodes) -> record of all scores, the two main ones with
    an interval. Every episode counts alike, however long; whole ones are drawn, since their squares are not
    independent."""
    per_episode = np.zeros((draws.shape[1], 25))
    np.add.at(per_episode, episode, counts)
    per_episode /= per_episode.sum(1, keepdims=True)
    result, resampled = scores(per_episode.sum(0)), scores(draws @ per_episode)
    record = {k: v for name in MAIN for k, v in interval(name, result[name], resampled[name]).items()}
    return record | {f"{m}_{c}": v for m in ("precision", "recall", "f1") for c, v in zip(CLASSES, result[m])}


def recall_curve(counts, episode, step, draws, chosen):
    """Plan recall against the step, pooled over the `chosen` (episodes,) bool.

    counts (rows, 25), episode and step (rows,), draws (resamples, episodes) -> number of episodes that run at each
    step (steps,), number of squares with a plan (steps,), recall (1 + resamples, steps), first that of the episodes
    themselves. NaN: steps at which fewer than 10 squares have a plan, or fewer than 10 episodes or a tenth of them run,
    which are those in which the agent is stuck.
    """
    hits, planned, running = np.zeros((3, draws.shape[1], step.max() + 1))
    hits[episode, step], planned[episode, step] = counts[:, [0, 6, 12, 18]].sum(1), counts[:, :20].sum(1)
    running[episode, step] = 1
    weights, n = np.vstack([np.ones(draws.shape[1]), draws]) * chosen, chosen @ running
    recall = ratio(weights @ hits, weights @ planned, np.nan)
    recall[:, (n < max(min(10, n.max()), 0.1 * n.max())) | (chosen @ planned < 10)] = np.nan
    return n.astype(int), (chosen @ planned).astype(int), recall


# ======================================================================================================================
# Boards
# ======================================================================================================================
def draw_board(axis, grid, labels, title):
    """grid (10, 10, 2), labels (3, 100): agent's moves onto squares as blue arrows, pushes of boxes as brown ones."""
    colours = np.full((5, 3, 3), 222, np.uint8)  # [movable, fixed]
    colours[:, 1], colours[:, 2], colours[4] = (84, 84, 92), (232, 150, 140), (216, 176, 120)
    colours[4, 2], colours[3] = (80, 160, 80), (120, 160, 230)
    axis.imshow(colours[grid[..., 0], grid[..., 1]])
    for arrows, colour, by in ((labels[0], "#1f3fa0", -0.12), (labels[2], "#7a4010", 0.12)):
        square = np.flatnonzero(arrows != NEVER)
        v, u = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])[arrows[square]].T * 0.7
        y, x = square // 10 + by - v / 2, square % 10 + by - u / 2
        axis.quiver(x, y, u, v, color=colour, angles="xy", scale_units="xy", scale=1, width=0.012)
    axis.set(title=title, xticks=[], yticks=[])


def text_board(grid, arrows):
    """grid (10, 10, 2), arrows (100,) classes -> 10 lines: the board, and an arrow wherever there is one."""
    symbols = {(0, 0): " ", (0, 1): "#", (0, 2): ".", (3, 0): "@", (3, 2): "+", (4, 0): "$", (4, 2): "*"}
    board = [symbols[tuple(cell)] for cell in grid.reshape(100, 2).tolist()]
    board = [cell if k == NEVER else "↑→↓←"[k] for cell, k in zip(board, arrows)]
    return ["".join(board[k : k + 10]) for k in range(0, 100, 10)]


if __name__ == "__main__":
    # ==================================================================================================================
    # Setup
    # ==================================================================================================================
    args = tyro.cli(Args)
    plt.switch_backend("Agg")  # no window
    numbers_ok = args.max_rows >= 100 and args.bootstrap >= 1 and args.seed >= 0 and 0 < args.test_share < 1
    if not (args.folders and args.sides and numbers_ok):
        fail("wanted: folders, sides, --max-rows >= 100, --bootstrap >= 1, --seed >= 0, --test-share between 0 and 1")
    if len({folder.resolve() for folder in args.folders}) < len(args.folders):
        fail("a folder is named twice")
    runs = [read_states(folder) for folder in args.folders]
    if len({meta["levels"]["sha256"] for meta, *_ in runs}) > 1:
        sets = "".join(f"\n  {folder}: {meta['levels']}" for folder, (meta, *_) in zip(args.folders, runs))
        fail(f"the folders hold different levels; save them with the same --eval-levels and --state-episodes{sets}")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output).close()
    except OSError as e:
        fail(f"--output {args.output} cannot be written to ({e})")
    names = [str(folder) for folder in args.folders]
    narrow = min(n for meta, *_ in runs for n in meta["kinds"].values())
    # the episodes of all agents are on the same levels in the same order: one split, and the same draws for all
    test = split_levels(runs[0][1]["level_id"], args.test_share, args.seed)
    test_episodes = np.unique(runs[0][1]["episode"][test])
    lengths = [np.bincount(tables["episode"][tables["t"] >= 0])[test_episodes] for _, tables, *_ in runs]
    shortest, n_test = np.min(lengths, 0), len(test_episodes)
    cohort = int(np.median(shortest)) if args.cohort is None else args.cohort
    if not 1 <= cohort <= shortest.max():
        fail(f"--cohort must be from 1 to {shortest.max()}, the longest that every agent plays on a test level")
    everyone, lasting = np.ones(n_test, bool), shortest >= cohort
    draws = np.random.default_rng(args.seed).multinomial(n_test, everyone / n_test, args.bootstrap)

    samples = []
    for name, (meta, tables, _, labels100) in zip(names, runs):
        labels = labels100.reshape(3, -1, 10, 10)[:, :, 1:9, 1:9].reshape(3, -1)
        test = split_levels(tables["level_id"], args.test_share, args.seed)
        train_rows, test_rows = np.flatnonzero(~test), np.flatnonzero(test)
        assert not np.isin(*(tables["level_id"][rows] for rows in (train_rows, test_rows))).any(), "shared levels"
        rng = np.random.default_rng(args.seed)
        index = draw_squares(train_rows, tables["episode"][train_rows], args.max_rows, rng)
        places = squares(test_rows[tables["t"][test_rows] >= 0]), squares(train_rows), index
        for place, c, k in itertools.product(range(3), range(3), range(5)):
            if not (labels[c, places[place]] == k).any():
                where = ("test square; save more episodes", "training square; save more episodes",
                         "square drawn for training; raise --max-rows")[place]  # fmt: skip
                fail(f"{name}: '{CLASSES[k]}' of '{CONCEPTS[c]}' is on no {where}")
        samples.append((labels, test_rows, index, rng.permuted(labels[:, index], axis=1)))
        agent, solved = meta["args"], tables["solved"][tables["t"] == 0].mean()
        print(f"{name}: {meta['script']} L={agent['layers']} E={agent['experts']} d={agent['width']}, {solved:.1%} of "
              f"{meta['episodes']} levels ({meta['levels']['name']}) solved; trained on {len(index):,} squares out of "
              f"{64 * len(train_rows):,}, tested on all of {n_test} other episodes")  # fmt: skip

    # ==================================================================================================================
    # Loop
    # ==================================================================================================================
    results, curves, boards, first = [], [], [], {}
    for name, folder, (meta, tables, states, labels100), sample in zip(names, args.folders, runs, samples):
        agent, t, (labels, test_rows, index, shuffled) = meta["args"], tables["t"], sample
        y, step, place = labels[:, index], t[test_rows], np.searchsorted(test_episodes, tables["episode"][test_rows])
        acting = step >= 0  # the other rows are thinking steps

        # {(features, state, side): counts (3, test rows, 25)}
        found, field = {}, min(2 * agent["layers"] + 1, 17)  # the squares that one pass brings together; 17: the board
        jobs = [("observation", "", side) for side in sorted({1, 3, field})]
        jobs += [(*pair, side) for side in args.sides for pair in states]
        shown = args.curve_state if args.curve_state in meta["kinds"] else [*meta["kinds"]][0]
        shown = f"{shown}{agent['layers']}", args.sides[0]
        for features, state, side in tqdm(jobs, desc=name, leave=False, disable=None):
            seen, board = (patches, open_array(folder, features, state)) if state else (one_hot, tables["grid"])
            read = functools.partial(seen, board, side=side)
            x = read(index)
            decode = fit(x, np.concatenate([y, shuffled]) if features == "trained" else y)
            counts = confusions(decode, read, test_rows, labels)
            found[features, state, side] = counts[:3]
            if features == "trained":
                found["shuffled", state, side] = counts[3:]
            if state:
                few = narrow * side**2
                wide = x.shape[1] > few
                reduced = confusions(fit(x, y, few), read, test_rows, labels) if wide else counts[:3]
                found[f"{features} reduced", state, side] = reduced
            if features == "trained" and (state, side) == shown:
                opening = test_rows[step == 0][:3]
                decoded = np.full((3, len(opening), 10, 10), NEVER)
                decoded[:, :, 1:9, 1:9] = decode(read(squares(opening)))[:3].reshape(3, -1, 8, 8)
                boards.append((tables["grid"][opening], decoded.reshape(3, -1, 100), labels100[:, opening]))

        # scores and the table
        line = "{:10} {:>17} {:>19} {:>19} {:>10} {:>9} {:>10} {:>8}"
        few = f"{narrow} ch."
        print(f"\n{name}: macro F1 and plan recall, and macro F1 of the baselines; {few}: reduced to {narrow} channels")
        print(line.format("", "probe on", "macro F1", "plan recall", few, "untrained", few, "shuffled"))
        others = "trained reduced", "untrained", "untrained reduced", "shuffled"
        for c, concept in enumerate(CONCEPTS):
            scored = {key: with_intervals(k[c, acting], place[acting], draws) for key, k in found.items()}
            for (features, state, side), record in scored.items():
                about = {"agent": name} | {k: agent[k] for k in ("layers", "experts", "width")}
                about |= {"concept": concept, "features": features, "state": state, "side": side}
                results.append(about | record)
                if features in ("observation", "trained"):
                    numbers = ["{:.3f} ({:.3f}-{:.3f})".format(*(record[m + end] for end in ENDS)) for m in MAIN]
                    beside = [scored.get((other, state, side)) for other in others]
                    numbers += [f"{other['macro_f1']:.3f}" if other else "" for other in beside]
                    print(line.format(concept, f"{state or features} {side}x{side}", *numbers))

        # curves, at the number of channels that all agents have
        lines = {f: found[f"{f} reduced", *shown] for f in ("trained", "untrained")}
        lines["observation 3x3"] = found["observation", "", 3]
        parts = [("all", acting, everyone), ("cohort", acting & (step < cohort), lasting)]
        parts += [("thinking", step <= 0, everyone)] if meta["thinking_steps"] else []
        for (which, rows, chosen), c, features in itertools.product(parts, range(3), lines):
            passes = step[rows] - step[rows].min()
            n, planned, recall = recall_curve(lines[features][c, rows], place[rows], passes, draws, chosen)
            base = first.setdefault((which, c, features), recall)  # of the first agent: the same levels, the same draws
            for k in np.flatnonzero(np.isfinite(recall[0])):
                point = {"agent": name, "concept": CONCEPTS[c], "episodes": which, "features": features}
                point |= {"step": k, "n": n[k], "planned": planned[k]}
                minus = recall[:, k] - (base[:, k] if k < base.shape[1] else np.nan)
                point |= interval("recall", recall[0, k], recall[1:, k]) | interval("minus", minus[0], minus[1:])
                curves.append(point)

    def curve(name, concept, episodes, features):
        about = {"agent": name, "concept": concept, "episodes": episodes, "features": features}
        return [point for point in curves if about.items() <= point.items()]

    # does the shallow agent's plan start less complete, and does it catch up?
    line, last = "{:10} {:>20} {:>15} {:>26} {:>26} {:>26} {:>26}".format, cohort - 1
    print(f"\nplan recall on the {lasting.sum()} test levels on which every agent plays {cohort} steps or more")
    print(line("", "", "", "t = 0", f"t = {last}", "minus the first, t = 0", f"minus the first, t = {last}"))
    for concept, name, features in itertools.product(CONCEPTS, names, lines):
        ends = {point["step"]: point for point in curve(name, concept, "cohort", features)}
        cells = itertools.product(("recall", "minus"), (0, last))
        values = [[ends[k][value + end] for end in ENDS] if k in ends else [np.nan] * 3 for value, k in cells]
        print(line(concept, name, features, *("{:.3f} ({:.3f} to {:.3f})".format(*v) for v in values)))

    # ==================================================================================================================
    # Pictures
    # ==================================================================================================================
    titles = {"all": "episodes still running", "cohort": f"{lasting.sum()} levels of {cohort} steps or more"}
    titles |= {"thinking": "first observation"} if any(c["episodes"] == "thinking" for c in curves) else {}
    size = (12, 3 * len(titles) + 3)
    plan_recall, axes = plt.subplots(len(titles) + 1, 3, figsize=size, constrained_layout=True, sharey="row")
    for (row, which), (column, concept), (k, name) in itertools.product(*map(enumerate, (titles, CONCEPTS, names))):
        axis, label = axes[row, column], "thinking step" if which == "thinking" else "environment step t"
        for features, style in zip(lines, (".-", "--", ":")):
            points = curve(name, concept, which, features)
            x, n, recall, low, high = ([p[q] for p in points] for q in ("step", "n", *("recall" + end for end in ENDS)))
            axis.plot(x, recall, f"C{k}{style}", label=f"{name}, {features}", linewidth=1)
            if features == "trained":
                axis.fill_between(x, low, high, color=f"C{k}", alpha=0.2, linewidth=0)
        axis.set(title=f"{concept}: {titles[which]}", xlabel=label, ylabel="plan recall")
        if which == "all":
            axes[-1, column].plot(x, n, f"C{k}", label=name)
            axes[-1, column].set(xlabel=label, ylabel="episodes still running, n(t)")
    plan_recall.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    for axis in axes[:-1, 0]:
        axis.set_ylim(bottom=0)

    bars, axes = plt.subplots(len(names), 3, figsize=(12, 3.2 * len(names)), constrained_layout=True, squeeze=False)
    for (row, name), (column, concept) in itertools.product(enumerate(names), enumerate(CONCEPTS)):
        axis, by_features = axes[row, column], defaultdict(list)
        for r in results:
            if (r["agent"], r["concept"]) == (name, concept):
                values = [r["macro_f1" + end] for end in ENDS]
                by_features[r["features"]].append((f"{r['state']}\n{r['side']}x{r['side']}", *values))
        for features, style in zip(("trained", *others), ("C0.", "C1s", "kx", "k1", "k+")):
            x, y, low, high = zip(*by_features[features])
            axis.plot(x, y, style, label=features.replace("reduced", f"to {narrow} channels"))
            if features == "trained":
                axis.bar(x, y, yerr=np.abs(np.array([low, high]) - y), alpha=0.5)
        for (what, y, _, _), style in zip(by_features["observation"], (":", "--", "-")):
            axis.axhline(y, color="k", linewidth=0.8, linestyle=style, label=f"observation {what.strip()}")
        axis.set(title=f"{name}: {concept}", ylim=(0, 1), ylabel="macro F1")
    legend = {label: handle for axis in axes[:, 0] for handle, label in zip(*axis.get_legend_handles_labels())}
    bars.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=8, fontsize="small")

    size, rows = (5.2 * len(names), 2.8 * len(opening)), range(len(opening))
    pictures, axes = plt.subplots(len(rows), 2 * len(names), figsize=size, constrained_layout=True, squeeze=False)
    for (k, name), row in itertools.product(enumerate(names), rows):
        grid, decoded, taken = boards[k]
        draw_board(axes[row, 2 * k], grid[row], decoded[:, row], f"{name}: decoded, t = 0")
        draw_board(axes[row, 2 * k + 1], grid[row], taken[:, row], "taken")
    for name, (grid, decoded, taken) in zip(names, boards if args.text else []):
        texts = [text_board(grid[0], arrows[c, 0]) for c in (0, 2) for arrows in (decoded, taken)]
        print(f"\n{name}, t = 0: agent onto, decoded and taken; box off, decoded and taken")
        print("\n".join("   ".join(lines) for lines in zip(*texts)))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-written stays
    try:
        with tempfile.TemporaryDirectory(dir=args.output) as new:
            for records, file in ((results, "results.csv"), (curves, "curves.csv")):
                with open(f"{new}/{file}", "w", newline="") as f:
                    writer = csv.DictWriter(f, records[0])
                    writer.writeheader()
                    writer.writerows(records)
            for figure, file in ((plan_recall, "plan_recall.png"), (bars, "probes.png"), (pictures, "board.png")):
                figure.savefig(f"{new}/{file}", dpi=110)
            for file in Path(new).iterdir():
                file.replace(args.output / file.name)
    except OSError as e:
        fail(f"--output {args.output} cannot be written to ({e})")
    print(f"wrote results.csv, curves.csv, plan_recall.png, probes.png and board.png to {args.output}")
