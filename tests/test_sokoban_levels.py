"""Levels and environment: parsing, the generator, the download, and what EnvPool really serves."""

import io
import time
import zipfile

import numpy as np
import pytest
from conftest import drc, moves_of
from scipy.optimize import linear_sum_assignment

LEVEL = """\
##########
#        #
# $    . #
# $    . #
# $    . #
# $    . #
#   @    #
#        #
#        #
##########
"""


def text_of(*levels):
    return "".join(f"; {k}\n{level}\n" for k, level in enumerate(levels)).encode()


def test_parsing_puts_every_character_where_it_belongs():
    rows = ["##########"] * 5 + ["# * $$$  #", "# +.  .  #"] + ["##########"] * 3  # * and + stand on targets
    (grid,) = drc.parse_levels(text_of("\n".join(rows) + "\n"), "text")
    assert grid.shape == (10, 10, 2) and grid.dtype == np.uint8
    fixed, movable = grid[5:7, :, 0].tolist(), grid[5:7, :, 1].tolist()
    assert fixed == [[1, 0, 2, 0, 0, 0, 0, 0, 0, 1], [1, 0, 2, 2, 0, 0, 2, 0, 0, 1]]
    assert movable == [[0, 0, 4, 0, 4, 4, 4, 0, 0, 0], [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]]


def test_official_layout_with_windows_line_ends_and_repeated_headers():
    text = text_of(LEVEL, LEVEL).replace(b"\n", b"\r\n") + b"; 0\n" + LEVEL.encode()
    assert len(drc.parse_levels(text, "text")) == 3


@pytest.mark.parametrize(
    "level, message",
    [
        (LEVEL.replace("#   @    #", "#   @   #"), "not 10 rows of 10 characters"),
        (LEVEL.replace("#   @    #\n", ""), "not 10 rows of 10 characters"),
        (LEVEL.replace("@", "x"), "a square that is none of"),
        (LEVEL.replace("@", " "), "not exactly 1 player"),
        (LEVEL.replace("$", " ", 1), "not exactly 4 boxes"),
        (LEVEL.replace(".", " ", 1), "not exactly 4 targets"),
        (LEVEL.replace("##########", "#### #####", 1), "an open border"),
        (LEVEL.replace("# $    . #", "#      * #"), "all boxes on targets"),
    ],
)
def test_a_broken_level_is_named(level, message, capsys):
    with pytest.raises(SystemExit) as stop:
        drc.parse_levels(text_of(LEVEL, LEVEL, level), "some/file.txt")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "some/file.txt, level 2" in error and message in error


@pytest.mark.parametrize("text", [b"", b"not a level\n", b"##########\n" * 10, bytes(range(256)) * 9])
def test_text_without_levels_is_refused(text):
    with pytest.raises(SystemExit):
        drc.parse_levels(text, "text")


def off_targets(levels):
    return ((levels[..., 0] != 2) & (levels[..., 1] == 4)).sum((1, 2))


def test_generator_gives_what_its_kinds_promise():
    promised = {"generated": (4, 4, 12, 30), "medium-easy": (2, 3, 10, 30), "easy": (1, 2, 2, 8)}
    for kind, (least, most, fewest_pushes, most_pushes) in promised.items():
        levels, pushes = drc.generate_levels(kind, 3000, seed=0)
        counts = (np.array(pushes)[:, :, 0] < 64).sum(1)
        assert counts.min() == fewest_pushes and most_pushes - 2 <= counts.max() <= most_pushes
        drc.check_levels(levels, kind)
        assert len(set(drc.canonical_ids(levels).tolist())) == 3000  # all different, also when turned and mirrored
        assert off_targets(levels).min() == least and off_targets(levels).max() == most
        assert np.array_equal(levels, drc.generate_levels(kind, 3000, seed=0)[0])
        assert not np.array_equal(levels, drc.generate_levels(kind, 3000, seed=1)[0])


