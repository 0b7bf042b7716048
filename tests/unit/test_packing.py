"""How tensors are cut into messages. Unit layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_stream.packing import ALIGNMENT, Message, Piece, pack
from lora_stream.plan import ParamMeta

BYTES = 1024

metas = st.lists(
    st.builds(
        lambda shape, dtype: ParamMeta("w", dtype, tuple(shape)),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    ),
    max_size=12,
)


@given(metas)
def test_every_element_travels_once_in_order_aligned_and_within_its_message(metadata):
    reached = [0] * len(metadata)
    order = []
    for message in pack(metadata, BYTES):
        assert message.pieces
        end_of_last = 0
        for piece in message.pieces:
            meta = metadata[piece.index]
            assert piece.begin == reached[piece.index]
            reached[piece.index] = piece.end
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end_of_last
            end_of_last = piece.offset + (piece.end - piece.begin) * meta.dtype.itemsize
            order.append(piece.index)
        assert end_of_last == message.num_bytes <= BYTES
    assert reached == [meta.num_bytes // meta.dtype.itemsize for meta in metadata]
    assert order == sorted(order)
    assert set(order) == set(range(len(metadata)))


@pytest.mark.parametrize(("shape", "step"), [((50, 30), 17 * 30), ((3, 700), 512), ((2000,), 512)])
def test_a_large_tensor_is_cut_between_rows_where_a_row_fits(shape, step):
    messages = list(pack([ParamMeta("w", torch.bfloat16, shape)], BYTES))
    numel = torch.Size(shape).numel()
    assert [m.pieces[0][1:3] for m in messages] == [(i, min(i + step, numel)) for i in range(0, numel, step)]


def test_small_tensors_share_messages_and_large_ones_have_their_own():
    small, large = ParamMeta("s", torch.float32, (100,)), ParamMeta("l", torch.float32, (300,))
    assert list(pack([small, small, small, large, small], BYTES)) == [
        Message((Piece(0, 0, 100, 0), Piece(1, 0, 100, 512)), 912),
        Message((Piece(2, 0, 100, 0),), 400),
        Message((Piece(3, 0, 256, 0),), 1024),
        Message((Piece(3, 256, 300, 0),), 176),
        Message((Piece(4, 0, 100, 0),), 400),
    ]
