import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# a cache of its own, before any script is imported: no test may read or write the user's
os.environ["BOXOBAN_CACHE"] = tempfile.mkdtemp(prefix="boxoban-test-")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny agents: threads only wait for each other

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import sokoban_drc_ppo as drc  # noqa: E402
import sokoban_ff_ppo as ff  # noqa: E402, F401

torch.set_num_threads(1)


# torch.compile writes C++ on a CPU
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def moves_of(level, pushes):
    """The moves of a generated level's solution: the player's shortest walks (breadth first) between its pushes."""
    steps = ((-1, 0), (0, 1), (1, 0), (0, -1))
    walls = {tuple(square) for square in np.argwhere(level[..., 0] == 1)}
    boxes = {tuple(square) for square in np.argwhere(level[..., 1] == 4)}
    (player,) = (tuple(square) for square in np.argwhere(level[..., 1] == 3))
    moves = []
    for bit, move in pushes[pushes[:, 0] < 64].tolist():
        box, (down, right) = (bit // 8 + 1, bit % 8 + 1), steps[move]
        behind, ways = (box[0] - down, box[1] - right), {player: []}
        for square in (queue := [player]):
            for m, (i, j) in enumerate(steps):
                to = (square[0] + i, square[1] + j)
                if to not in walls | boxes | ways.keys():
                    ways[to] = ways[square] + [m]
                    queue.append(to)
        moves += ways[behind] + [move]
        boxes = boxes - {box} | {(box[0] + down, box[1] + right)}
        player = box
    return moves


def run_script(*arguments, script="sokoban_drc_ppo.py", cwd=ROOT, check=True, **kwargs):
    """Run a script in a process of its own -> CompletedProcess with its output as text."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **kwargs)
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def run_here(*arguments, script="sokoban_drc_ppo.py"):
    """Run a script's main part in this process, which saves the seconds that imports take -> exit status."""
    argv, handlers = sys.argv, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    sys.argv = [script, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.argv = argv
        torch.set_num_threads(1)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return 0


@pytest.fixture(scope="session")
def level_files(tmp_path_factory):
    """Folder with train.npy (64 easy levels) and eval.npy (6 others)."""
    folder = tmp_path_factory.mktemp("levels")
    np.save(folder / "train.npy", drc.generate_levels("easy", 64, seed=101)[0])
    np.save(folder / "eval.npy", drc.generate_levels("easy", 6, seed=102)[0])
    return folder


@pytest.fixture
def tiny(level_files):
    """Arguments of the smallest useful training: 8 environments x 5 steps, one level of width 4."""
    shape = ["--layers", 1, "--width", 4, "--num-envs", 8, "--num-steps", 5, "--log-every", 1]
    return ["--levels", level_files / "train.npy", "--eval-levels", level_files / "eval.npy", *shape]