def test_generated_levels_are_about_as_hard_as_boxoban():
    def distances(levels):  # optimal assignment, counted from scratch
        boxes, targets = (np.argwhere(x)[:, 1:].reshape(-1, 4, 2) for x in (levels[..., 1] == 4, levels[..., 0] == 2))
        apart = abs(boxes[:, :, None] - targets[:, None]).sum(3)
        return [a[linear_sum_assignment(a)].sum() for a in apart]

    generated = np.percentile(distances(drc.generate_levels("generated", 5000, seed=3)[0]), [25, 50, 75])
    boxoban = np.percentile(distances(np.load(drc.EMBEDDED_TEST)), [25, 50, 75])
    assert list(boxoban) == [8, 10, 13]
    assert abs(generated[1] - 10) <= 2 and np.all(abs(generated - boxoban) <= 1)


@pytest.mark.parametrize("kind", ["generated", "medium-easy", "easy"])
def test_every_generated_level_is_solved_by_its_path_in_envpool(kind):
    levels, pushes = drc.generate_levels(kind, 100, seed=5)
    paths = [moves_of(*pair) for pair in zip(levels, pushes)]
    env = drc.Sokoban([levels], [drc.opening_seeds(100)], max_episode_steps=1000)
    assert np.array_equal(env.first[..., ::-1], levels)
    solved, over = np.zeros(100, bool), np.zeros(100, bool)
    for t in range(max(map(len, paths))):
        actions = np.array([path[t] if t < len(path) else 0 for path in paths])
        _, _, done, _, success = env.step(actions)
        solved |= success & ~over & (t < np.array([len(path) for path in paths]))
        over |= done
    assert solved.all()


def test_evaluation_levels_are_left_out_of_training_also_when_turned(monkeypatch, tmp_path):
    levels, _ = drc.generate_levels("easy", 50, seed=2 * list(drc.KINDS).index("easy"))  # the training set's first ones
    turned = np.rot90(levels, 1, (1, 2))
    training, _ = drc.load_levels("easy", exclude=turned)
    assert len(training) == 100_000
    assert not set(drc.canonical_ids(training).tolist()) & set(drc.canonical_ids(levels).tolist())
    np.save(tmp_path / "levels.npy", np.concatenate([levels, levels[:7]]))
    training, _ = drc.load_levels(str(tmp_path / "levels.npy"), exclude=levels[:20])
    assert np.array_equal(training, levels[20:])


def test_embedded_test_set_has_999_levels():
    assert len(drc.load_levels("boxoban-test")[0]) == 999


