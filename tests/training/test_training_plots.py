"""The plots of a training, from a history whose every figure is known."""

from __future__ import annotations

from pathlib import Path

from drawn import labels, legend, lines

from hf_spec.training.plots import draw_history, plot_history

HISTORY = [
    {"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0},
    {"step": 20, "eval_loss": 2.5, "eval_tau": 1.5}, {"step": 30, "loss": 1.5},
    {"step": 40, "eval_loss": 2.25, "eval_tau": 1.75},
]  # fmt: skip


def test_loss_and_tau_by_step() -> None:
    loss, tau = (figure.get_axes()[0] for figure in draw_history(HISTORY).values())
    assert labels(loss) == ("", "step", "loss (nats)")
    assert lines(loss) == {
        "training": [(10, 3.0), (20, 2.0), (30, 1.5)], "held-out answers": [(20, 2.5), (40, 2.25)],
    }  # fmt: skip
    assert legend(loss) == ["training", "held-out answers"]
    assert labels(tau) == ("", "step", "tau (tokens per forward pass)")
    assert lines(tau) == {"held-out prompts, decoded": [(20, 1.5), (40, 1.75)]}


def test_a_training_without_evaluations_can_be_drawn() -> None:
    loss, tau = (figure.get_axes()[0] for figure in draw_history(HISTORY[:2]).values())
    assert lines(loss)["held-out answers"] == [] and legend(loss)[0] == "training"
    assert lines(tau) == {"held-out prompts, decoded": []}


def test_both_files_are_written(tmp_path: Path) -> None:
    plot_history(HISTORY, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "tau.png"]
