"""Settings for people."""

import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from streamrl.command.resolve import resolve
from streamrl.command.settings_text import public_settings, toml_text

values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["run", "data", "eval"]), st.dictionaries(st.sampled_from("abc"), values)))
def test_what_is_shown_is_toml_of_the_same_values(settings: dict[str, dict[str, object]]) -> None:
    assert tomllib.loads(toml_text(settings)) == settings


def test_secrets_are_hidden(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[kafka.client]\nsasl.password = 'p4ss'\nsasl.username = 'ann'\nssl.key.password = 'p4ss'\n")
    shown = toml_text(public_settings(resolve(config, [])))
    assert "p4ss" not in shown and "ann" in shown