# ---- download
def archive(names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as z:
        for name, text in names.items():
            z.writestr(name, text)
    return data.getvalue()


class Response(io.BytesIO):
    headers = {}

    def geturl(self):
        return "https://example.org/archive.zip"


def serve(monkeypatch, tmp_path, data):
    monkeypatch.setattr(drc, "CACHE", tmp_path / "cache")  # not there yet
    monkeypatch.setattr(drc.urllib.request, "urlopen", lambda *a, **k: Response(data))


def test_download_takes_the_training_files_only_and_checks_them(monkeypatch, tmp_path):
    text = text_of(LEVEL)
    files = {"m/unfiltered/train/001.txt": text, "m/unfiltered/train/000.txt": text_of(LEVEL, LEVEL)}
    files |= {
        "m/unfiltered/test/000.txt": text,
        "../../evil/unfiltered/train/zzz.py": b"no",
        "m/medium/train/0.txt": b"x",
    }
    serve(monkeypatch, tmp_path, archive(files))
    assert drc.boxoban_train(offline=False) is None and not list(tmp_path.iterdir())  # another sha256: refused
    wanted = text_of(LEVEL, LEVEL) + text
    monkeypatch.setattr(drc, "TRAIN_SHA256", drc.hashlib.sha256(wanted).hexdigest()[:16])
    assert drc.boxoban_train(offline=False).read_bytes() == wanted
    monkeypatch.setattr(drc.urllib.request, "urlopen", None)
    assert drc.boxoban_train(offline=True).read_bytes() == wanted  # from the cache
    (tmp_path / "cache" / "unfiltered-train.txt").write_bytes(wanted[:-9])
    assert drc.boxoban_train(offline=True) is None  # damaged


@pytest.mark.parametrize("data", [b"", b"not a zip", archive({"m/readme.txt": "x"})])
def test_a_bad_download_falls_back_to_generated_levels_and_says_so(monkeypatch, tmp_path, capsys, data):
    serve(monkeypatch, tmp_path, data)
    generate = drc.generate_levels
    monkeypatch.setattr(drc, "generate_levels", lambda kind, count, *args: generate(kind, count // 200, *args))
    levels, facts = drc.load_levels("boxoban", exclude=np.load(drc.EMBEDDED_TEST))
    assert facts["name"] == "generated" and len(levels) == 500
    assert "GENERATED levels instead" in capsys.readouterr().out


def test_a_silent_network_costs_15_seconds_at_most(monkeypatch, tmp_path):
    monkeypatch.setattr(drc, "CACHE", tmp_path)
    monkeypatch.setattr(drc.urllib.request, "urlopen", lambda *a, **k: time.sleep(20))
    start = time.time()
    assert drc.boxoban_train(offline=False) is None
    assert time.time() - start < 15


# ---- environment
def test_environments_open_with_different_levels_of_the_wanted_file():
    levels, _ = drc.generate_levels("easy", 500, seed=9)
    env = drc.Sokoban(*drc.training_shards(levels, 32, [1, 0]))
    known = {level.tobytes() for level in levels}
    opened = {grid[..., ::-1].tobytes() for grid in env.first}
    assert opened <= known and len(opened) > 25
    other = drc.Sokoban(*drc.training_shards(levels, 32, [2, 0]))
    assert (env.first != other.first).any()


def test_a_file_that_envpool_does_not_serve_is_noticed(monkeypatch):
    levels, _ = drc.generate_levels("easy", 10, seed=9)
    real = drc.envpool.make
    monkeypatch.setattr(drc.envpool, "make", lambda *a, **k: real(*a, **{**k, "base_path": ""}))
    with pytest.raises(RuntimeError, match="does not serve"):
        drc.Sokoban([levels], [[1, 2, 3]])


def test_copies_of_a_large_set_stay_under_a_gigabyte_a_pool():
    levels = np.broadcast_to(np.zeros((1, 10, 10, 2), np.uint8), (900_000, 10, 10, 2))
    for num_envs in (4, 31, 32, 256):
        shards, seeds = drc.training_shards(levels, num_envs, [0])
        assert sum(len(shard) * len(s) * 228 for shard, s in zip(shards, seeds)) < 1e9
        assert sum(map(len, shards)) == 900_000 and len(np.unique(np.concatenate(seeds))) == num_envs


def test_solved_on_the_last_step_is_no_timeout():
    """Wait by walking into a wall until the solution's moves end exactly at step 120."""
    levels, pushes = drc.generate_levels("easy", 60, seed=4)
    paths = [moves_of(*pair) for pair in zip(levels, pushes)]
    players = np.argwhere(levels[..., 1] == 3)[:, 1:]
    fixed = levels[..., 0]
    waits = {}  # level -> action that walks into a wall
    for k, (row, col) in enumerate(players):
        for action, (i, j) in enumerate(((-1, 0), (0, 1), (1, 0), (0, -1))):
            if fixed[k, row + i, col + j] == 1:
                waits[k] = action
    env = drc.Sokoban([levels], [drc.opening_seeds(60)])
    early = np.zeros(60, bool)
    for t in range(120):
        moves = np.array([[waits.get(k, 0)] * (120 - len(path)) + list(path) for k, path in enumerate(paths)])[:, t]
        _, _, done, timeout, solved = env.step(moves)
        early |= done if t < 119 else False
    on_time = np.array([k in waits for k in range(60)]) & ~early
    assert on_time.sum() > 20 and done[on_time].all() and solved[on_time].all() and not timeout[on_time].any()
    others = ~on_time & ~early
    assert np.array_equal(timeout[others], ~solved[others])
