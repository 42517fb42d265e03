"""Buffers of the BufferPool begin on a page, have headroom before them, and are bounded in number."""

from __future__ import annotations

from stoker.kv.store.buffer_pool import HEADROOM_BYTES, BufferPool, new_buffer


def test_a_buffer_begins_on_a_page_and_has_headroom() -> None:
    buffer = new_buffer(10_000)
    assert (len(buffer), buffer.ctypes.data % 4096) == (10_000, 0)
    assert buffer.base is not None
    assert buffer.base.nbytes == HEADROOM_BYTES + 10_000


def test_the_number_is_bounded_and_abandoned_buffers_are_replaced() -> None:
    buffers = BufferPool(2, 512, pinned=False)
    first, second = buffers.take(), buffers.take()
    assert first is not None
    assert second is not None
    assert buffers.take() is None
    assert buffers.take_or_allocate() is not first, "an additional one"
    buffers.give_back([first])
    assert buffers.take() is first
    buffers.abandon([second])
    third = buffers.take()
    assert third is not None
    assert third is not second
    assert buffers.take() is None
