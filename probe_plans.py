"""Probes that read plans from a Sokoban agent's states, after "Temporal Recurrence Favors Fewer Layers" (Fig. 4, 12).

For every square of the board a logistic regression reads from the network's state how the agent will next step onto
it, how it will next leave it, and how a box will next be pushed off it (Bush et al. 2025, Taufeeque et al. 2024). The
agent's own finished episode tells what came true. Is a shallow recurrent agent's plan less complete at first, and does
it catch up? Save the states with the agent's script, then probe them:

    python sokoban_drc_ppo.py --evaluate figures/easy_agent.pt --save-states states/easy
    python probe_plans.py states/easy --text                          # tables, pictures, a board in the terminal
    python probe_plans.py states/L1 states/L2 states/L4 --sides 1 3   # agents on the same levels; 3x3 probes as well
    python probe_plans.py states/L1_think8 states/L4_think8           # saved with --thinking-steps 8: one more curve

Sections: Args, States, Probes, Scores, Setup, Loop, Pictures.
"""

import csv
import functools
import itertools
import json
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
    """a probe sees one square (1) or its 3x3 neighbourhood (3); `1 3` trains both, curves show the first"""
    test_share: float = 0.25
    """share of the levels that is held out"""
    max_rows: int = 40_000
    """squares that a probe is trained on, drawn from every episode as often, with replacement"""
    bootstrap: int = 1000
    """resamples of the test episodes for the 95 % intervals"""
    curve_state: Literal["s", "c"] = "s"
    """state of the last layer for curves and boards: s, what the readout sees, or c, where saved"""
    cohort: Optional[int] = None
    """the fixed cohort: test levels on which every agent plays so many steps or more; None: the median number"""
    text: bool = False
    """also draw a board in the terminal"""


def fail(message):
    """Stop with exit status 2: the user can fix this."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ======================================================================================================================
# States: what --save-states has written, and labels of all squares
# ======================================================================================================================
CONCEPTS = ("agent onto", "agent off", "box off")
CLASSES = ("up", "right", "down", "left", "never")
NEVER = 4
BOARD = (10, 10, 2)
TABLES = {"episode": (), "t": (), "level_id": (), "action": (), "solved": (), "grid": BOARD, "terminal_grid": BOARD}


def open_array(folder, name):
    """A memory-mapped array, such as "trained_h1", a state: float16 (rows, 10, 10, channels)."""
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def read_states(folder):
    """-> all that is known of one agent: name, folder, meta.json's dict, states [(network, state), ...], the arrays of
    TABLES by their names, labels (see `plan_labels`)"""
    if not folder.is_dir():
        fail(f"{folder} does not exist; make it with --save-states of a Sokoban script")
    try:
        meta = json.loads((folder / "meta.json").read_text())
        about, agent = [meta["script"], meta["levels"]["name"], meta["levels"]["sha256"]], meta["args"]
        if not all(isinstance(x, str) for x in about) or min(agent["experts"], agent["width"]) < 1:
            raise ValueError("meta.json has other contents")
        states = [f"{kind}{l}" for kind in meta["kinds"] for l in range(1, agent["layers"] + 1)]
        states = [*itertools.product(("trained", "untrained"), states)]
        shapes = {f"{network}_{state}": (10, 10, meta["kinds"][state[0]]) for network, state in states}
        if not shapes or min(meta["kinds"].values()) < 1 or len(shapes) < len([*folder.glob("*trained_*.npy")]):
            raise ValueError("meta.json tells of other states")
        for name, shape in (TABLES | shapes).items():
            array, rows = open_array(folder, name), meta["episodes" if name == "terminal_grid" else "passes"]
            if array.shape != (rows, *shape) or (array.dtype == np.float16) != (name in shapes):  # states are float16
                raise ValueError(f"{name} is {array.dtype} {array.shape}, meta.json says {(rows, *shape)}")
        tables = {name: np.array(open_array(folder, name)) for name in TABLES}
        run = SimpleNamespace(name=str(folder), folder=folder, meta=meta, states=states, **tables)
        ordered = run.t + meta["thinking_steps"] == np.arange(len(run.t)) - np.searchsorted(run.episode, run.episode)
        if not ordered.all() or (np.unique(run.episode) != np.arange(meta["episodes"])).any():
            raise ValueError("the rows are not whole episodes in order")
        levels = run.level_id[run.t == 0]
        if len(np.unique(levels)) < 2:
            fail(f"{folder} has one level only; the probes are tested on levels that they were not trained on")
        if len(np.unique(levels)) < len(levels) or (run.level_id != levels[run.episode]).any():
            raise ValueError("the episodes are not on different levels")
        run.labels = plan_labels(run.grid, run.terminal_grid, run.action, run.episode)
    except Exception as e:  # a damaged file raises many kinds
        fail(f"{folder} is damaged or no folder of --save-states ({type(e).__name__}: {e}); save the states again")
    if meta["episodes"] < 20:
        fail(f"{folder} has {meta['episodes']} episodes; at least 20 are needed (--state-episodes)")
    return run


def split_levels(level_id, test_share, seed):
    """level_id (rows,) -> (rows,) bool, True on the test levels: no level is on both sides."""
    levels = np.unique(level_id)
    count = min(max(round(len(levels) * test_share), 1), len(levels) - 1)
    return np.isin(level_id, np.random.default_rng(seed).permutation(levels)[:count])


def plan_labels(grid, terminal_grid, action, episode):
    """What happens next to every square, by one backward pass over all episodes side by side.

    grid (rows, 10, 10, 2), action and episode (rows,), the rows of an episode in order; terminal_grid (episodes, 10,
    10, 2) -> (3, rows, 100) int8: class of the move by which the agent next steps onto the square, leaves it, and by
    which a box is next pushed off it. The row's own action counts, a blocked move does not. ValueError where the agent
    moves otherwise than the action says.
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
INNER = np.arange(100).reshape(10, 10)[1:9, 1:9].ravel()


