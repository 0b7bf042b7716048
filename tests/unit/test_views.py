"""Views of live tensors, and of the factors of their deltas. Unit layer."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_stream.merged_weights import Stream
from lora_stream.plan import Adapter, ParamMeta, Plan, Task
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


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("ranges", "dims"),
    [
        (((0, 4), (0, 3), (0, 5)), (0, 1, 2)),
        (((1, 4), (2, 6), (0, 5)), (0, 2, 1)),
        (((2, 3), (2, 6), (1, 5)), (1, 2)),
        (((3, 4), (0, 6), (0, 5)), (2, 1)),
    ],
)
def test_a_piece_of_a_stack_read_from_elsewhere_is_merged_as_the_view_of_the_live_one(ranges, dims, transposed):
    """What a merge from files does with a base whose checkpoint holds a live tensor in parts."""
    experts, rows, cols, r = 4, 6, 5, 3
    base = torch.randn(experts, rows, cols)
    ins, outs = (rows, cols) if transposed else (cols, rows)
    factors = {"lora_A": torch.randn(experts * r, ins), "lora_B": torch.randn(outs, r * experts)}
    adapter = Adapter(name="a", scaling=0.7, transposed=transposed, num_experts=experts, **factors)
    view = View(ranges, dims)
    meta = ParamMeta("piece", torch.bfloat16, view.shape)
    task = Task(meta=meta, fqn="stack", base=base, view=view, adapters=(adapter,))
    piece = task.with_piece(view.of(base).contiguous())
    assert piece.view is None
    found = [dict(Stream(Plan(tasks=(each,), scope="all", account={})))["piece"] for each in (task, piece)]
    assert torch.equal(*found)
    assert not torch.equal(found[0], view.of(base).bfloat16())
