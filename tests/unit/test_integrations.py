"""Methods of others' classes come back as they were. Unit layer; the drop-ins themselves are tested in verl and TRL, see tests/dist
and tests/programs."""

import pytest

from lora_stream.integrations.patching import Patch


class Owner:
    def one(self):
        return 1

    def two(self):
        return 2


def patched(make_one=lambda original: lambda self: original(self) + 10):
    patch = Patch("torch", "2.0")
    patch.replace(Owner, "one", make_one)
    return patch


def test_undo_puts_the_very_methods_back_however_often_it_is_called():
    original = vars(Owner)["one"]
    patch = patched()
    assert Owner().one() == 11
    patch.undo()
    patch.undo()
    assert vars(Owner)["one"] is original


def test_leaving_the_block_undoes_it_whatever_happened():
    with pytest.raises(ZeroDivisionError), patched():
        1 // (Owner().one() - 11)
    assert Owner().one() == 1


def test_patches_nest_and_are_undone_in_the_reverse_order_only():
    outer, inner = patched(), patched()
    assert Owner().one() == 21
    with pytest.raises(RuntimeError, match=r"Owner\.one was patched again after this patch"):
        outer.undo()
    assert Owner().one() == 21
    inner.undo()
    assert Owner().one() == 11
    outer.undo()
    assert Owner().one() == 1


def test_another_version_of_the_framework_is_refused_by_name_and_left_as_it_is():
    patch = patched()
    with pytest.raises(ValueError, match=r"torch \d.*Owner has no method 'three' of its own; .* written for torch 2.0"):
        patch.replace(Owner, "three", lambda original: original)
    assert Owner().one() == 1


def test_a_method_that_is_only_inherited_is_not_one_of_its_own():
    class Child(Owner):
        pass

    with pytest.raises(ValueError, match="Child has no method 'one'"):
        Patch("torch", "2.0").replace(Child, "one", lambda original: original)
