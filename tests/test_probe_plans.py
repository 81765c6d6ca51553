"""States that the Sokoban scripts save, and the probes that read plans from them."""

import csv
import json
import os
import re
import shutil
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import drc, ff, moves_of, run_here
from matplotlib.figure import Figure
from sklearn.metrics import f1_score, precision_recall_fscore_support
from test_sokoban_agent import make_agent

import probe_plans as probes
from probe_plans import NEVER

UP, RIGHT, DOWN, LEFT = range(4)


# ---- labels
def sha256(levels):
    return drc.hashlib.sha256(levels.tobytes()).hexdigest()[:16]


def frame(player, *boxes):
    """Observation (10, 10, 2) with the player and boxes on these squares; labels do not look at walls and targets."""
    grid = np.zeros((10, 10, 2), np.uint8)
    grid[player][0] = 3
    for box in boxes:
        grid[box][0] = 4
    return grid


def board(**squares):
    """Labels (100,): r5c3=UP sets the square in row 5, column 3; the others are never."""
    labels = np.full((10, 10), NEVER)
    for name, label in squares.items():
        labels[int(name[1]), int(name[3])] = label
    return labels.ravel()


def test_labels_of_episodes_by_hand():
    """The first has a blocked move, a revisit, a push and a final solving push; the second, after a thinking step, ends
    with a blocked move at its time limit."""
    rows = [
        (0, UP, frame((5, 2), (5, 5))),  # blocked
        (0, RIGHT, frame((5, 2), (5, 5))),
        (0, LEFT, frame((5, 3), (5, 5))),  # back to where it was
        (0, RIGHT, frame((5, 2), (5, 5))),
        (0, RIGHT, frame((5, 3), (5, 5))),
        (0, RIGHT, frame((5, 4), (5, 5))),  # a push
        (0, RIGHT, frame((5, 5), (5, 6))),  # the last one
        (1, -1, frame((5, 5), (1, 1))),  # thinking
        (1, DOWN, frame((5, 5), (1, 1))),
        (1, LEFT, frame((6, 5), (1, 1))),  # blocked
    ]
    ends = np.stack([frame((5, 6), (5, 7)), frame((6, 5), (1, 1))])
    episode, action, grid = (np.array(column) for column in zip(*rows))
    onto, off, box = probes.plan_labels(grid, ends, action, episode)
    path = {"r5c4": RIGHT, "r5c5": RIGHT, "r5c6": RIGHT}
    left = {"r5c4": RIGHT, "r5c5": RIGHT}
    for t in (0, 1):
        assert (onto[t] == board(r5c2=LEFT, r5c3=RIGHT, **path)).all()
        assert (off[t] == board(r5c2=RIGHT, r5c3=LEFT, **left)).all()
    assert (onto[2] == board(r5c2=LEFT, r5c3=RIGHT, **path)).all()
    assert (off[2] == board(r5c2=RIGHT, r5c3=LEFT, **left)).all()
    assert (onto[3] == board(r5c3=RIGHT, **path)).all() and (off[3] == board(r5c2=RIGHT, r5c3=RIGHT, **left)).all()
    assert (onto[4] == board(**path)).all() and (off[4] == board(r5c3=RIGHT, **left)).all()
    assert (onto[6] == board(r5c6=RIGHT)).all() and (off[6] == board(r5c5=RIGHT)).all()
    for t in range(6):
        assert (box[t] == board(r5c5=RIGHT, r5c6=RIGHT)).all()
    assert (box[6] == board(r5c6=RIGHT)).all()
    for t in (7, 8):
        assert (onto[t] == board(r6c5=DOWN)).all() and (off[t] == board(r5c5=DOWN)).all()
    assert (onto[9] == NEVER).all() and (off[9] == NEVER).all() and (box[7:] == NEVER).all()


