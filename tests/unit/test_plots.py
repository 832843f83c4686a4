"""The learning curve and its intervals."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.run.plots import _draw_evaluations, _draw_success, learning_curve, smooth

METRICS = [{"step": step, "success/mean": step / 40, "turns/mean": 1 + step / 20} for step in range(1, 31)]
EVALUATIONS = [{"step": 0, "success": 0.0, "episodes": 50}, {"step": 30, "success": 1.0, "episodes": 50}]
STAGES = [
    {"env": "babyai", "turns": 2, "first_step": 1, "last_step": 10},
    {"env": "babyai", "turns": 4, "first_step": 11, "last_step": 30},
]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe (1998), table I, method 3 for the first three; the last two from the closed form at 0 and n.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
        (0, 20, 0.0, 0.1611),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_interval_against_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_symmetric_and_narrows() -> None:
    low, high = wilson_interval(3, 10)
    mirrored_low, mirrored_high = wilson_interval(7, 10)
    assert (low, high) == pytest.approx((1 - mirrored_high, 1 - mirrored_low))
    wider, narrower = wilson_interval(30, 100), wilson_interval(300, 1000)
    assert high - low > wider[1] - wider[0] > narrower[1] - narrower[0]


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses_invalid_proportions(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
        wilson_interval(successes, n)


def test_smoothing_keeps_constants_and_reduces_noise() -> None:
    assert smooth([0.5] * 7, width=2.0) == pytest.approx([0.5] * 7)
    spike = smooth([0.0] * 10 + [1.0] + [0.0] * 10, width=2.0)
    assert sum(spike) == pytest.approx(1.0, abs=1e-2)
    assert max(spike) == spike[10] == pytest.approx(0.2, abs=0.01)
    assert smooth([], width=2.0) == []


def size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return struct.unpack(">II", header[16:24])


@pytest.mark.parametrize(
    ("metrics", "evaluations", "stages"),
    [
        (METRICS, EVALUATIONS, STAGES),
        ([], [], []),
        (METRICS[:1], EVALUATIONS[:1], STAGES[:1]),
        ([*METRICS, {"step": 31, "success/mean": None}], [{"step": 5, "success": 0.0, "episodes": 0}], []),
        (METRICS, EVALUATIONS, [*STAGES, {"env": "textcraft", "turns": 10, "first_step": 1, "last_step": 30}]),
    ],
    ids=["whole", "empty", "one step", "gaps", "two environments"],
)
def test_a_curve_is_drawn_from_complete_and_incomplete_data(
    tmp_path: Path, metrics: list[dict], evaluations: list[dict], stages: list[dict]
) -> None:
    learning_curve(metrics, evaluations, stages, tmp_path / "curve.png", "A run")
    assert size(tmp_path / "curve.png") == (1536, 864)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_every_argument_changes_the_picture(tmp_path: Path) -> None:
    def draw(*arguments: list) -> bytes:
        learning_curve(*arguments, tmp_path / "curve.png", "A run")
        return (tmp_path / "curve.png").read_bytes()

    complete = draw(METRICS, EVALUATIONS, STAGES)
    assert complete == draw(METRICS, EVALUATIONS, STAGES)
    assert (
        len({complete, draw([], EVALUATIONS, STAGES), draw(METRICS, [], STAGES), draw(METRICS, EVALUATIONS, [])}) == 4
    )


@pytest.mark.parametrize("first", [0.0, 0.2, 0.5, 0.99])
def test_the_label_of_an_evaluation_does_not_cover_the_curve(first: float) -> None:
    rates = [min(1.0, first + 0.08 + 0.004 * step) for step in range(100)]  # starts just above the first interval
    figure = Figure(figsize=(9.6, 4), dpi=160)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(-1, 101)
    success = (list(range(1, 101)), rates)
    _draw_success(axes, success)
    held_out = [{"step": 0, "success": first, "episodes": 250}, {"step": 100, "success": rates[-1], "episodes": 250}]
    _draw_evaluations(axes, held_out, success)
    canvas.draw()
    label, curve = axes.texts[0], axes.lines[1]
    box = label.get_window_extent()
    points = axes.transData.transform(list(zip(*curve.get_data(), strict=True)))
    assert label.get_text() == f"{100 * first:.0f}%"
    assert not [point for point in points if box.contains(*point)]
    drawn = axes.get_window_extent()
    assert drawn.y0 <= box.y0
    assert box.y1 <= drawn.y1


def test_drawing_leaves_no_global_figure_open(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from agentgym_rl.run.plots import learning_curve; "
        "learning_curve([], [], [], Path(sys.argv[1]), 'x'); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "curve.png")]).returncode == 0