def squares(rows):
    return (rows[:, None] * 64 + np.arange(64)).ravel()


def draw_squares(rows, episode, count, rng):
    """rows and their episode (rows,) -> (count,) sorted squares, drawn with replacement, from every episode as often:
    most rows belong to the few episodes in which the agent is stuck until the time limit."""
    share = 1 / np.bincount(episode)[episode]
    return np.sort(64 * rng.choice(rows, count, p=share / share.sum()) + rng.integers(64, size=count))


def neighbourhoods(index, side):
    """index (n,) of squares -> row (n, 1), y and x (n, side * side) of the squares around each, also off the board."""
    square, k = INNER[index % 64, None], np.arange(side * side)
    return index[:, None] // 64, square // 10 + k // side - side // 2, square % 10 + k % side - side // 2


def patches(board, index, side):
    """board (rows, 10, 10, C), index (n,) of squares -> (n, side * side * C): a square and its neighbours."""
    seen = board[neighbourhoods(index, side)].reshape(len(index), -1).astype(np.float32)
    if not np.isfinite(seen).all():
        fail(f"{getattr(board, 'filename', 'a state')} holds numbers that are not finite; save the states again")
    return seen


def one_hot(grid, index, side):
    """grid (rows, 10, 10, 2), index (n,) -> sparse (n, side * side * 16): the observation, 15 is off the board."""
    row, y, x = neighbourhoods(index, side)
    kind = grid[row, y.clip(0, 9), x.clip(0, 9)].astype(np.int32) @ np.array([1, 5], np.int32)
    kind[(y < 0) | (y > 9) | (x < 0) | (x > 9)] = 15
    column, ends = kind + 16 * np.arange(side * side), np.arange(0, kind.size + 1, side * side)
    return csr_matrix((np.ones(kind.size, np.float32), column.ravel(), ends), (len(index), 16 * side * side))


def train_and_read(look, index, labels, rows, components=None):
    """Train one probe for each row of labels (k, n) on the squares index (n,), and read all squares of `rows` with it.

    look: squares (m,) -> features (m, F), which PCA reduces to `components` if given -> classes (k, rows, 64)
    """
    x = look(index)
    # sparse features keep their mean, which the intercept takes up: the same probe but for the solver's tolerance
    reduce = PCA(components, random_state=0) if components else "passthrough"
    prepare = make_pipeline(StandardScaler(with_mean=not issparse(x)), reduce)
    z = prepare.fit_transform(x)
    probes, classes = [LogisticRegression(max_iter=300).fit(z, y) for y in labels], []
    for part in np.array_split(rows, -(-len(rows) // 1000)):  # not all features at once
        z = prepare.transform(look(squares(part)))
        classes.append(np.stack([probe.predict(z).reshape(-1, 64) for probe in probes]))
    return np.concatenate(classes, 1)


# ======================================================================================================================
# Scores, and drawings of a board
# ======================================================================================================================
MAIN, ENDS = ("macro_f1", "plan_recall"), ("", "_low", "_high")  # the limits of the interval
BASELINES = ("trained reduced", "untrained", "untrained reduced", "shuffled")


def confusions(true, predicted):
    """classes (rows, 64), both -> counts (rows, 25), entry 5 * true + predicted."""
    entries = 25 * np.arange(len(true))[:, None] + 5 * true + predicted
    return np.bincount(entries.ravel(), minlength=25 * len(true)).reshape(-1, 25)


def ratio(part, whole, otherwise):
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), otherwise)


