"""The comparison with other programs: how sides are asked and timed, what becomes of it. No real peer runs here."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(name, module)  # they import each other by these names
    specification.loader.exec_module(sys.modules[name])
    return sys.modules[name]


for needed in ("_environment", "_bench"):
    _load(needed)
peers = _load("_peers")
setup_peers = _load("setup_peers")
bench_peers = _load("bench_peers")
page = _load("_peers_page")

JOB = peers.Job("hello", [1, 2, 3], 0.8, 4, 7)


# --- workers ---


def worker(tmp_path: Path, program: str) -> object:
    script = tmp_path / "worker.py"
    script.write_text(program)
    return peers.Worker([sys.executable, script])


def test_a_worker_is_asked_and_its_tokens_are_timed(tmp_path):
    program = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    for token in job["prompt"][: job["max_tokens"]]:
        print(json.dumps({"token": token}), flush=True)
    print(json.dumps({"done": True, "steps": job["top_k"]}), flush=True)
"""
    with closing(worker(tmp_path, program)) as side:
        answer = side.ask(JOB)
        assert (answer.tokens, answer.steps) == (3, peers.SAMPLING["top_k"])
        assert 0 < answer.first_s <= answer.total_s
        assert side.ask(JOB).tokens == 3
        held = peers.memory(side.process)
        assert held.peak_bytes >= held.resident_bytes > 0
    assert side.process.returncode == 0


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_that_ends_says_why(ready, tmp_path):
    program = f"""
import sys
print('{{"ready": true}}' if {ready} else '', end='\\n' if {ready} else '', flush=True)
if {ready}: sys.stdin.readline()
sys.exit('no such model')
"""
    with pytest.raises(peers.PeerError, match=r"worker\.py ended: .*no such model"):  # noqa: PT012  (either may raise)
        side = worker(tmp_path, program)
        side.ask(JOB)


# --- llama-server ---

