"""Planes come out as they went in, in every form, and the form that is chosen is the one that suits."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamrl.byte_planes import Form, PlanePacker, forms_of, places_of


@given(st.binary(max_size=300), st.sampled_from([Form.NOISE, Form.PACKED, Form.HALVES]))
def test_any_plane_comes_back_from_any_form(data, form):
    packer = PlanePacker()
    plane = np.frombuffer(data, np.uint8)
    packed = bytes(packer.pack(plane, form))
    assert packer.unpack(packed, form, len(plane)).tobytes() == data


@given(st.binary(max_size=300), st.sampled_from(list(Form)), st.integers(0, 400))
def test_what_is_no_plane_of_that_length_is_an_error_or_has_that_length(data, form, num_bytes):
    try:
        plane = PlanePacker().unpack(data, form, num_bytes)
    except (ValueError, zstandard.ZstdError):
        return
    assert len(plane) == num_bytes


@pytest.mark.parametrize(
    ("probabilities", "form"),
    [
        ([0.95, 0.04, 0.01], Form.PACKED),
        ([0.3, 0.3, 0.2, 0.1, 0.1], Form.HALVES),
        ([1 / 40] * 40, Form.PACKED),
        ([1 / 256] * 256, Form.NOISE),
    ],
)
def test_the_form_suits_the_bytes(probabilities, form):
    chance = np.random.default_rng(0)
    plane = chance.choice(len(probabilities), 20_000, p=probabilities).astype(np.uint8)
    assert forms_of(np.stack((plane, plane), 1)[:1000]) == [form, form]
    packer = PlanePacker()
    lengths = {form: len(packer.pack(plane, form)) for form in (Form.NOISE, Form.PACKED, Form.HALVES)}
    assert lengths[form] <= 1.2 * min(lengths.values())


@given(st.integers(0, 300), st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]), st.integers(0, 2**32))
def test_the_places_of_what_is_set_are_numpys(num_marks, share, seed):
    marks = np.random.default_rng(seed).random(num_marks) < share
    assert np.array_equal(places_of(marks), np.flatnonzero(marks))