def scores(counts):
    """counts (..., 25) -> dict of precision, recall, f1 (..., 5), macro_f1, plan_recall and plan_precision (...).

    Plan recall: share of the squares with another label than never that are predicted exactly, plan precision: share
    of those with another prediction; NaN without any.
    """
    counts = counts.reshape(*counts.shape[:-1], 5, 5)
    hits, true, predicted = np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1), counts.sum(-2)
    f1 = ratio(2 * hits, true + predicted, 0)
    result = {"precision": ratio(hits, predicted, 0), "recall": ratio(hits, true, 0), "f1": f1}
    for name, whole in (("plan_recall", true), ("plan_precision", predicted)):
        result[name] = ratio(hits[..., :NEVER].sum(-1), whole[..., :NEVER].sum(-1), np.nan)
    return result | {"macro_f1": f1.mean(-1)}


def interval(name, value, resampled):
    """-> record of the value and both limits of its 95 % bootstrap interval; resampled (resamples,), NaN left out."""
    resampled = resampled[np.isfinite(resampled)]
    low, high = np.percentile(resampled, [2.5, 97.5]) if len(resampled) else (np.nan, np.nan)
    return dict(zip((name + end for end in ENDS), (value, low, high)))


def limits(record, name):
    return [record[name + end] for end in ENDS]


def text(record, name):
    return "{:.3f} ({:.3f} to {:.3f})".format(*limits(record, name))


def with_intervals(counts, episode, draws):
    """counts (rows, 25), episode (rows,), draws (resamples, episodes) -> record of all scores, the two main ones with
    an interval. Every episode counts alike, however long; whole ones are drawn, since their squares are not
    independent."""
    per_episode = np.zeros((draws.shape[1], 25))
    np.add.at(per_episode, episode, counts)
    per_episode /= per_episode.sum(1, keepdims=True)
    result, resampled = scores(per_episode.sum(0)), scores(draws @ per_episode)
    record = {k: v for name in MAIN for k, v in interval(name, result[name], resampled[name]).items()}
    record["plan_precision"] = result["plan_precision"]
    return record | {f"{m}_{c}": v for m in ("precision", "recall", "f1") for c, v in zip(CLASSES, result[m])}


