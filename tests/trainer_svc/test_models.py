"""Tests of trainer_svc.models and trainer_svc.packaged_model."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.trainer_svc.small_model import small_model
from trainer_svc import tiny_model
from trainer_svc.models import ModelFiles, check_model, resolve_model, stop_token_ids
from trainer_svc.packaged_model import save_tensors
from trainer_svc.tiny_model import EOS_ID

_WORDS = ["<pad>", "<eos>", "<turn>", "stop", "a", "b", "ab"]


@pytest.fixture(scope="module")
def made_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of another architecture, as a user would bring it."""
    folder = tmp_path_factory.mktemp("made")
    words = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(_WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(made_folder, tmp_path / "model")


def resolve(path: str | Path, cache_folder: Path, dtype: str = "float32") -> ModelFiles:
    return resolve_model(str(path), dtype=dtype, seed=0, cache_folder=cache_folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_loads_in_the_dtype_asked_for(folder: Path, tmp_path: Path, dtype: str) -> None:
    resolved = resolve(folder, tmp_path, dtype)
    model = resolved.load_model()
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert model.training
    saved = load_file(folder / "model.safetensors")
    torch.testing.assert_close(
        model.state_dict()["model.embed_tokens.weight"], saved["model.embed_tokens.weight"].to(getattr(torch, dtype))
    )
    assert json.loads(resolved.files["config.json"])["dtype"] == dtype
    assert resolved.max_context_tokens == 64


def test_the_small_files_alone_make_a_model_and_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    resolved = resolve(folder, tmp_path)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(resolved.files)
    assert not any(name.endswith(".safetensors") for name in resolved.files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, content in resolved.files.items():
        (elsewhere / name).write_bytes(content)
    save_file(load_file(folder / "model.safetensors"), elsewhere / "model.safetensors")
    again = resolve(elsewhere, tmp_path)
    assert again.tokenizer.encode("a b") == resolved.tokenizer.encode("a b")


def test_every_end_token_of_the_model_and_of_the_settings_stops(folder: Path, tmp_path: Path) -> None:
    resolved = resolve(folder, tmp_path)
    assert resolved.stop_token_ids == (1, 2)
    assert stop_token_ids(resolved, ["stop", "<turn>"]) == [1, 2, 3]
    with pytest.raises(ValueError, match=r"data\.stop: .* 'a b' is 2 tokens"):
        stop_token_ids(resolved, ["a b"])


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _config_with(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("config.json"), r"has no config\.json"),
        (_without("model.safetensors"), "has no weights"),
        (_without("tokenizer.json"), "has no tokenizer"),
        (_config_with(model_type=""), ""),
        (_config_with(quantization_config={"quant_method": "fp8"}), "quantised and cannot be trained"),
        (_config_with(auto_map={"AutoModel": "x.Y"}), "code of its own"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer in .* does not load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "does not load"),
        (_config_with(num_hidden_layers=2), "lack 9 tensors of LlamaForCausalLM"),
        (_config_with(hidden_size=64), "does not load"),
        (_config_with(model_type="no_such_type"), "does not load"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=rf"(?s)^model\.path.*{message}"):
        resolve(folder, tmp_path).load_model()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no_such_folder", "there is no folder ./no_such_folder"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("a/b/c", "it is no hub name"),
        ("", "no folder|has no config"),
        ("package:no_such_package_of_a_model", "no Python package 'no_such_package_of_a_model'"),
        ("package:json", "expected one .gguf file in package json .*found 0"),
    ],
)
def test_a_path_that_is_nothing_is_refused_without_a_network(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(path)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        check_model(str(file))


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    check_model("somebody/some-model")
    with pytest.raises(ValueError, match=r"no folder somebody/some-model .* the hub does not give it .* or take tiny"):
        resolve("somebody/some-model", tmp_path)


def test_tiny_is_made_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "NUM_STEPS", 1)
    check_model("tiny")
    resolved = resolve("tiny", tmp_path)
    assert resolved.stop_token_ids == (EOS_ID,)
    assert resolved.folder.is_relative_to(tmp_path)
    assert sum(weight.numel() for weight in resolved.load_model().parameters()) == 363_136


def test_a_model_in_a_package_is_unpacked_once(
    made_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "model_in_a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('is not to be imported')")
    weights = load_file(made_folder / "model.safetensors")
    _write_gguf(package / "model.gguf", weights)
    monkeypatch.setattr(sys, "path", [*sys.path, str(package.parent)])

    check_model("package:model_in_a_package")
    resolved = resolve("package:model_in_a_package", tmp_path)
    loaded = resolved.load_model().state_dict()
    torch.testing.assert_close(loaded["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert "quantization_config" not in json.loads(resolved.files["config.json"])
    assert resolved.tokenizer.convert_ids_to_tokens(resolved.tokenizer.encode("ab")) == ["ab"]
    assert resolved.stop_token_ids == (1,)
    assert AutoModelForCausalLM.from_pretrained(resolved.folder).config.vocab_size == len(_WORDS)
    made = (resolved.folder / "config.json").stat().st_mtime_ns
    assert (resolve("package:model_in_a_package", tmp_path).folder / "config.json").stat().st_mtime_ns == made


def _write_gguf(file: Path, weights: dict[str, torch.Tensor]) -> None:
    """A Llama of one layer with one head, in llama.cpp's names."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(_WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(_WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 4)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    for name, tensor in weights.items():
        writer.add_tensor(names[name], tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_tied_embedding_is_saved_under_the_name_that_engines_look_for(tmp_path: Path) -> None:
    model = small_model(tied=True)
    save_tensors(model, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert torch.equal(saved["model.embed_tokens.weight"], model.lm_head.weight)
