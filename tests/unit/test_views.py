"""Views of live tensors, and of the factors of their deltas. Unit layer."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_stream.views import View


@st.composite
def views(draw, min_dims=2):
    """A shape of a live tensor and a view of it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=min_dims, max_size=4))
    ranges, dims = [], []
    for dim, size in enumerate(shape):
        begin = draw(st.integers(0, size - 1))
        end = draw(st.integers(begin + 1, size))
        if dim < len(shape) - 2 and draw(st.booleans()):
            end = begin + 1  # dropped
        else:
            dims.append(dim)
        ranges.append((begin, end))
    if draw(st.booleans()):
        dims[-2:] = reversed(dims[-2:])
    return shape, View(tuple(ranges), tuple(dims))


@settings(max_examples=200, deadline=None)
@given(views())
def test_a_view_is_what_indexing_and_permuting_give_and_its_factors_make_its_part_of_the_delta(drawn):
    shape, view = drawn
    lora_A, lora_B = torch.randn(*shape[:-2], 3, shape[-1]), torch.randn(*shape[:-1], 3)
    live = lora_B @ lora_A
    want = live[tuple(slice(*each) for each in view.ranges)]
    dropped = [dim for dim in range(len(shape)) if dim not in view.dims]
    want = want.permute(*view.dims, *dropped).reshape(view.shape)
    assert view.can_be_merged
    assert torch.equal(view.of(live), want)
    assert view.of(live).untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    part_A, part_B = view.of_factors(lora_A, lora_B)
    torch.testing.assert_close(part_B @ part_A, want)


@settings(max_examples=200, deadline=None)
@given(views(), st.data())
def test_the_parts_of_a_view_on_each_rank_are_the_view(drawn, data):
    """However one dimension of the live tensor is cut, empty parts included."""
    shape, view = drawn
    live = torch.randn(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))), shape[dim]]
    parts = [
        view.within(dim, low, high).of(live.narrow(dim, low, high - low)) for low, high in itertools.pairwise(bounds)
    ]
    axis = view.dims.index(dim) if dim in view.dims else 0
    assert torch.equal(torch.cat([part for part in parts if part.numel()], axis), view.of(live))


def test_what_is_no_matrix_or_part_of_one_cannot_be_merged():
    whole = ((0, 2), (0, 3), (0, 4))
    assert View(whole, (0, 1, 2)).can_be_merged
    assert View(whole, (0, 2, 1)).can_be_merged
    assert not View(whole, (1, 0, 2)).can_be_merged
    assert not View(((0, 2), (1, 2), (0, 4)), (0, 2)).can_be_merged
