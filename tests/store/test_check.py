"""``engine verify``: the states against a lone forward of a tiny real target, ids against the dataset."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.__main__ import main
from engine.dataset.rows import RowFile
from engine.dataset.tokens import Tokens
from engine.run.check import lowest, verify
from engine.store.identity import build_manifest, claim
from engine.store.normfile import write_norm
from engine.store.records import Record
from engine.store.store import Store
from engine.targets.lone import LoneForward
from engine.targets.lowest import LowestLayers, final_norm, target_facts
from engine.wire.errors import DatasetError
from engine.wire.ids import rid
from tests.models import tiny_with_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAPS = (1, 3)
ROWS = [
    {"input_ids": [5, 6, 7, 8]},
    {"prompt": "Which way?", "completion": "Up."},
    {"input_ids": [900, 17, 4]},
]

Spoil = dict[int, "Callable[[dict[str, torch.Tensor]], object]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def make(tmp_path: Path, model: Path, dataset: Path) -> Callable[..., Path]:
    """A store of all rows, right but for what ``spoil`` does to the tensors of some."""

    def build(spoil: Spoil, last: str = "post") -> Path:
        store, file, tokens = tmp_path / "s", RowFile(dataset), Tokens(str(model))
        facts, lone = target_facts(str(model)), LoneForward(str(model))
        claim(
            store,
            build_manifest(
                target={
                    "model": str(model),
                    "num_layers": facts.num_layers,
                    "hidden_size": facts.hidden_size,
                },
                taps=TAPS,
                last=last,
                dtype="float32",
                attribution="rid",
                dataset={"sha256": file.sha256, "first": 0, "rows": len(file), "order": "file"},
                tokenizer_sha256=tokens.sha256,
                chat_template={"sha256": tokens.template_sha256, "thinking": False},
            ),
        )
        writer = Store(store)
        for row in range(len(file)):
            sample = tokens.sample(file.read(row))
            states = lone.states(sample.input_ids)
            tensors = {
                "input_ids": torch.tensor(sample.input_ids),
                "loss_mask": torch.tensor(sample.loss_mask, dtype=torch.uint8),
                "taps": torch.stack([states[tap + 1] for tap in TAPS], 1).contiguous(),
                "last": states[-1].clone(),
            }
            spoil.get(row, len)(tensors)
            writer.add(Record(row, rid("r", row, 1), 1, tensors, {}, {}))
        writer.commit()
        return store

    return build


def test_right_states_pass_and_need_no_norm(make: Callable[..., Path]) -> None:
    report, verified = verify(make({}), recompute=0)
    assert (report.done, report.bad) == (3, [])
    assert verified is not None
    assert verified["samples"] == 3
    assert verified["min_cosine"] == min(verified["per_tap"].values()) > 0.9999
    assert set(verified["per_tap"]) == {"tap 1", "tap 3", "last (post)"}


def test_a_row_with_several_wrong_tensors_is_one_bad_row(make: Callable[..., Path]) -> None:
    def swap(t: dict[str, torch.Tensor]) -> None:
        t["taps"] = t["taps"].flip(1).contiguous()
        t["last"] = -t["last"]  # cosine -1: the worst

    report, verified = verify(make({1: swap}), recompute=0)
    assert (report.done, report.pending, len(report.bad)) == (2, 1, 1)
    assert report.bad[0][0] == 1
    assert report.bad[0][1].startswith("last (post) differs from a lone forward: cosine -1.0")
    assert verified is not None
    assert verified["min_cosine"] == pytest.approx(-1)


def test_a_cosine_that_is_no_number_is_bad(
    make: Callable[..., Path], model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = make({}, "pre")
    norm = final_norm(LowestLayers(str(model), 0))
    write_norm(store, norm.weight * math.nan, norm.eps, norm.flavour)
    report, verified = verify(store, recompute=0)
    assert (report.done, [row for row, _ in report.bad]) == (0, [0, 1, 2])
    assert all("last (pre)" in why and "nan" in why for _, why in report.bad)
    assert verified is not None
    assert (verified["min_cosine"], verified["per_tap"]["last (pre)"]) == ("nan", "nan")
    capfd.readouterr()
    assert main(["verify", str(store), "--recompute", "--json"]) == 1
    shown = json.loads(capfd.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert shown["verified"]["min_cosine"] == "nan"


def test_nan_is_the_lowest_wherever_it_stands() -> None:
    for names in ("abc", "cab", "bca"):
        values: dict[str, Any] = {n: {"a": 1.0, "b": math.nan, "c": -1.0}[n] for n in names}
        assert lowest(values)[0] == "b"


def test_the_dataset_is_compared_when_it_is_given(make: Callable[..., Path], dataset: Path) -> None:
    def other_ids(t: dict[str, torch.Tensor]) -> None:
        t["input_ids"][2] += 1

    store = make({2: other_ids})
    assert main(["verify", str(store)]) == 0
    assert main(["verify", str(store), "--dataset", str(dataset)]) == 1
    assert verify(store, dataset=dataset)[0].bad == [(2, "its token ids differ from the dataset's")]


def test_another_dataset_is_refused(
    make: Callable[..., Path], dataset: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = make({})
    assert verify(store, dataset=dataset)[0].bad == []
    dataset.write_bytes(dataset.read_bytes() + b'{"input_ids": [1]}\n')
    with pytest.raises(DatasetError, match="not the dataset of this store"):
        verify(store, dataset=dataset)
    assert main(["verify", str(store), "--dataset", str(dataset)]) == 2
    assert "give the file that the run read" in capfd.readouterr().err.lower()


def test_a_model_that_tokenises_otherwise_now_is_refused(
    make: Callable[..., Path], dataset: Path, model: Path, tmp_path: Path
) -> None:
    store = make({})
    changed = shutil.copytree(model, tmp_path / "changed")
    file = changed / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")
    manifest = json.loads((store / "manifest.json").read_bytes())
    manifest["target"]["model"] = str(changed)
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DatasetError, match="tokenises otherwise"):
        verify(store, dataset=dataset)
