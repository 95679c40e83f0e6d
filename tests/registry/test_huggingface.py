"""Downloads from Hugging Face: everything a connection or a server can do to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localspec.errors import DownloadError, IntegrityError
from localspec.registry import HuggingFaceFile, Status
from tests.registry.conftest import CONTENT, SHA256, entry
from tests.registry.hub import Hub


def fails(store, model, error: type[Exception] = DownloadError) -> str:
    with pytest.raises(error) as caught:
        store.path(model)
    assert store.status(model) is not Status.READY
    assert not store.location(model).exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_fetched_once(hub: Hub, make_store) -> None:
    model = entry()
    store = make_store(model)
    assert store.status(model) is Status.ABSENT
    path = store.path("model")
    assert path.read_bytes() == CONTENT
    assert store.status(model) is Status.READY
    assert sorted(item.name for item in path.parent.iterdir()) == ["lock", "model.gguf", "record.json"]
    asked = len(hub.requests)
    hub.status = 500
    assert make_store(model).path(model) == path
    assert len(hub.requests) == asked


def test_with_everything_in_the_store_no_network_is_touched(
    hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_store(entry()).path("model")

    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched, or the file was hashed")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("hashlib.sha256", refuse)
    assert make_store(entry()).path("model") == path


def test_a_cut_connection_is_taken_up_where_it_broke(hub: Hub, make_store) -> None:
    hub.cuts = [2500, 3000, 0]
    assert make_store(entry()).path("model").read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=2500-", "bytes=5500-", "bytes=5500-"]


def test_a_later_attempt_goes_on_where_an_earlier_one_gave_up(hub: Hub, make_store) -> None:
    model = entry()
    hub.cuts = [4000, *[0] * 6]
    assert "no connection" in fails(make_store(model), model)
    assert make_store(model).status(model) is Status.PARTIAL
    hub.requests.clear()
    assert make_store(model).path(model).read_bytes() == CONTENT
    assert hub.ranges == ["bytes=4000-"]


def test_a_server_that_ignores_range_sends_all_of_it_again(hub: Hub, make_store, capsys) -> None:
    hub.cuts, hub.ignores_range = [4000], True
    assert make_store(entry()).path("model", progress=True).read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=4000-"]
    assert "starts again" in capsys.readouterr().err


def test_a_server_that_ignores_range_and_breaks_every_time_is_given_up(hub: Hub, make_store) -> None:
    model = entry()
    hub.cuts, hub.ignores_range = [500, 400] * 50, True
    fails(make_store(model), model)
    assert len(hub.gets) < 10


def test_a_server_that_sends_another_range_is_not_believed(hub: Hub, make_store) -> None:
    model = entry()
    hub.cuts, hub.shifts_range_by = [4000], 1
    assert "another part" in fails(make_store(model), model)
    hub.shifts_range_by = 0
    assert make_store(model).path(model).read_bytes() == CONTENT


def test_a_file_that_changed_between_attempts_starts_anew(hub: Hub, make_store) -> None:
    model = entry(bytes=None, sha256=None)
    hub.cuts = [4000, *[0] * 6]
    fails(make_store(model), model)
    hub.content = b"GGUF" + bytes(8000)
    hub.requests.clear()
    assert make_store(model).path(model).read_bytes() == hub.content
    assert hub.ranges == [None]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "HTTP 401: private, gated, or not there; set HF_TOKEN"),
        (401, None, "HTTP 401"),
        (403, "GatedRepo", "accept the licence on the page of someone/something and set HF_TOKEN"),
        (403, None, "HTTP 403"),
        (404, "EntryNotFound", "HTTP 404: there is no file.gguf"),
        (404, "RevisionNotFound", "revision 'main'"),
        (500, None, "HTTP 500; try again later"),
        (429, None, "HTTP 429"),
    ],
)
def test_an_answer_that_is_no_file(hub: Hub, make_store, status: int, code: str | None, words: str) -> None:
    hub.status, hub.error_code = status, code
    message = fails(make_store(entry()), entry())
    assert words in message
    assert "Hugging Face (someone/something)" in message


def test_a_transfer_that_is_refused_after_the_look_up(hub: Hub, make_store) -> None:
    hub.get_status = 403
    assert "HTTP 403" in fails(make_store(entry()), entry())
    assert len(hub.gets) == 1
    hub.requests.clear()
    hub.get_status = 503
    assert "HTTP 503" in fails(make_store(entry()), entry())
    assert len(hub.gets) == 6


def test_no_server_at_all(hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    assert "no connection" in fails(make_store(entry()), entry())


def test_offline_mode_is_named(hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    try:
        assert "HF_HUB_OFFLINE is set" in fails(make_store(entry()), entry())
    finally:
        huggingface_hub.close_session()


def test_a_body_that_ends_early_every_time(hub: Hub, make_store) -> None:
    model = entry(bytes=None, sha256=None)
    hub.declared_size = len(CONTENT) + 5
    hub.etag = "abc"
    assert "file.gguf" in fails(make_store(model), model)


def test_a_body_longer_than_declared(hub: Hub, make_store) -> None:
    model = entry(bytes=None, sha256=None)
    hub.declared_size = len(CONTENT) - 5
    assert "longer than the 9,995 bytes" in fails(make_store(model), model, IntegrityError)
    assert make_store(model).status(model) is Status.ABSENT


def test_a_wrong_hash_leaves_nothing_behind(hub: Hub, make_store) -> None:
    hub.content = CONTENT[:-1] + b"?"
    hub.etag = "an-etag-that-is-no-hash"
    message = fails(make_store(entry()), entry(), IntegrityError)
    assert SHA256 in message
    assert make_store(entry()).status(entry()) is Status.ABSENT


@pytest.mark.parametrize("change", [b"?", b"longer"])
def test_another_file_is_refused_before_it_is_fetched(hub: Hub, make_store, change: bytes) -> None:
    hub.content = CONTENT[:-1] + change
    assert "another file than the one known as model" in fails(make_store(entry()), entry(), DownloadError)
    assert hub.gets == []


def test_the_hash_a_server_declares_is_checked(hub: Hub, make_store) -> None:
    hub.etag = "0" * 64
    model = entry(sha256=None)
    assert "0" * 64 in fails(make_store(model), model, IntegrityError)


def test_an_unknown_hash_is_pinned_at_first_use(hub: Hub, make_store) -> None:
    model = entry(bytes=None, sha256=None)
    hub.etag = "first"
    path = make_store(model).path(model)
    path.unlink()
    hub.content, hub.etag = CONTENT + b"more", "second"
    assert SHA256 in fails(make_store(model), model, IntegrityError)
    make_store(model).remove(model)
    assert make_store(model).path(model).read_bytes() == hub.content


def test_a_web_page_is_no_model(hub: Hub, make_store) -> None:
    hub.content, hub.etag = b"<html>sign in</html>", "page"
    model = entry(bytes=None, sha256=None)
    assert "not GGUF" in fails(make_store(model), model, IntegrityError)


def test_a_silent_server_is_asked_again(hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.pause_s = 0.6
    model = entry()
    store = make_store(model)
    hub.content = CONTENT
    path = store.path(model)
    assert path.read_bytes() == CONTENT
    assert len(hub.gets) > 2


def test_the_token_goes_to_hugging_face_and_to_no_one_else(
    hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.redirects_to = f"localhost:{hub.port}"
    hub.cuts = [4000]
    assert make_store(entry()).path("model").read_bytes() == CONTENT
    seen = [(headers["host"].split(":")[0], headers.get("authorization")) for headers in hub.gets]
    assert seen == [("127.0.0.1", "Bearer hf_secret"), ("localhost", None)] * 2
    assert hub.ranges == [None, None, "bytes=4000-", "bytes=4000-"]


def test_the_next_source_is_tried(hub: Hub, make_store, capsys) -> None:
    good, bad = HuggingFaceFile("someone/something", "file.gguf"), HuggingFaceFile("a/b", "c.gguf", "v1")
    model = entry(sources=(bad, good))
    real = hub.content

    original_requests = hub.requests

    class Recorder(list):  # answers 404 to the first repository
        def append(self, request) -> None:
            hub.status = 404 if "/a/b/" in request[1] else 200
            original_requests.append(request)

    hub.requests = Recorder()
    assert make_store(model).path(model, progress=True).read_bytes() == real
    assert [path for method, path, _ in original_requests if method == "HEAD"] == [
        "/a/b/resolve/v1/c.gguf",
        "/someone/something/resolve/main/file.gguf",
    ]
    assert "revision 'v1' there; trying the next source" in capsys.readouterr().err


# Other processes

PULL = """
import sys
from pathlib import Path
from tests.registry.conftest import entry
from localspec.registry import Registry, Store
model = entry()
store = Store(Registry({model.name: model}, {}, ""), root=Path(sys.argv[1]))
print(store.path(model, progress=True))
"""


def start(hub: Hub, tmp_path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(tmp_path / "store")],
        env=environment,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_process_that_is_ended_in_the_middle(hub: Hub, make_store, tmp_path: Path, how: str) -> None:
    if not hasattr(signal, how):
        pytest.skip(f"no {how} here")
    hub.pause_s = 0.2
    process = start(hub, tmp_path)
    partial = tmp_path / "store" / "model" / "model.gguf.part"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size > 2000):
        time.sleep(0.02)
    process.send_signal(getattr(signal, how))
    process.communicate()
    assert process.returncode != 0
    model = entry()
    store = make_store(model)
    assert store.status(model) is Status.PARTIAL
    hub.pause_s = 0.0
    hub.requests.clear()
    assert store.path(model).read_bytes() == CONTENT
    (asked,) = hub.ranges
    assert asked is not None
    assert 2000 <= int(asked[6:-1]) < len(CONTENT)


def test_two_processes_fetch_a_file_once(hub: Hub, tmp_path: Path) -> None:
    hub.pause_s = 0.2
    processes = [start(hub, tmp_path) for _ in range(2)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert Path(results[0][0].strip()).read_bytes() == CONTENT
    assert len(hub.gets) == 1
    assert any("another process is at work on it" in errors for _, errors in results)