def test_labels_equal_a_search_ahead(saved):
    """The plain definition, square by square: the first later step that moves onto it, off it, or a box off it."""
    tables = {name: np.load(saved / f"{name}.npy") for name in probes.TABLES}
    rows = np.flatnonzero(tables["episode"] < 12)
    grid, action, episode, t = (tables[k][rows] for k in ("grid", "action", "episode", "t"))
    labels = probes.plan_labels(grid, tables["terminal_grid"][:12], action, episode)
    assert (t < 0).any() and len(rows) > 100
    following = [grid[k + 1] if k + 1 < len(rows) and episode[k + 1] == episode[k] else tables["terminal_grid"][e]
                 for k, e in enumerate(episode)]  # fmt: skip
    for k in range(len(rows)):
        expected = np.full((3, 10, 10), NEVER)
        for later in reversed(range(k, len(rows))):
            if episode[later] != episode[k]:
                continue
            (before,), (after,) = (np.argwhere(g[..., 0] == 3) for g in (grid[later], following[later]))
            if (before != after).any():
                assert (after - before == [(-1, 0), (0, 1), (1, 0), (0, -1)][action[later]]).all()
                expected[0][tuple(after)] = expected[1][tuple(before)] = action[later]
                if grid[later][(*after, 0)] == 4:
                    expected[2][tuple(after)] = action[later]
        assert (labels[:, k].reshape(3, 10, 10) == expected).all()


def test_labels_of_a_thousand_episodes_take_less_than_a_second(saved):
    tables = {name: np.load(saved / f"{name}.npy") for name in probes.TABLES}
    chosen = np.resize(np.flatnonzero(np.bincount(tables["episode"]) >= 10), 1000)
    parts = [np.flatnonzero(tables["episode"] == e) for e in chosen]
    rows, episode = np.concatenate(parts), np.arange(1000).repeat([len(part) for part in parts])
    assert len(rows) > 20_000
    clock = time.process_time()
    probes.plan_labels(tables["grid"][rows], tables["terminal_grid"][chosen], tables["action"][rows], episode)
    assert time.process_time() - clock < 1


# ---- states
def solve(levels, pushes):
    """The generator's solutions, up to where the level is solved first, as what `evaluate` returns."""
    n = len(levels)
    actions, lengths = np.zeros((n, 120), np.int8), np.zeros(n, int)
    for k, (level, push) in enumerate(zip(levels, pushes)):
        moves = moves_of(level, push)[:120]
        actions[k, : len(moves)] = moves
    envs = drc.Sokoban([levels], [drc.opening_seeds(n)])
    for t in range(120):
        done = envs.step(actions[:, t])[2]
        lengths[done & (lengths == 0)] = t + 1
    return {"actions": actions, "lengths": lengths, "solved": lengths < 120}


def save(folder, agent, count=60, kind="medium-easy", thinking_steps=0, script=drc, seed=5, **meta):
    """States of the generator's solutions of `count` levels, seen by `agent` and a fresh network."""
    levels, pushes = script.generate_levels(kind, count, seed)
    options = {"layers": len(agent.cells), "experts": agent.experts, "width": agent.width}
    torch.manual_seed(7)
    networks = {"trained": agent, "untrained": script.Agent(**options, cell=type(agent.cells[0]).__name__.lower())}
    about = {"name": kind, "count": count, "sha256": sha256(levels)}
    meta = {"script": "sokoban_drc_ppo", "args": options, "step": 0, "levels": about} | meta
    script.save_states(folder, networks, levels, solve(levels, pushes), thinking_steps, meta)
    return networks, levels


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """States of two untrained networks, L = 1, E = 1, d = 8, on 60 levels with two thinking steps."""
    folder = tmp_path_factory.mktemp("states") / "fresh"
    save(folder, make_agent(1, 1), thinking_steps=2)
    return folder


@pytest.mark.parametrize("script, experts, cell", [(drc, 1, "convlstm"), (drc, 3, "convlstm"), (drc, 2, "convglu"),
                                                   (ff, 2, "convlstm")])  # fmt: skip