SERVER = """#!{python}
import http.server, json, sys

TIMINGS = {{"predicted_n": 4, "draft_n": 5, "draft_n_accepted": 1}}
EVENTS = [
    {{"content": "a", "tokens": [5], "stop": False}},
    {{"content": "bc", "tokens": [6, 7], "stop": False}},
    {{"content": "", "tokens": [], "stop": True, "timings": TIMINGS}},
]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fresh = body["cache_prompt"] is False and body["repeat_penalty"] == 1 and body["prompt"] == [1, 2, 3]
        self.send_response(200 if fresh else 400)
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *arguments): pass

assert "--no-cache-prompt" in sys.argv and sys.argv[1] == "--model"
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "llama-server"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script")
def test_a_server_is_asked_with_empty_caches_and_its_passes_are_counted(tmp_path):
    with closing(peers.LlamaServer(program(tmp_path, SERVER), ["--model", "x.gguf"])) as side:
        answer = side.ask(JOB)
        # Four tokens, one of them drafted: three passes. The closing event is no token.
        assert (answer.tokens, answer.steps) == (4, 3)
        with pytest.raises(peers.PeerError, match="answered 400"):
            side.ask(peers.Job("hello", [9], 0, 4, 7))
    assert side.process.poll() is not None


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script")
def test_a_server_that_does_not_start_says_why(tmp_path):
    text = "#!{python}\nraise SystemExit('unknown model architecture')\n"
    with pytest.raises(peers.PeerError, match=r"ended: .*unknown model architecture"):
        peers.LlamaServer(program(tmp_path, text), [])


# --- what becomes of it ---


def cell(*tokens_per_s: float, peak: int = 100) -> object:
    answers = [peers.Answer(10, 10 / speed / 4, 10 / speed, 5) for speed in tokens_per_s]
    return bench_peers.Cell(answers, peak, peak)


def cells(temperature: float) -> dict[tuple[float, str], object]:
    found = {
        "llama-server, plain": cell(20.0, 10.0),
        "llama-server, draft 3": cell(25.0, 10.0, peak=200),
        "localspec, γ 3": cell(20.0, 20.0, peak=150),
        "localspec, auto": cell(30.0, 20.0),
        "localspec, plain": cell(19.0, 9.0),
    }
    if temperature:
        found["llama-server, draft 3, probabilistic"] = cell(40.0, 20.0)
    return {(temperature, name): value for name, value in found.items()}


def report() -> dict[str, object]:
    return bench_peers.report(cells(0.0) | cells(0.8), [3], ["code", "prose"])


def test_ratios_are_made_round_by_round_against_like():
    same = report()["0"]["ratios"]["localspec, γ 3 / llama-server, draft 3"]
    assert same["tokens_per_s"] == bench_peers.Spread.of([20 / 25, 20 / 10])
    assert same["first_s"] == bench_peers.Spread.of([25 / 20, 10 / 20])
    assert same["peak_bytes"] == 0.75
    assert report()["0"]["sides"]["localspec, γ 3"]["over_plain_server"] == bench_peers.Spread.of([1.0, 2.0])
    assert report()["0"]["sides"]["localspec, γ 3"]["tokens_per_step"] == 2


def test_auto_is_compared_with_the_best_that_the_server_can_do():
    names = [next(n for n in report()[t]["ratios"] if n.startswith("localspec, auto")) for t in ("0", "0.8")]
    assert names == [
        "localspec, auto / llama-server, draft 3 (its best)",
        "localspec, auto / llama-server, draft 3, probabilistic (its best)",
    ]


def test_by_kind_the_best_setting_is_that_of_the_kind():
    kinds = report()["0"]["kinds"]
    assert kinds["code"]["best of llama-server"] == "llama-server, draft 3"
    assert kinds["prose"]["best of llama-server"] == "llama-server, plain"
    assert kinds["code"]["ratios"]["localspec, auto"]["tokens_per_s"] == bench_peers.Spread.of([30 / 25])
    assert kinds["prose"]["ratios"]["localspec, auto"]["tokens_per_s"] == bench_peers.Spread.of([20 / 10])


def test_sides_are_chosen_by_name_and_the_baseline_always_runs():
    launcher = peers.Launcher(Path("t"), Path("d"), 2, 512)
    everyone = bench_peers.sides(launcher, {"llama_server": "s", "node": None}, (2, 3), quick=False)
    names = {s.name for side in bench_peers.chosen(everyone, "γ 3") for s in side.settings}
    assert names == {"llama-server, plain", "localspec, γ 3"}
    assert bench_peers.chosen(everyone, "") == everyone


def test_node_drafts_as_it_comes_and_waiting_for_drafts():
    """At its defaults it takes what is ready, which on few cores is nothing."""
    launcher = peers.Launcher(Path("t"), Path("d"), 2, 512)
    given = {"llama_server": "s", "node": "node", "node_folder": "f"}
    everyone = bench_peers.sides(launcher, given, (2, 3), quick=False)
    start = {s.settings[0].name: s.launch for s in everyone if s.settings[0].name.startswith("node")}
    assert {name: launch.keywords["least_drafted"] for name, launch in start.items()} == {
        "node-llama-cpp, plain": None, "node-llama-cpp, draft": 0, "node-llama-cpp, draft, waiting for 3": 3
    }  # fmt: skip


def test_probabilistic_drafts_are_asked_only_where_they_differ_from_greedy_ones():
    launcher = peers.Launcher(Path("t"), Path("d"), 2, 512)
    given = {"llama_server": "s", "node": None, "node_folder": None}
    sides = bench_peers.sides(launcher, given, (2, 3), quick=False)
    settings = {setting.name: setting.temperatures for side in sides for setting in side.settings}
    assert settings["llama-server, draft 2, probabilistic"] == [0.8]
    assert settings["llama-server, draft 2"] == (0.0, 0.8)
    assert not any("node" in name for name in settings)
    for needed in bench_peers.report(cells(0.0) | cells(0.8), [3], ["code", "prose"])["0.8"]["sides"]:
        assert needed in settings


RECORD = {
    "machine": {"date": "2026-01-01", "cpu": "a processor", "llama_cpp_python": "1"},
    "settings": {
        "kinds": ["code", "prose"],
        "max_tokens": 9,
        "context": 512,
        "threads": 2,
        "peers": {"llama_server_version": "123.0.0", "node_llama_cpp_version": None},
    },
}


def test_what_is_added_leaves_the_rest_and_its_baseline():
    old = RECORD | {"results": {"a": {"temperatures": report()}, "b": {"temperatures": report()}}}
    some = {(0.0, "llama-server, plain"): cell(5.0, 5.0), (0.0, "node-llama-cpp, draft"): cell(4.0, 4.0)}
    found = bench_peers.report(
        some | {(0.8, name): value for (_, name), value in some.items()}, [3], ["code", "prose"]
    )
    record = bench_peers.merged(old, RECORD | {"results": {"a": {"temperatures": found}}})
    assert record["results"]["b"] == old["results"]["b"]
    before, after = (r["results"]["a"]["temperatures"]["0"] for r in (old, record))
    assert after["sides"].keys() == before["sides"].keys() | {"node-llama-cpp, draft"}
    assert after["sides"]["node-llama-cpp, draft"]["over_plain_server"].median == 0.8
    assert after["sides"]["llama-server, plain"] == before["sides"]["llama-server, plain"]
    assert (after["ratios"], after["kinds"]) == (before["ratios"], before["kinds"])
    again = bench_peers.merged(old, RECORD | {"results": {"c": {"temperatures": found}, "b": old["results"]["a"]}})
    assert again["results"].keys() == {"a", "b", "c"}
    other = RECORD | {"settings": RECORD["settings"] | {"max_tokens": 10}}
    with pytest.raises(peers.PeerError, match="max_tokens is 10, in the file 9"):
        bench_peers.merged(old, other)


def test_the_page_shows_losses_like_wins():
    plain = json.dumps({"p & q": {"temperatures": report()}}, default=bench_peers._plain)
    data = RECORD | {"results": json.loads(plain)}
    rows = page.tables(data).splitlines()
    assert "| **localspec, plain** | 0.93 (0.90–0.95) | 14.0 | 16.8 | 2.00 | 0.20 | 0 | 2 |" in rows
    assert (
        sum("localspec, γ 3 / llama-server, draft 3 |" in line for line in page.comparisons(data).splitlines()) == 2
    )
    assert "build 123, llama-cpp-python 1. Answers of up to 9 tokens: code, prose." in page.setting(data)
    assert "| p & q | 0 | prose | plain | 2.00 |  |  |" in page.kinds(data).splitlines()
    drawn = ElementTree.fromstring(page.picture(data))
    bars = [e for e in drawn if e.tag.endswith("rect") and e.get("fill") not in ("#fff", None)]
    assert len(bars) == 11
    assert {bar.get("fill") for bar in bars} == {page._OURS, page._OTHERS}


# --- set-up ---


def test_what_is_built_is_not_built_again(tmp_path):
    server = tmp_path / f"llama-server-{setup_peers.SERVER_VERSION}" / "bin" / "llama-server"
    if os.name == "nt":
        server = server.with_suffix(".exe")
    server.parent.mkdir(parents=True)
    server.touch()
    assert setup_peers.build_server(tmp_path, 1) == server


def test_without_a_compiler_or_node_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_peers.environment, "has_compiler", lambda: False)
    with pytest.raises(setup_peers.SetupError, match="compiler is needed"):
        setup_peers.build_server(tmp_path, 1)
    monkeypatch.setattr(setup_peers.shutil, "which", lambda name: None)
    assert setup_peers.install_node(tmp_path) == (None, None)
    assert "left out" in capsys.readouterr().out
