"""config.toml: what is valid, and for each kind of mistake the sentence with file, line, key and way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.wire.errors import UsageError
from engine.wire.spec import extract_from_json
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.launch import extract_launch
from hsx_tui.config import MAX_BYTES, Configured, load, parse
from hsx_tui.config_lines import line_of

ROOT = Path(__file__).parents[2]

GOOD = """\
[console]
read_only = false
[hosts.gpu-1]
address = "192.0.2.1"
workdir = "/data"
[servers.kimi]
host = "gpu-1"
url = "http://127.0.0.1:30000"
dump_dir = "/dev/shm/x"
[targets.kimi]
model = "/models/k"
taps = [1, 29, 57]
[datasets.chat]
path = "chat.jsonl"
[runs.first]
dataset = "chat"
store = "stores/first"
[scores.any]
whatever = { is = ["kept", 1] }
"""


def said(text: str, path: Path = Path("c.toml")) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_good_one_is_read_with_its_defaults() -> None:
    config = parse(GOOD, Path("c.toml"))
    assert (config.hosts["gpu-1"].port, config.hosts["gpu-1"].user) == (22, None)
    assert config.server_of("first") == config.target_of("first") == "kimi"
    assert config.scores["any"] == {"whatever": {"is": ["kept", 1]}}


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("address =", "addr =", 4, ["hosts.gpu-1.addr: unknown key", "Did you mean address?"]),
        ("read_only", "readonly", 2, ["console.readonly: unknown key", "Did you mean read_only?"]),
        ("[servers.kimi]", "[server.kimi]", 6, ["server: unknown key", "Did you mean servers?"]),
        ("[1, 29, 57]", '[1, "29", 57]', 12, ["targets.kimi.taps.1: '29' is not valid", "whole number"]),
        ("[1, 29, 57]", "[29, 1]", 10, ["targets.kimi: taps are [29, 1]", "ascending"]),
        ("[1, 29, 57]", "[1]\nlast = 'after'", 13, ["'after' is not valid", "'pre', 'post' or 'none'"]),
        ('"192.0.2.1"', '"x"\nport = "22"', 5, ["hosts.gpu-1.port: '22' is not valid", "whole number"]),
        ('"192.0.2.1"', '"x"\nport = 70000', 5, ["hosts.gpu-1.port: 70000 is not valid", "65535"]),
        ('"/data"', '"data"', 5, ["hosts.gpu-1.workdir", "an absolute path on the host"]),
        ('host = "gpu-1"', 'host = "gpu1"', 7, ["servers.kimi.host: there is no host 'gpu1'", "mean gpu-1?"]),
        ('dataset = "chat"', 'dataset = "chats"', 16, ["there is no dataset 'chats'", "Did you mean chat?"]),
        ('dataset = "chat"', 'dataset = "chat"\nserver = "kimmi"', 17, ["no server 'kimmi'", "mean kimi?"]),
        ('dataset = "chat"\n', "", 15, ["runs.first.dataset: this key is missing"]),
        ("[runs.first]", "[runs.First_1]", 15, ["runs.First_1", "1 to 40 of a-z, 0-9 and '-'"]),
        ('"/dev/shm/x"', '"/x"\nlaunch = "sh -c x"', 10, ["servers.kimi.launch: 'sh -c x'", "an array"]),
        ('"/dev/shm/x"', '"/x"\nlaunch = ["a"]\nunit = "b"', 6, ["launch and unit exclude each other"]),
        ("http://", "ftp://", 8, ["servers.kimi.url", "begins with http:// or https://"]),
        ('store = "stores/first"', "store = ", 17, ["this is not TOML", "line 17", "Correct that line"]),
        ('store = "stores/first"', 'store = "s"\nrows = [4, 4]', 18, ["rows are [first, last)", "[4, 4]"]),
        ("[datasets.chat]", "[targets.b]\nmodel='b'\ntaps=[0]\n[datasets.chat]", 18, ["which target?"]),
    ],
)
def test_a_mistake_is_named_with_its_line_and_the_way_out(
    old: str, new: str, line: int, parts: list[str]
) -> None:
    assert GOOD.count(old) == 1
    sentence = said(GOOD.replace(old, new))
    assert sentence.startswith(f"c.toml:{line}: ")
    assert [part for part in parts if part not in sentence] == []


def test_several_mistakes_are_counted() -> None:
    assert "(and 1 more in this file)" in said(GOOD.replace("model", "models"))


def test_a_secret_in_the_place_of_its_name_is_not_repeated() -> None:
    sentence = said(GOOD.replace("dump_dir", 'api_key_env = "sk-123"\ndump_dir'))
    assert "the name of an environment variable" in sentence
    assert "sk-123" not in sentence


def test_a_key_inside_a_text_is_not_taken_for_the_key() -> None:
    text = '[a]\nx = """\n[b]\ny = 1\n"""\n[b]\ny = 2\n"z w".q = 3\n'
    assert [line_of(text, path) for path in (["b", "y"], ["b"], ["b", "z w", "q"], ["c"])] == [7, 6, 8, None]


def test_escapes_in_the_file_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in said('"\\u001b[2J" = 1\n')


def test_taps_given_as_inputs_become_outputs() -> None:
    config = parse(GOOD.replace("[1, 29, 57]", '[2, 30, 58]\nlayer_ids_convention = "input"'), Path("c"))
    assert config.targets["kimi"].output_taps == (1, 29, 57)
    assert "begin at 1" in said(GOOD.replace("[1, 29, 57]", '[0, 3]\nlayer_ids_convention = "input"'))


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ("", None),
        ("[console]\nread_only = true", "[console] read_only is true"),
        ("production = true", "h is tagged production"),
        ("production = true\nread_only = false", None),
        ("read_only = true", "[hosts.h] read_only is true"),
        ("read_only = false\n[console]\nread_only = true", None),
    ],
)
def test_the_host_says_more_than_the_console_and_production_is_read_only(
    tables: str, why: str | None
) -> None:
    text = '[hosts.h]\naddress = "x"\n' + tables
    assert parse(text, Path("c")).read_only("h") == why


class TestLoad:
    @pytest.fixture(autouse=True)
    def _apart(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HSX_CONFIG", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))

    def test_the_order_of_places(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        places = [
            tmp_path / p for p in ("xdg/hsx-console/config.toml", "env.toml", "config.toml", "given.toml")
        ]
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(GOOD)
            if place.name == "env.toml":
                monkeypatch.setenv("HSX_CONFIG", str(place))
            given = place if place.name == "given.toml" else None
            assert load(given).path == place

    def test_none_says_where_it_looked(self) -> None:
        with pytest.raises(
            UsageError, match=r"looked for ./config.toml, \$HSX_CONFIG \(not set\) and /.*xdg"
        ):
            load()

    @pytest.mark.parametrize("through", ["flag", "variable"])
    def test_a_named_one_must_be_there(self, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HSX_CONFIG", "gone.toml")
        with pytest.raises(UsageError, match=r"gone.toml cannot be read: No such file"):
            load(Path("gone.toml") if through == "flag" else None)

    def test_a_folder_latin1_and_a_huge_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read: Is a directory"):
            load(tmp_path)
        (tmp_path / "latin").write_bytes("[console]\n# é".encode("latin-1"))
        with pytest.raises(UsageError, match="latin:2: this is not TOML: it is not UTF-8"):
            load(tmp_path / "latin")
        (tmp_path / "huge").write_bytes(b"#" * (MAX_BYTES + 1))
        with pytest.raises(UsageError, match="too large"):
            load(tmp_path / "huge")

    def test_windows_line_ends(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_bytes(GOOD.replace("\n", "\r\n").encode())
        assert load().config.target_of("first") == "kimi"


class TestShippedExample:
    example = load(ROOT / "config.toml")

    def test_it_names_both_models_with_their_taps(self) -> None:
        taps = {name: target.output_taps for name, target in self.example.config.targets.items()}
        assert taps == {"kimi": (1, 29, 57), "qwen": (1, 16, 31, 46, 61)}
        assert {d["kind"] for d in self.example.config.drafters.values()} == {"eagle3", "dflash"}

    def test_its_addresses_belong_to_nobody(self) -> None:
        documentation = re.compile(r"(192\.0\.2|198\.51\.100|203\.0\.113)\.\d+")
        assert all(documentation.fullmatch(host.address) for host in self.example.config.hosts.values())

    @pytest.mark.parametrize("run", ["kimi-eagle3", "qwen-dflash"])
    def test_its_runs_are_what_the_engine_takes(self, run: str) -> None:
        host, launch = extract_launch(Fleet(self.example), run)
        assert launch.spec is not None
        spec = extract_from_json(launch.spec)
        assert (host, spec.store) == (run.split("-")[0], f"/data/hsx/stores/{run}")
        assert launch.output == spec.store
        assert spec.dataset.path.startswith("/data/hsx/datasets/")

    def test_the_docs_comment_on_the_other_convention_is_right(self) -> None:
        text = self.example.path.read_text(encoding="utf-8")
        other = re.search(r"count what goes into a layer, are \[([\d, ]+)\]", text)
        assert other is not None
        inputs = GOOD.replace("1, 29, 57]", other[1] + ']\nlayer_ids_convention = "input"')
        assert parse(inputs, Path("c")).targets["kimi"].output_taps == (1, 29, 57)


def test_a_run_that_the_host_cannot_be_given(tmp_path: Path) -> None:
    def refusal(text: str, only: str | None = None) -> str:
        with pytest.raises(UsageError) as caught:
            extract_launch(Fleet(Configured(tmp_path / "c.toml", parse(text, Path("c"))), only), "first")
        return str(caught.value)

    assert "[hosts.gpu-1] has no workdir" in refusal(GOOD.replace('workdir = "/data"\n', ""))
    assert "servers.kimi has no dump_dir" in refusal(GOOD.replace('dump_dir = "/dev/shm/x"\n', ""))
    assert "comes with a later version" in refusal(
        GOOD.replace("[runs.first]", '[runs.first]\nsource = "target"')
    )
    more = GOOD + '[hosts.other]\naddress = "x"\n'
    assert "its server kimi is on gpu-1" in refusal(more, only="other")


SERVERS = """\
dump_dir = "/dev/shm/x"
dump_mode = "rid"
log = "/var/log/kimi.log"
api_key_env = "KIMI_KEY"
replicas = [
  { url = "http://127.0.0.1:30001", dump_dir = "/dev/shm/y", log = "/var/log/kimi-2.log" },
  { url = "http://127.0.0.1:30002", dump_dir = "/dev/shm/z" },
]
"""


def test_several_servers_of_one_run_reach_its_specification(tmp_path: Path) -> None:
    text = GOOD.replace('dump_dir = "/dev/shm/x"\n', SERVERS)
    _, launch = extract_launch(
        Fleet(Configured(tmp_path / "c.toml", parse(text, Path("c.toml"))), None), "first"
    )
    source = extract_from_json(launch.spec).source
    assert (source.log, source.dump_mode, source.api_key_env) == ("/var/log/kimi.log", "rid", "KIMI_KEY")
    assert [(e.url, e.dump_dir, e.log) for e in source.replicas] == [
        ("http://127.0.0.1:30001", "/dev/shm/y", "/var/log/kimi-2.log"),
        ("http://127.0.0.1:30002", "/dev/shm/z", None),
    ]
    shared = text.replace("/dev/shm/z", "/dev/shm/x")
    fleet = Fleet(Configured(tmp_path / "c.toml", parse(shared, Path("c.toml"))), None)
    with pytest.raises(UsageError, match="share a dump folder"):
        extract_launch(fleet, "first")
    assert "unknown key" in said(text.replace('dump_dir = "/dev/shm/z"', 'dumpdir = "/dev/shm/z"'))
    assert "replicas" in said(text.replace(', dump_dir = "/dev/shm/z"', ""))