def recall_curve(counts, episode, step, draws, chosen):
    """Plan recall against the step, pooled over the `chosen` (episodes,) bool.

    counts (rows, 25), episode and step (rows,), draws (resamples, episodes) -> episodes that run at each step (steps,),
    squares with a plan (steps,), recall (1 + resamples, steps), first that of the episodes themselves. NaN where fewer
    than 10 squares have a plan, or fewer than 10 episodes or a tenth of them run: those in which the agent is stuck.
    """
    hits, planned, running = np.zeros((3, draws.shape[1], step.max() + 1))
    hits[episode, step], planned[episode, step] = counts[:, [0, 6, 12, 18]].sum(1), counts[:, :20].sum(1)
    running[episode, step] = 1
    weights, n = np.vstack([np.ones(draws.shape[1]), draws]) * chosen, chosen @ running
    recall = ratio(weights @ hits, weights @ planned, np.nan)
    recall[:, (n < max(min(10, n.max()), 0.1 * n.max())) | (chosen @ planned < 10)] = np.nan
    return n.astype(int), (chosen @ planned).astype(int), recall


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
    plt.rcParams["text.parse_math"] = False  # a folder's name may have dollar signs
    numbers_ok = args.max_rows >= 100 and args.bootstrap >= 1 and args.seed >= 0 and 0 < args.test_share < 1
    if not (args.folders and args.sides and numbers_ok):
        fail("wanted: folders, sides, --max-rows >= 100, --bootstrap >= 1, --seed >= 0, --test-share between 0 and 1")
    if len({folder.resolve() for folder in args.folders}) < len(args.folders):
        fail("a folder is named twice")
    runs = [read_states(folder) for folder in args.folders]
    if len({(run.meta["levels"]["sha256"], run.meta["thinking_steps"]) for run in runs}) > 1:
        sets = "".join(f"\n  {run.folder}: {run.meta['thinking_steps']} of {run.meta['levels']}" for run in runs)
        fail("the folders hold different levels or thinking steps; save them with the same --eval-levels, "
             f"--state-episodes and --thinking-steps{sets}")  # fmt: skip
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output).close()
        for old in args.output.glob(".half-written-*"):  # of a run that was killed
            shutil.rmtree(old, ignore_errors=True)
    except OSError as e:
        fail(f"--output {args.output} cannot be written to ({e})")
    narrow, thinking_steps = min(n for run in runs for n in run.meta["kinds"].values()), runs[0].meta["thinking_steps"]
    args.sides = tuple(dict.fromkeys(args.sides))
    if args.max_rows < narrow * max(args.sides) ** 2:
        fail(f"--max-rows must be at least {narrow * max(args.sides) ** 2}, the features of a probe")

    # the episodes of all agents are on the same levels in the same order: one split, and the same draws for all
    test_episodes = np.unique(runs[0].episode[split_levels(runs[0].level_id, args.test_share, args.seed)])
    n_test = len(test_episodes)
    shortest = np.min([np.bincount(run.episode[run.t >= 0])[test_episodes] for run in runs], 0)
    cohort = int(np.median(shortest)) if args.cohort is None else args.cohort
    if not 1 <= cohort <= shortest.max():
        fail(f"--cohort must be from 1 to {shortest.max()}, the longest that every agent plays on a test level")
    everyone, lasting = np.ones(n_test, bool), shortest >= cohort
    draws = np.random.default_rng(args.seed).multinomial(n_test, everyone / n_test, args.bootstrap)

    for run in runs:
        test = np.isin(run.episode, test_episodes)
        train_rows, run.rows = np.flatnonzero(~test), np.flatnonzero(test)
        assert not np.isin(run.level_id[train_rows], run.level_id[run.rows]).any(), "shared levels"
        rng = np.random.default_rng(args.seed)
        run.drawn = draw_squares(train_rows, run.episode[train_rows], args.max_rows, rng)
        inner = run.labels[:, :, INNER]
        run.true, run.train_labels = inner[:, run.rows], inner.reshape(3, -1)[:, run.drawn]
        run.shuffled = rng.permuted(run.train_labels, axis=1)
        checks = {"test square; save more episodes, if this agent ever does it": inner[:, test & (run.t >= 0)]}
        checks["square drawn for training; raise --max-rows or save more episodes"] = run.train_labels
        for where, labels in checks.items():
            for c, k in np.argwhere([np.bincount(concept.ravel(), minlength=5) == 0 for concept in labels]):
                fail(f"{run.name}: '{CLASSES[k]}' of '{CONCEPTS[c]}' is on no {where}")
        agent, levels, solved = run.meta["args"], run.meta["levels"]["name"], run.solved[run.t == 0]
        print(f"{run.name}: {run.meta['script']} L={agent['layers']} E={agent['experts']} d={agent['width']}, "
              f"{solved.mean():.1%} of {len(solved)} levels ({levels}) solved; trained on {args.max_rows:,} squares "
              f"out of {64 * len(train_rows):,}, tested on all of {n_test} other episodes")  # fmt: skip

    # ==================================================================================================================
    # Loop
    # ==================================================================================================================
    results, curves, first = [], defaultdict(list), {}
    for run in runs:
        agent, kinds = run.meta["args"], run.meta["kinds"]
        step, place = run.t[run.rows], np.searchsorted(test_episodes, run.episode[run.rows])
        acting = step >= 0  # the other rows are thinking steps

        # what the probes read: {(features, state, side): classes (3, test rows, 64)}
        found, field = {}, min(2 * agent["layers"] + 1, 17)  # the squares that one pass brings together; 17: the board
        jobs = [("observation", "", side) for side in sorted({1, 3, field})]
        jobs += [(*pair, side) for side in args.sides for pair in run.states]
        for features, state, side in tqdm(jobs, desc=run.name, leave=False, disable=None):
            see, board = (patches, open_array(run.folder, f"{features}_{state}")) if state else (one_hot, run.grid)
            look = functools.partial(see, board, side=side)
            probe = functools.partial(train_and_read, look, run.drawn, rows=run.rows)
            classes = probe([*run.train_labels, *(run.shuffled if features == "trained" else ())])
            found[features, state, side] = classes[:3]
            if features == "trained":
                found["shuffled", state, side] = classes[3:]
            if state:
                wide = kinds[state[0]] > narrow
                reduced = probe(run.train_labels, components=narrow * side**2) if wide else classes[:3]
                found[f"{features} reduced", state, side] = reduced

        # scores and the table
        line = "{:10} {:>17} {:>22} {:>22} {:>10} {:>9} {:>10} {:>8}".format
        few = f"{narrow} ch."
        print(f"\n{run.name}: macro F1, plan recall, F1 of the baselines; {few}: PCA to {narrow} channels a square")
        print(line("", "probe on", "macro F1", "plan recall", few, "untrained", few, "shuffled"))
        for c, concept in enumerate(CONCEPTS):
            scored = {}
            for (features, state, side), classes in found.items():
                about = {"agent": run.name} | {k: agent[k] for k in ("layers", "experts", "width")}
                about |= {"concept": concept, "features": features, "state": state, "side": side}
                counts = confusions(run.true[c, acting], classes[c, acting])
                scored[features, state, side] = about | with_intervals(counts, place[acting], draws)
            results += scored.values()
            for features, state, side in jobs:
                if features != "untrained":
                    numbers = [text(scored[features, state, side], score) for score in MAIN]
                    numbers += [f"{scored[b, state, side]['macro_f1']:.3f}" if state else "" for b in BASELINES]
                    print(line(concept, f"{state or features} {side}x{side}", *numbers))

        # curves and boards, of the last layer; curves at the number of channels that all agents have
        shown = f"{args.curve_state if args.curve_state in kinds else [*kinds][0]}{agent['layers']}", args.sides[0]
        lines = {features: found[f"{features} reduced", *shown] for features in ("trained", "untrained")}
        lines["observation 3x3"] = found["observation", "", 3]
        parts = [("all", acting, everyone), ("cohort", acting & (step < cohort), lasting)]
        parts += [("thinking", step <= 0, everyone)] if thinking_steps else []
        for (which, rows, chosen), (c, concept), features in itertools.product(parts, enumerate(CONCEPTS), lines):
            counts, passes = confusions(run.true[c, rows], lines[features][c, rows]), step[rows] - step[rows].min()
            n, planned, recall = recall_curve(counts, place[rows], passes, draws, chosen)
            if which == "all":
                run.running = n
            base = first.setdefault((which, concept, features), recall)  # of the first agent: same levels, same draws
            for k in np.flatnonzero(np.isfinite(recall[0])):
                point = {"agent": run.name, "concept": concept, "episodes": which, "features": features}
                state = "" if features == "observation 3x3" else shown[0]
                point |= {"state": state, "step": k, "n": n[k], "planned": planned[k]}
                minus = recall[:, k] - (base[:, k] if k < base.shape[1] else np.nan)
                point |= interval("recall", recall[0, k], recall[1:, k]) | interval("minus", minus[0], minus[1:])
                curves[run.name, concept, which, features].append(point)
        opening = np.flatnonzero(step == 0)[:3]
        run.decoded, run.opening = np.full((3, len(opening), 100), NEVER), run.rows[opening]
        run.decoded[:, :, INNER] = found["trained", *shown][:, opening]

    if not any(curves.values()):
        fail("at no step 10 test squares have a plan; raise --test-share, or save more episodes")

    # does the shallow agent's plan start less complete, and does it catch up?
    titles = {"all": "episodes still running", "cohort": f"{lasting.sum()} levels of {cohort} steps or more"}
    line, lasts = "{:10} {:>15} {:>26} {:>26} {:>26} {:>26} {}".format, {"cohort": cohort - 1}
    if thinking_steps:
        titles["thinking"], lasts["thinking"] = "first observation, thinking", thinking_steps
    for which, last in lasts.items():
        print(f"\nplan recall on {titles[which]}")
        print(line("", "", "step 0", f"step {last}", "minus the first, step 0", f"minus the first, step {last}", ""))
        for concept, run, features in itertools.product(CONCEPTS, runs, lines):
            points = {point["step"]: point for point in curves[run.name, concept, which, features]}
            cells = itertools.product(("recall", "minus"), (0, last))
            print(line(concept, features, *(text(points[k], m) if k in points else "" for m, k in cells), run.name))

    # ==================================================================================================================
    # Pictures
    # ==================================================================================================================
    figure = functools.partial(plt.subplots, constrained_layout=True, squeeze=False)
    plan_recall, axes = figure(len(titles) + 1, 3, figsize=(12, 3 * len(titles) + 3), sharey="row")
    panels = itertools.product(*map(enumerate, (titles, CONCEPTS)), zip(lines, (".-", "--", ":")), enumerate(runs))
    for (row, which), (column, concept), (features, style), (k, run) in panels:
        axis, label = axes[row, column], "thinking step" if which == "thinking" else "environment step t"
        points = curves[run.name, concept, which, features]
        x = [point["step"] for point in points]
        recall, low, high = np.reshape([limits(point, "recall") for point in points], (-1, 3)).T
        axis.plot(x, recall, f"C{k}{style}", label=f"{features}, {run.name[-40:]}", linewidth=1)
        if features == "trained":
            axis.fill_between(x, low, high, color=f"C{k}", alpha=0.2, linewidth=0)
        axis.set(title=f"{concept}: {titles[which]}", xlabel=label, ylabel="plan recall")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if (which, features) == ("all", "trained"):
            axes[-1, column].plot(run.running, f"C{k}")
            axes[-1, column].set(xlabel=label, ylabel="episodes still running, n(t)")
    legend = {"loc": "outside lower center", "fontsize": "small"}
    plan_recall.legend(*axes[0, 0].get_legend_handles_labels(), ncols=len(lines), **legend)
    plt.setp(axes[:-1, 0], ylim=(0, None))

    bars, axes = figure(len(runs), 3, figsize=(12, 3.2 * len(runs)))
    for (row, run), (column, concept) in itertools.product(enumerate(runs), enumerate(CONCEPTS)):
        axis, of_concept = axes[row, column], [r for r in results if (r["agent"], r["concept"]) == (run.name, concept)]
        for features, marker in zip(("observation", "trained", *BASELINES), ("", "", "s", "x", "1", "+")):
            records = [r for r in of_concept if r["features"] == features]
            x = [f"{r['state'] or 'obs.'}\n{r['side']}x{r['side']}" for r in records]
            y, low, high = np.transpose([limits(r, "macro_f1") for r in records])
            if features in BASELINES:
                axis.plot(x, y, f"k{marker}", label=features.replace("reduced", f"to {narrow} channels"))
            else:
                axis.bar(x, y, yerr=np.abs([y - low, high - y]), alpha=0.5, label=features)
        axis.set(title=f"{run.name[-40:]}: {concept}", ylim=(0, 1), ylabel="macro F1")
    bars.legend(*axes[0, 0].get_legend_handles_labels(), ncols=6, **legend)

    pictures, axes = figure(len(opening), 2 * len(runs), figsize=(5.2 * len(runs), 2.8 * len(opening)))
    for k, run in enumerate(runs):
        for b, row in enumerate(run.opening):
            draw_board(axes[b, 2 * k], run.grid[row], run.decoded[:, b], f"{run.name[-20:]}: decoded, t = 0")
            draw_board(axes[b, 2 * k + 1], run.grid[row], run.labels[:, row], "taken")
        if args.text:
            first_row, both = run.opening[0], (run.decoded[:, 0], run.labels[:, run.opening[0]])
            texts = [text_board(run.grid[first_row], arrows[c]) for c in (0, 2) for arrows in both]
            print(f"\n{run.name}, t = 0: agent onto, decoded and taken; box off, decoded and taken")
            print("\n".join("   ".join(parts) for parts in zip(*texts)))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-written stays
    try:
        with tempfile.TemporaryDirectory(prefix=".half-written-", dir=args.output) as new:
            for records, file in ((results, "results.csv"), ([*itertools.chain(*curves.values())], "curves.csv")):
                with open(f"{new}/{file}", "w", newline="") as f:
                    writer = csv.DictWriter(f, records[0])
                    writer.writeheader()
                    writer.writerows(records)
            for picture, file in ((plan_recall, "plan_recall.png"), (bars, "probes.png"), (pictures, "board.png")):
                picture.savefig(f"{new}/{file}", dpi=110)
            for file in Path(new).iterdir():
                file.replace(args.output / file.name)
    except OSError as e:
        fail(f"--output {args.output} cannot be written to ({e})")
    print(f"wrote results.csv, curves.csv, plan_recall.png, probes.png and board.png to {args.output}")
