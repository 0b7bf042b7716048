"""A manifest on the wire. Unit layer."""

import json

import pytest
import torch

from lora_stream.plan import ParamMeta
from lora_stream.vllm import wire

METADATA = [
    ParamMeta("a.weight", torch.bfloat16, (3, 5)),
    ParamMeta("b", torch.int64, ()),
    ParamMeta("c", torch.float32, (0,)),
]


def test_a_manifest_is_plain_json_and_comes_back_whole():
    assert wire.decode(json.loads(json.dumps(wire.encode(METADATA)))) == METADATA
    assert wire.decode(wire.encode([])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": ["bfloat16", "load", "float32"]}, "'load' is not a dtype"),
        ({"dtypes": ["bfloat16", "int64"]}, "of one length"),
        ({"shapes": [[3, -5], [], [0]]}, "is not a shape"),
        ({"shapes": [["3"], [], [0]]}, "is not a shape"),
        ({"names": None}, "of one length"),
    ],
)
def test_what_no_sender_writes_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        wire.decode({**wire.encode(METADATA), **change})
