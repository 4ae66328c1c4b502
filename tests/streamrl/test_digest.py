from streamrl.digest import tokenizer_digest, version_digest
from streamrl.v1.weights_pb2 import ModelFile, TensorInfo


def files(**contents: bytes) -> list[ModelFile]:
    return [ModelFile(name=name.replace("_json", ".json"), content=content) for name, content in contents.items()]


def test_a_tokenizers_digest_changes_with_its_files_and_not_with_their_order_or_the_models_config() -> None:
    digest = tokenizer_digest(files(tokenizer_json=b"{}", vocab_json=b"1", config_json=b"1"))
    assert tokenizer_digest(files(vocab_json=b"1", tokenizer_json=b"{}", config_json=b"2")) == digest
    assert tokenizer_digest(files(tokenizer_json=b"{ }", vocab_json=b"1")) != digest
    assert tokenizer_digest(files(config_json=b"1")) == ""


def test_a_versions_digest_is_of_names_dtypes_shapes_and_data() -> None:
    tensor = TensorInfo(name="w", dtype="F32", shape=[2, 3], num_bytes=24, digest="ab")
    digest = version_digest([tensor])
    for change in ({"name": "v"}, {"dtype": "BF16"}, {"shape": [3, 2]}, {"digest": "cd"}):
        other = TensorInfo()
        other.CopyFrom(tensor)
        for name, value in change.items():
            if isinstance(value, list):
                del getattr(other, name)[:]
                getattr(other, name).extend(value)
            else:
                setattr(other, name, value)
        assert version_digest([other]) != digest
    assert version_digest([tensor, tensor]) != digest