def test_saved_states_are_those_of_the_agent_in_its_episode(script, experts, cell, tmp_path):
    agent = make_agent(2, experts, 4, script=script, cell=cell)
    networks, levels = save(tmp_path / "states", agent, 5, "easy", thinking_steps=2, script=script)
    arrays = {f.stem: np.load(f, allow_pickle=False, mmap_mode="r") for f in (tmp_path / "states").glob("*.npy")}
    kinds = {(drc, 1, "convlstm"): "hc", (drc, 3, "convlstm"): "hcs"}.get((script, experts, cell), "s")
    names = {f"{network}_{kind}{l}" for network in networks for kind in kinds for l in (1, 2)}
    assert set(arrays) == names | set(probes.TABLES)
    assert (np.sort(np.unique(arrays["level_id"])) == np.sort(drc.level_ids(levels))).all() and arrays["solved"].all()
    for e, level in enumerate(levels):
        rows = np.flatnonzero(arrays["episode"] == e)
        assert arrays["t"][rows].tolist() == list(range(-2, len(rows) - 2))
        assert arrays["action"][rows[:2]].tolist() == [-1, -1]
        grid = np.array(arrays["grid"][rows])
        assert (grid[:3] == level[..., ::-1]).all() and (grid[3] != grid[2]).any()
        end = arrays["terminal_grid"][e]
        assert (end[..., 1][end[..., 0] == 4] == 2).all()  # all boxes on targets
        for name, network in networks.items():
            state, first = network.initial_state(1), torch.ones(1, 1)
            for k, row in enumerate(rows):
                out, state = network.core(torch.from_numpy(grid[k]).view(1, 1, 10, 10, 2), first * (k == 0), state)
                s, *c, h = state.split(network.state_channels, 1) if script is drc else [out[0], None, None, None]
                wanted = {"s2": out[0], "h2": out[0] if experts == 1 else h, "c1": c[0], "c2": c[1]}
                for kind in set(wanted) & {n.split("_")[1] for n in names}:
                    value = torch.from_numpy(np.array(arrays[f"{name}_{kind}"][row])).float()
                    assert torch.allclose(value, wanted[kind][0].movedim(0, 2), atol=2e-3), (name, kind, k)


def test_the_fresh_network_is_not_the_trained_one_and_no_kind_repeats_another(saved):
    arrays = {f.stem: np.load(f) for f in saved.glob("*trained_*.npy")}
    assert len({a.tobytes() for a in arrays.values()}) == len(arrays) == 4
    assert all(np.isfinite(a).all() and a.dtype == np.float16 for a in arrays.values())


@pytest.fixture(scope="module")
def trained(level_files, tmp_path_factory):
    """A run of two rollouts; its training levels are train.npy."""
    folder = tmp_path_factory.mktemp("trained")
    shape = ["--layers", 2, "--experts", 2, "--width", 4, "--num-envs", 8, "--num-steps", 5, "--eval-every", 0]
    levels = ["--levels", level_files / "train.npy", "--eval-levels", level_files / "eval.npy"]
    assert run_here(*shape, *levels, "--total-timesteps", 80, "--runs-dir", folder) == 0
    return next(folder.iterdir()) / "last.pt"


def test_states_from_the_command_line(trained, level_files, tmp_path, capsys):
    folder, seen, new = tmp_path / "states", np.load(level_files / "train.npy"), np.load(level_files / "eval.npy")
    turned = np.ascontiguousarray(np.rot90(seen[3:4], 1, (1, 2)))
    np.save(tmp_path / "mixed.npy", np.concatenate([seen[:3], turned, new]))
    command = ["--evaluate", trained, "--eval-levels", tmp_path / "mixed.npy", "--save-states", folder]
    assert run_here(*command, "--state-episodes", 7) == 2  # the agent was trained on the others
    assert "has 6 levels new to the agent" in capsys.readouterr().err and not folder.exists()
    assert run_here(*command, "--state-episodes", 5, "--thinking-steps", 3) == 0
    meta = json.loads((folder / "meta.json").read_text())
    size, free = re.search(r"passes: ([\d.,]+) MB to write, ([\d.,]+) MB free", capsys.readouterr().out).groups()
    written = sum(f.stat().st_size for f in folder.glob("*.npy")) / 1e6
    assert float(size.replace(",", "")) == pytest.approx(written, rel=0.01) and free
    assert meta["script"] == "sokoban_drc_ppo" and meta["args"]["layers"] == 2 and meta["thinking_steps"] == 3
    assert meta["levels"]["sha256"] == sha256(new[:5]) and meta["kinds"] == {"h": 8, "c": 8, "s": 4}
    assert meta["checkpoint_sha256"] == drc.hashlib.sha256(trained.read_bytes()).hexdigest()
    assert (np.unique(np.load(folder / "level_id.npy")) == np.sort(drc.level_ids(new[:5]))).all()
    assert run_here(*command, "--state-episodes", 5) == 2 and "exists already" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] in (["mixed.npy", "states"], ["states", "mixed.npy"])


