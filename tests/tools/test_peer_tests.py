"""The tool that runs other trainers' own tests: what it compares, counts and reports."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import peer_tests
from peer_plugin import PLAIN, USUAL, Missing, Settings
from peer_stand_ins import OTHERS, REVISION, ShareRight, _split, _trl_tables
from peer_tests import BEGIN, END, FAILED, PASSED, PEERS, Run, Runner, compare
from technique_counts import COUNTED, PARTS, Part, counted

ROOT = Path(__file__).parents[2]
MADE_UP = '''
"""Two tests as a peer has them; the second one's package lacks a name."""
import sys

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM
from transformers import Trainer, TrainingArguments
from transformers.testing_utils import require_what_is_gone


class Filler:
    padding_side = "right"
    pad_token_id = 0

    def save_pretrained(self, folder):
        pass

    def pad(self, examples, **settings):
        longest = max(len(example["input_ids"]) for example in examples)
        rows = [list(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
        return {"input_ids": torch.tensor(rows)}


def test_training_lowers_the_loss(tmp_path):
    if "hasten" in sys.modules:
        from hasten.parts.kernels import registry

        registry.assume_verified("cpu")  # kernels are tried and timed for seconds otherwise
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16,
                                         num_hidden_layers=1, num_attention_heads=2))
    rows = [{"input_ids": list(range(3, 6 + i)), "labels": list(range(3, 6 + i))}
            for i in range(8)]
    arguments = TrainingArguments(str(tmp_path), max_steps=4, learning_rate=0.05, logging_steps=1,
                                  report_to=[], per_device_train_batch_size=4, use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows,
                      data_collator=DataCollatorForSeq2Seq(Filler()))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]


@require_what_is_gone
def test_of_what_is_gone():
    raise AssertionError("it ran")
