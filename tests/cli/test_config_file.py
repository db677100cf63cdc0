"""``tfdist train --config FILE`` and ``--print-config``: in this process, without a training."""

from __future__ import annotations

import pytest
import yaml

from tfdist.cli import train


@pytest.fixture
def asked(tfdist, monkeypatch, shards, model_file, tmp_path):
    """Returns what a training would have been asked for: (its configuration, how it is started)."""
    taken = []
    monkeypatch.setattr(
        train,
        "carry_out",
        lambda config, where, progress, start, **_: taken.append((config, start)),
    )
    base = {"model": f"{model_file}:mlp", "data": str(shards), "output": "run"}

    def run(of_file, *args):
        text = of_file if isinstance(of_file, str) else yaml.safe_dump(base | of_file)
        (tmp_path / "run.yaml").write_text(text)
        taken.clear()
        code, _, complaint = tfdist("train", "--config", "run.yaml", *args)
        return taken[0] if code == 0 else complaint

    return run


def test_options_of_the_file_and_flags_that_win(asked):
    config, start = asked(
        {
            "strategy": "mirrored",
            "option": {"devices": 2, "accumulate_steps": 2},
            "epochs": 7,
            "seed": 3,
            "lr": 1e-5,
            "augment": ["flip", "crop"],
            "pad-to": None,
            "class-weight": {0: 1.0, 1: 1.0, 2: 2.5},
            "early-stopping": "val_loss,patience=3",
            "stop-on-nan": False,
            "resume": True,
            "keep": None,
        },
        *("--epochs", "9", "-o", "devices=3", "--stop-on-nan"),
    )
    assert config["strategy"] == "mirrored"
    assert config["options"] == {"devices": 3, "accumulate_steps": 2}
    assert (config["epochs"], config["seed"], config["lr"], config["keep"]) == (9, 3, 1e-5, 3)
    assert config["augment"] == "flip,crop"
    assert config["class_weight"] == {"0": 1.0, "1": 1.0, "2": 2.5}
    assert config["early_stopping"] == {"monitor": "val_loss", "patience": 3, "mode": "min"}
    assert config["stop_on_nan"]
    assert start.resume


def test_what_is_printed_is_what_is_taken(tfdist, asked, tmp_path):
    asked_for = ("--strategy", "mirrored", "-o", "devices=2", "--pad-to", "8", "--keep", "5")
    code, printed, _ = tfdist("train", *asked_for, "--print-config")  # Without a model or data.
    assert code == 0
    (tmp_path / "all.yaml").write_text(printed)
    assert tfdist("train", "--config", "all.yaml", "--print-config")[1] == printed
    _, changed, _ = tfdist("train", "--config", "all.yaml", "-o", "devices=3", "--print-config")
    assert yaml.safe_load(changed) == yaml.safe_load(printed) | {"option": ["devices=3"]}
    # Every option is there; nothing stays optional that must be given.
    taken = {param.name for param in train.command.params if param.expose_value} - {"print_config"}
    assert len(yaml.safe_load(printed)) == len(taken)
    assert "Missing option '--model'" in tfdist("train", "--config", "all.yaml")[2]


@pytest.mark.parametrize(
    ("of_file", "words"),
    [
        ({"epoch": 3}, "option in run.yaml must be a known one, but found 'epoch'. Did you mean"),
        ({"config": "other.yaml"}, "must be a known one, but found 'config'"),
        ({"epochs": 2.5}, "Invalid value for '--epochs': '2.5' is not a valid integer"),
        ({"epochs": True}, "epochs in run.yaml must be a text or a number, but found true"),
        ({"resume": "yes please"}, "resume in run.yaml must be true or false"),
        ({"option": "devices=2"}, "option in run.yaml must be a list, or pairs of keys and values"),
        ("epochs: 3\nepochs: 4\n", "must hold options in YAML, but found an error: 'epochs' twice"),
        ("epochs: [3\n", "must hold options in YAML, but found an error"),
        ("- epochs\n", "must hold options in YAML, but found a list"),
        ("[" * 100_000, "must hold options in YAML, but found an error"),
        ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, but found -1"),
        ({"global-batch-size": 10**30}, "must be at most 2147483647, but found 1e+30"),
        ({"stall-timeout": "nan"}, "'nan' is not a number of seconds"),
        ({"tensorboard": "/proc/here"}, "tensorboard must be a folder that can be written"),
        ({"profile": __file__}, "profile must be a folder that can be written"),
        ("!!python/object/apply:os.getcwd []\n", "must hold options in YAML, but found an error"),
    ],
)
def test_what_cannot_be_is_one_line(asked, of_file, words):
    complaint = asked(of_file)
    assert words in complaint
    assert complaint.count("\n") == 1


def test_an_option_that_yaml_takes_for_true(tfdist, tmp_path):
    (tmp_path / "tune.yaml").write_text("on: ray\n")
    code, out, _ = tfdist("tune", "--config", "tune.yaml", "--print-config")
    assert code == 0
    assert yaml.safe_load(out)["on"] == "ray"


def test_a_file_that_is_not_there(tfdist):
    code, _, complaint = tfdist("train", "--config", "nowhere.yaml")
    assert (code, "nowhere.yaml" in complaint) == (2, True)