@pytest.mark.parametrize("fault", ["small disk", "no room for the arrays", "full disk", "interrupt", "no folder"])
def test_nothing_half_written_is_left(fault, trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "states"

    def stop(*_):
        raise KeyboardInterrupt if fault == "interrupt" else OSError(28, "No space left on device")

    if fault == "small disk":
        usage = type("Usage", (), {"free": 2_000_000})  # 5 episodes of 120 steps take more
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    elif fault == "no folder":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "states"
    else:
        monkeypatch.setattr(*((os, "posix_fallocate") if fault == "no room for the arrays" else (np, "save")), stop)
    command = ["--evaluate", trained, "--save-states", folder, "--state-episodes", 5]
    if fault == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            run_here(*command)
    else:
        assert run_here(*command) == 2
        wanted = "twice that to be free" if fault == "small disk" else "cannot be written"
        assert wanted in capsys.readouterr().err
    assert not folder.exists() and [f.name for f in tmp_path.iterdir()] == ["file"] * (fault == "no folder")


def test_save_states_needs_a_checkpoint(capsys):
    assert run_here("--save-states", "somewhere") == 2
    assert "needs --evaluate" in capsys.readouterr().err


# ---- split, scores and curves
def test_splits_share_no_level():
    level_id = np.random.default_rng(0).integers(0, 40, 5000).astype(np.uint64)
    test = probes.split_levels(level_id, 0.25, seed=3)
    assert not set(level_id[test]) & set(level_id[~test])
    assert len(set(level_id[test])) == 10 and len(set(level_id[~test])) == 30
    assert (test == probes.split_levels(level_id, 0.25, 3)).all() and (
        test != probes.split_levels(level_id, 0.25, 4)
    ).any()
    assert (
        probes.split_levels(np.array([1, 2, 2]), 0.01, 1).any()
        and not probes.split_levels(np.array([1, 2, 2]), 0.99, 1).all()
    )


def test_every_episode_is_drawn_as_often():
    """Rows 10 to 12 are of episode 3, rows 20 to 319 of episode 5."""
    rows, episode = np.r_[10:13, 20:320], np.arange(3, 6, 2).repeat([3, 300])
    index = probes.draw_squares(rows, episode, 20_000, np.random.default_rng(0))
    assert set(index // 64) == set(rows) and (np.diff(index) >= 0).all()
    assert np.mean(index // 64 < 20) == pytest.approx(0.5, abs=0.02)
    assert np.bincount(index % 64, minlength=64).min() > 200


def test_scores_equal_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    true = rng.integers(0, 5, 3000)
    predicted = np.where(rng.random(3000) < 0.6, true, rng.integers(0, 5, 3000))
    counts = np.bincount(5 * true + predicted, minlength=25)
    result = probes.scores(counts)
    precision, recall, f1, _ = precision_recall_fscore_support(true, predicted)
    for name, wanted in (("precision", precision), ("recall", recall), ("f1", f1)):
        assert np.allclose(result[name], wanted)
    assert result["macro_f1"] == pytest.approx(f1_score(true, predicted, average="macro"))
    assert result["plan_recall"] == pytest.approx((predicted == true)[true != NEVER].mean())
    assert result["plan_precision"] == pytest.approx((predicted == true)[predicted != NEVER].mean())


def test_intervals_come_from_whole_episodes():
    """All squares of an episode right or wrong together: the interval of the mean of 50 coins, not of 5,000."""
    counts = np.zeros((500, 25))
    episode, right = np.arange(50).repeat(10), np.arange(50) % 2 == 0
    counts[right[episode], 0], counts[~right[episode], 1] = 10, 10  # up, taken for right in every other episode
    draws = np.random.default_rng(0).multinomial(50, np.ones(50) / 50, 2000)
    record = probes.with_intervals(counts, episode, draws)
    assert record["plan_recall"] == 0.5 and record["recall_up"] == 0.5
    assert record["plan_recall_low"] == pytest.approx(0.5 - 1.96 * 0.0707, abs=0.03)
    assert record["plan_recall_high"] == pytest.approx(0.5 + 1.96 * 0.0707, abs=0.03)


def test_recall_rises_by_itself_when_short_episodes_leave_and_not_over_a_fixed_cohort():
    """20 episodes of 2 steps whose plan is never read, 20 of 4 steps whose plan always is."""
    long = np.arange(40) >= 20
    episode = np.arange(40).repeat(np.where(long, 4, 2))
    step = np.concatenate([np.arange(4 if l else 2) for l in long])
    counts = np.zeros((len(episode), 25))
    counts[long[episode], 0], counts[~long[episode], 4] = 3, 3
    counts[:, 24] = 50
    draws = np.random.default_rng(0).multinomial(40, np.ones(40) / 40, 100)
    n, planned, recall = probes.recall_curve(counts, episode, step, draws, np.ones(40, bool))
    assert n.tolist() == [40, 40, 20, 20] and planned.tolist() == [120, 120, 60, 60]
    assert recall[0].tolist() == [0.5, 0.5, 1, 1] and recall.shape == (101, 4)
    record = probes.interval("recall", recall[0, 0], recall[1:, 0])
    assert record["recall"] == 0.5 and record["recall_low"] < 0.45 < 0.55 < record["recall_high"]
    n, planned, recall = probes.recall_curve(counts, episode, step, draws, long)
    assert n.tolist() == [20] * 4 and recall[0].tolist() == [1] * 4


def test_the_curve_ends_where_few_episodes_run_or_nothing_is_planned():
    """30 episodes of 2 steps, 10 of which run on to a third and 9 to a fourth; nothing is planned at t = 1."""
    length = np.where(np.arange(30) < 9, 4, np.where(np.arange(30) < 10, 3, 2))
    episode = np.arange(30).repeat(length)
    step = np.concatenate([np.arange(k) for k in length])
    counts = np.zeros((len(episode), 25))
    counts[step != 1, 0], counts[:, 24] = 1, 63
    draws = np.random.default_rng(0).multinomial(30, np.ones(30) / 30, 100)
    n, planned, recall = probes.recall_curve(counts, episode, step, draws, np.ones(30, bool))
    assert n.tolist() == [30, 30, 10, 9] and planned.tolist() == [30, 0, 10, 9]
    assert np.isnan(recall[0]).tolist() == [False, True, False, True]


def test_every_episode_counts_alike():
    """One of 2 rows, all read, and one of 100, none read."""
    counts, episode = np.zeros((102, 25)), np.arange(2).repeat([2, 100])
    counts[:2, 0], counts[2:, 1] = 64, 64
    record = probes.with_intervals(counts, episode, np.ones((1, 2)))
    assert record["plan_recall"] == record["recall_up"] == 0.5


def test_where_nothing_is_planned_recall_is_unknown_and_leaves_the_interval_alone():
    counts = np.zeros((2, 25))
    counts[:, 24], counts[0, 0] = 64, 3
    record = probes.with_intervals(counts, np.arange(2), np.array([[2, 0], [0, 2]]))
    assert record["plan_recall"] == record["plan_recall_low"] == record["plan_recall_high"] == 1
    assert np.isnan(probes.scores(counts[1])["plan_recall"]) and np.isnan(
        probes.interval("x", 1, np.full(3, np.nan))["x_low"]
    )


def test_one_hot_and_patches_see_the_neighbourhood():
    grid = np.random.default_rng(0).integers(0, 3, (4, 10, 10, 2)).astype(np.uint8)
    index = probes.squares(np.array([1, 3]))
    assert len(index) == 128 and index[64] == 3 * 64
    x = probes.one_hot(grid, index, 5).toarray().reshape(128, 5, 5, 16)
    assert (x.sum(-1) == 1).all()
    kinds = np.pad(grid[..., 0] + 5 * grid[..., 1], ((0, 0), (1, 1), (1, 1)), constant_values=15)
    near = probes.patches(kinds[:, 1:-1, 1:-1, None], index, 3)
    assert (x.argmax(-1)[:, 1:4, 1:4].reshape(128, 9) == near).all()
    assert (x.argmax(-1)[0] == kinds[1, 0:5, 0:5]).all()  # the square (1, 1): one row and column are off the board
    assert (near[:, 4] == kinds[[1, 3], 2:10, 2:10].ravel()).all()


# ---- the whole script
def probe(*arguments, pictures=False):
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:  # they take most of the time; one test looks at them
            patch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
        code = run_here("--max-rows", 3000, "--bootstrap", 50, *arguments, script="probe_plans.py")
    plt.close("all")
    return code


def table(folder):
    """{(concept, features, state, side): record} of results.csv"""
    with open(folder / "results.csv") as f:
        return {(r["concept"], r["features"], r["state"], int(r["side"])): r for r in csv.DictReader(f)}


@pytest.fixture(scope="module")
def planted(saved, tmp_path_factory):
    """Random states with the labels of all three concepts planted in 8 channels of `trained_c1`."""
    folder = tmp_path_factory.mktemp("planted") / "planted"
    shutil.copytree(saved, folder)
    tables = {name: np.load(folder / f"{name}.npy") for name in probes.TABLES}
    labels = probes.plan_labels(*(tables[k] for k in ("grid", "terminal_grid", "action", "episode")))
    rng = np.random.default_rng(0)
    for name in ("trained_h1", "trained_c1", "untrained_h1", "untrained_c1"):
        states = rng.normal(size=(labels.shape[1], 100, 16))
        if name == "trained_c1":
            states[..., :15] += 6 * (labels[..., None] == np.arange(5)).transpose(1, 2, 0, 3).reshape(-1, 100, 15)
        np.save(folder / f"{name}.npy", states.reshape(-1, 10, 10, 16).astype(np.float16))
    change_meta(kinds={"h": 16, "c": 16})(folder)
    return folder


@pytest.fixture(scope="module")
def planted_table(planted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    assert probe(planted, "--output", folder, "--sides", 1, 3) == 0
    return table(folder)


def test_a_planted_signal_is_found_and_noise_is_not(planted_table):
    found = planted_table
    for concept in probes.CONCEPTS:
        score = {key[1:]: float(r["macro_f1"]) for key, r in found.items() if key[0] == concept}
        assert score["trained", "c1", 1] > 0.95 and score["trained", "c1", 3] > 0.9
        chance = 0.25  # never everywhere gives 0.2
        assert max(score[f, s, k] for f in ("shuffled", "untrained") for s in ("h1", "c1") for k in (1, 3)) < chance
        assert score["trained", "h1", 1] < chance and score["observation", "", 1] < 0.35
        assert score["observation", "", 1] + 0.05 < score["observation", "", 3] < 0.9
        record = found[concept, "trained", "c1", 1]
        assert float(record["macro_f1_low"]) <= score["trained", "c1", 1] <= float(record["macro_f1_high"])
        assert float(record["f1_up"]) > 0.9 and float(record["precision_never"]) > 0.99


def test_an_untrained_network_is_read_about_as_well_as_the_observation(saved, tmp_path, capsys):
    assert probe(saved, "--text", "--output", tmp_path, pictures=True) == 0
    found = table(tmp_path)
    for concept in probes.CONCEPTS:
        score = {key[1:]: float(r["macro_f1"]) for key, r in found.items() if key[0] == concept}
        seen = [score["observation", "", side] for side in (1, 3)]
        for features in ("trained", "untrained"):
            assert min(seen) - 0.08 < score[features, "h1", 1] < max(seen) + 0.05
    out = capsys.readouterr().out
    assert (
        "trained on 3,000 squares out of" in out
        and "agent onto" in out
        and len(re.findall(r"^#{10}   #{10}", out, re.M)) >= 2
    )
    pictures = ["board.png", "curves.csv", "plan_recall.png", "probes.png", "results.csv"]
    assert sorted(f.name for f in tmp_path.iterdir()) == pictures
    with open(tmp_path / "curves.csv") as f:
        curves = list(csv.DictReader(f))
    assert {c["episodes"] for c in curves} == {"all", "cohort", "thinking"}
    shown = {("trained", "h1"), ("untrained", "h1"), ("observation 3x3", "")}
    assert {(c["features"], c["state"]) for c in curves} == shown
    assert {float(c["minus"]) for c in curves} == {float(c["minus_high"]) for c in curves} == {0}  # one agent
    onto = {c["episodes"]: [] for c in curves}
    for c in curves:
        if (c["concept"], c["features"]) == ("agent onto", "trained"):
            onto[c["episodes"]].append(int(c["n"]))
    assert onto["thinking"] == [15] * 3 and len(set(onto["cohort"])) == 1
    assert onto["all"][0] == 15 and onto["all"] == sorted(onto["all"], reverse=True) and min(onto["all"]) < 15


def test_folders_of_any_name_are_drawn(saved, tmp_path):
    names = [r"a$\foo$b", "_under", "x" * 150]
    for name in names:
        shutil.copytree(saved, tmp_path / name)
    assert (
        probe(*(tmp_path / name for name in names), "--output", tmp_path / "out", "--sides", 1, 1, pictures=True) == 0
    )
    with open(tmp_path / "out" / "results.csv") as f:
        assert {Path(r["agent"]).name for r in csv.DictReader(f)} == set(names)


def test_same_seed_same_numbers(planted, planted_table, tmp_path):
    for seed in (1, 2):
        assert probe(planted, "--seed", seed, "--output", tmp_path / str(seed)) == 0
    first = table(tmp_path / "1")
    assert first == {key: planted_table[key] for key in first}
    assert all(record != planted_table[key] for key, record in table(tmp_path / "2").items())


def test_agents_of_other_shapes_are_compared_on_the_same_levels_at_the_same_number_of_channels(saved, tmp_path, capsys):
    save(tmp_path / "other", make_agent(1, 2, 4), thinking_steps=2)
    assert probe(saved, tmp_path / "other", "--output", tmp_path / "out", "--curve-state", "c", "--cohort", 5) == 0
    out = capsys.readouterr().out
    assert out.count("PCA to 4 channels a square") == 2 and "fresh: sokoban" in out and "other: sokoban" in out
    found = table(tmp_path / "out")  # of the agent `other`, which comes last
    for network in ("trained", "untrained"):
        wide, narrow = (
            {s: found["box off", network + f, s, 1]["macro_f1"] for s in ("c1", "s1")} for f in ("", " reduced")
        )
        assert wide["c1"] != narrow["c1"] and wide["s1"] == narrow["s1"]
    with open(tmp_path / "out" / "curves.csv") as f:
        curves = {(c["agent"], c["concept"], c["episodes"], c["features"], c["step"]): c for c in csv.DictReader(f)}
    other = [c for key, c in curves.items() if key[0] == str(tmp_path / "other") and key[2] == "cohort"]
    assert len(other) == 3 * 3 * 5 and any(float(c["minus"]) for c in other)
    for c in other:  # both are scored on the same levels
        first = curves[str(saved), c["concept"], "cohort", c["features"], c["step"]]
        assert float(c["minus"]) == pytest.approx(float(c["recall"]) - float(first["recall"]))
        assert (c["n"], c["planned"]) == (first["n"], first["planned"])  # the same episodes here
        assert c["features"] != "observation 3x3" or float(c["minus"]) == 0


# ---- bad input
def truncate(folder):
    path = folder / "trained_c1.npy"
    path.write_bytes(path.read_bytes()[:-1000])


def resave(name, change):
    def write(folder):
        np.save(folder / f"{name}.npy", change(np.load(folder / f"{name}.npy")))

    return write


def change_meta(**changes):
    def write(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | changes))

    return write


def stand_still(folder):
    """As if no action ever had an effect: nothing is planned."""
    grid, episode = (np.load(folder / f"{name}.npy") for name in ("grid", "episode"))
    opening = np.searchsorted(episode, np.arange(episode[-1] + 1))
    np.save(folder / "grid.npy", grid[opening[episode]])
    np.save(folder / "terminal_grid.npy", grid[opening])


def not_finite(states):
    states[:, 4, 4, 0] = np.nan
    return states


@pytest.mark.parametrize("spoil, message", [
    (lambda folder: (folder / "meta.json").unlink(), "no folder of --save-states"),
    (lambda folder: (folder / "meta.json").write_text("{}"), "damaged"),
    (lambda folder: (folder / "meta.json").write_text("[]"), "damaged"),
    (change_meta(levels={"sha256": 1, "name": "easy"}), "meta.json has other contents"),
    (change_meta(kinds={}), "meta.json tells of other states"),
    (change_meta(kinds={"h": 0, "c": 0}), "meta.json tells of other states"),
    (change_meta(kinds={"h": 5, "c": 5}), "meta.json says"),
    (change_meta(args={"layers": 0, "experts": 1, "width": 16}), "meta.json tells of other states"),
    (lambda folder: (folder / "untrained_h1.npy").unlink(), "untrained_h1.npy"),
    (lambda folder: shutil.copy(folder / "trained_h1.npy", folder / "trained_h2.npy"), "tells of other states"),
    (truncate, "damaged"),
    (resave("trained_h1", lambda a: a[:-3]), "trained_h1 is float16"),
    (resave("trained_h1", lambda a: a[:, 1:]), "trained_h1 is float16"),
    (resave("trained_h1", lambda a: a.astype(float)), "trained_h1 is float64"),
    (resave("trained_h1", not_finite), "trained_h1.npy holds numbers that are not finite"),
    (resave("untrained_c1", not_finite), "untrained_c1.npy holds numbers that are not finite"),
    (resave("episode", lambda a: a[::-1]), "not whole episodes in order"),
    (resave("episode", lambda a: a.astype(float)), "damaged"),
    (resave("level_id", lambda a: a * 0), "one level only"),
    (resave("level_id", lambda a: np.arange(len(a)).astype(a.dtype)), "not on different levels"),
    (resave("action", lambda a: np.where(a == 0, 1, a)), "the boards do not follow from the actions"),
    (resave("terminal_grid", lambda a: np.roll(a, 1, 0)), "the boards do not follow from the actions"),
    (stand_still, "'up' of 'agent onto' is on no test square; save more episodes"),
    (resave("action", lambda a: a.astype(object)), "damaged"),
])  # fmt: skip
def test_damaged_folders(spoil, message, saved, tmp_path, capsys):
    folder = tmp_path / "states"
    shutil.copytree(saved, folder)
    spoil(folder)
    assert probe(folder, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err and not list(tmp_path.glob("out/*"))


def test_results_that_cannot_be_written_leave_the_earlier_ones(saved, tmp_path, monkeypatch, capsys):
    (tmp_path / "results.csv").write_text("earlier")
    (tmp_path / ".half-written-1").mkdir()  # of a run that was killed
    monkeypatch.setattr(probes.csv.DictWriter, "writerows", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    assert probe(saved, "--output", tmp_path) == 2 and "cannot be written to" in capsys.readouterr().err
    assert (tmp_path / "results.csv").read_text() == "earlier"
    assert [f.name for f in tmp_path.iterdir()] == ["results.csv"]


def test_too_few_episodes_other_levels_and_bad_flags(saved, planted, tmp_path, capsys):
    agent = make_agent(1, 1)
    save(tmp_path / "few", agent, 19)
    save(tmp_path / "other", agent, 30, seed=6, thinking_steps=2)
    save(tmp_path / "no thinking", agent)
    save(tmp_path / "short", agent, 40, "easy")
    for arguments, message in [
        ([tmp_path / "few"], "has 19 episodes; at least 20"),
        ([saved, tmp_path / "other"], "different levels"),
        ([saved, tmp_path / "no thinking"], "different levels or thinking steps"),
        ([tmp_path / "nothing"], "does not exist"),
        ([saved, saved.parent / "." / saved.name], "a folder is named twice"),
        ([saved, "--max-rows", 100, "--seed", 3], "drawn for training; raise --max-rows"),
        ([saved, "--cohort", 121], "--cohort must be from 1 to"),
        ([saved, "--seed", -1], "--seed >= 0"),
        ([planted, "--sides", 3, "--max-rows", 143], "--max-rows must be at least 144"),
        ([tmp_path / "short", "--test-share", 0.04, "--seed", 1196], "at no step 10 test squares have a plan"),
        ([saved, "--test-share", 1], "--test-share between 0 and 1"),
        ([saved, "--output", saved / "meta.json"], "cannot be written"),
        ([], "wanted: folders"),
    ]:
        assert probe(*arguments, *(["--output", tmp_path / "out"] if "--output" not in arguments else [])) == 2
        assert message in capsys.readouterr().err