'''


def checkout_of(folder: Path) -> Path:
    tests = folder / "tests" / "trainer"
    tests.mkdir(parents=True)
    (tests / "test_trainer.py").write_text(MADE_UP)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "tests"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.mark.long  # it starts two Pythons with torch; what it counts is tested below
@pytest.mark.slow
def test_a_made_up_checkout_runs_plainly_and_with_techniques(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\nold\n{END}\n\nmore\n")
    checkout, output = checkout_of(tmp_path / "peer"), tmp_path / "output"
    for name in OTHERS:  # stand-ins that are there aren't built again, and this test needs none
        reference = output / "hub" / "hub" / f"models--{name.replace('/', '--')}" / "refs" / "main"
        reference.parent.mkdir(parents=True)
        reference.write_text(REVISION)
    (output / "home").mkdir()
    (output / "home" / ".cache").symlink_to(Path.home() / ".cache")  # kernels are compiled there
    arguments = ["--transformers", str(checkout), "-o", str(output), "--page", str(page)]
    assert peer_tests.main(arguments) == 0
    commit = peer_tests.commit_of(checkout)
    printed = capsys.readouterr().out
    assert f"transformers: tests of {commit}, package " in printed
    (row,) = json.loads((output / "results.json").read_text())
    assert (row["tests"], row["plain"], row["passed"]) == (2, 1, 1)
    assert (row["trained"], row["causal"]) == (1, 1)
    assert row["effective"]["fused_adamw"] == 1
    assert f"| {commit} | usual | 1 of 2 | 1 | 1 of 1 |" in page.read_text()
    assert page.read_text().endswith(f"{END}\n\nmore\n")
    assert "old" not in page.read_text()


class Scripted(Runner):
    """Returns outcomes of a list in place of running anything."""

    def __init__(self, runs: Sequence[dict[str, str]]) -> None:
        self._runs = iter(runs)
        self.asked: list[tuple[str, str, list[str]]] = []

    def run(self, mode: str, name: str, tests: Sequence[str] = ()) -> Run:
        self.asked.append((mode, name, list(tests)))
        outcomes = next(self._runs)
        run = Run({test: (word, f"why {test}") for test, word in outcomes.items()})
        run.entries = {test: {"test": f"file.py::{test}"} for test in outcomes}
        return run


def test_a_failure_that_comes_back_is_caused_and_one_that_does_not_is_unsteady() -> None:
    plain = Run(dict.fromkeys(("lost", "shaky", "moody", "good"), (PASSED, "")))
    plain.outcomes["broken"] = (FAILED, "")
    runner = Scripted(
        [
            {"lost": FAILED, "shaky": FAILED, "moody": FAILED, "good": PASSED, "broken": FAILED},
            {"lost": PASSED, "shaky": FAILED, "moody": PASSED},
            {"lost": FAILED, "shaky": FAILED, "moody": PASSED},
        ]
    )
    _, failures, unsteady = compare(runner, USUAL, plain, USUAL)
    assert failures == {"lost": "why lost"}
    assert unsteady == ["moody", "shaky"]
    again = ["file.py::lost", "file.py::moody", "file.py::shaky"]
    assert runner.asked == [
        (USUAL, "usual", []),
        (PLAIN, "usual-again-plain", again),
        (USUAL, "usual-again", again),
    ]


def test_losses_that_differ_in_tests_that_pass_are_named() -> None:
    plain = {"same": [[1.0, 2.0]], "other": [[1.0], [2.0, 3.0]], "shorter": [[1.0, 2.0]]}
    found = {"same": [[1.0001, 2.0]], "other": [[1.0], [2.5, 3.0]], "shorter": [[1.0]]}
    runs = []
    for losses in (plain, found):
        run = Run(dict.fromkeys(losses, (PASSED, "")))
        run.entries = {test: {"losses": values} for test, values in losses.items()}
        runs.append(run)
    assert peer_tests.other_losses(*runs) == {
        "other": "1 of 3, 2.5 for 2",
        "shorter": "1 of 2, nan for 2",
    }


def test_a_test_that_never_ended_with_techniques_is_a_failure() -> None:
    plain = Run({"hangs": (PASSED, "")})
    _, failures, _ = compare(Scripted([{}, {"hangs": PASSED}, {}]), USUAL, plain, USUAL)
    assert failures == {"hangs": "it didn't run to its end"}


def test_the_exit_code_says_whether_a_test_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows_of(peer: Any, checkout: Path, options: argparse.Namespace) -> list[peer_tests.Row]:
        counts = (2, 2, 1, 2, 1, {"packed": 1}, 0)
        lost: tuple[Any, ...] = ({"x::y": "an error"}, ["z"], {"w": "1 of 2, 3 for 4"})
        return [peer_tests.Row("trl", "1.0", "abc", USUAL, *counts, *lost)]

    monkeypatch.setattr(peer_tests, "rows_of", rows_of)
    earlier = peer_tests.Row("lightning", "2.0", "def", USUAL, 9, 8, 8, 0, 0, {}, 0, {}, [], {})
    peer_tests.save_results(tmp_path, [earlier])
    assert peer_tests.main(["--trl", str(tmp_path), "-o", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED trl usual: x::y: an error" in printed
    assert "UNSTEADY trl usual: z" in printed
    assert "LOSS trl usual: w: 1 of 2, 3 for 4" in printed
    assert "| trl 1.0 | abc | usual | 2 of 2 | 1 | 1 of 2 | 0 | packed 1 |" in printed
    assert "| lightning 2.0 | def | usual | 8 of 9 | 8 | 0 of 0 | 0 | none |" in printed
    assert peer_tests.main(["--trl", str(tmp_path), "-o", str(tmp_path)]) == 1
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give at least one checkout"),
        (["--trl", "nowhere"], "nowhere has no tests/test_sft_trainer.py"),
        (["--trl", "nowhere", "--python", "no-such-python"], "no-such-python has no trl"),
    ],
)
def test_what_can_not_be_run_ends_with_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--python" not in arguments:
        monkeypatch.setattr(peer_tests, "installed_version", lambda python, package: "1.0")
    assert peer_tests.main([*arguments, "-o", str(tmp_path / "output")]) == 2
    assert words in capsys.readouterr().err


def test_help_names_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peer_tests.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{peer.package} DIR" in printed for peer in PEERS)


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(ValueError, match="has no lines"):
        peer_tests.write_between_marks(tmp_path / "page.md", "table")


def test_every_counted_part_is_where_the_table_says() -> None:
    import transformers

    usual = transformers.PreTrainedModel.__call__
    with counted():
        assert transformers.PreTrainedModel.__call__ is not usual
    assert transformers.PreTrainedModel.__call__ is usual
    assert "__call__" not in vars(transformers.PreTrainedModel)
    assert set(COUNTED) == {part.technique for part in PARTS}


def test_a_part_that_moved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    import technique_counts

    usual = transformers.PreTrainedModel.__call__
    gone = (*PARTS, Part("packed", "hasten.parts.data.collate:no_such_part"))
    monkeypatch.setattr(technique_counts, "PARTS", gone)
    with pytest.raises(AttributeError, match="no_such_part"), counted():
        pass
    assert transformers.PreTrainedModel.__call__ is usual


def test_nothing_is_counted_while_counting_is_paused() -> None:
    import torch

    from hasten.parts.nn.fused_functions import swiglu

    x = torch.ones(2, 8, requires_grad=True)
    with counted() as counts:
        with counts.paused():
            swiglu(x, x)
        assert counts.effective() == {}
        swiglu(x, x)
        assert counts.effective() == {"fused_layers": 1}


def test_a_missing_name_skips_what_it_decorates_and_fails_elsewhere() -> None:
    def a_test() -> None: ...

    marked = Missing("package.require_gpu")(a_test)
    assert [mark.name for mark in marked.pytestmark] == ["skip"]
    assert Missing("package.is_there")() is False
    with pytest.raises(AttributeError, match=r"package\.Thing isn't in the installed version"):
        Missing("package.Thing")(1, 2)


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings("trl", "packed,muon", "records", "hub", "")
    settings.save(tmp_path / "settings.json")
    assert Settings.read(str(tmp_path / "settings.json")) == settings


def test_tables_of_trl_are_read_without_running_its_code(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "generate_zen_dataset.py").write_text(
        "raise SystemExit\n"
        "def main():\n"
        '    standard_dataset = Dataset.from_dict({"text": ["a", "b"]})\n'
        "    other_dataset = Dataset.from_dict(computed())\n"
    )
    assert _trl_tables(tmp_path, "zen") == {"standard": {"text": ["a", "b"]}}


def test_the_metric_is_the_share_that_is_right() -> None:
    metric = ShareRight()
    metric.add_batch([1, 0], [1, 1])
    assert metric.compute([1, 1], [1, 1])["accuracy"] == 0.75
    assert metric.compute()["accuracy"] == 0.0


def test_a_split_is_cut_as_its_name_says() -> None:
    class Rows(list[int]):
        def select(self, positions: range) -> list[int]:
            return [self[i] for i in positions]

    parts = {"train": Rows(range(20)), "test": Rows(range(5))}
    assert _split(None, parts, "train[:3]", False) == [0, 1, 2]
    assert _split(None, parts, "train[:10%]", False) == [0, 1]
    assert _split(None, parts, "test", False) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="isn't of a form"):
        _split(None, parts, "train[5:]", False)


def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    script = ROOT / "tools" / "peer_tests.py"
    command = [sys.executable, str(script), "--help"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert "Exit codes" in answer.stdout
