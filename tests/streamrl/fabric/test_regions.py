"""Blocks that both ends cut alike."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.fabric.regions import Region, blocks


@given(st.lists(st.integers(0, 50)), st.integers(1, 20), st.integers(0, 9))
def test_blocks_hold_every_byte_once_in_order_and_all_but_the_last_are_full(sizes: list[int], width: int, gap: int):
    regions, position = [], 0
    for size in sizes:
        regions.append(Region(position, size))
        position += size + gap
    cut = list(blocks(regions, width))
    moved = [byte for block in cut for piece in block for byte in range(piece.offset, piece.offset + piece.num_bytes)]
    assert moved == [byte for region in regions for byte in range(region.offset, region.offset + region.num_bytes)]
    assert all(sum(piece.num_bytes for piece in block) == width for block in cut[:-1])
    assert all(piece.num_bytes > 0 for block in cut for piece in block)


@given(st.lists(st.integers(0, 50)), st.integers(1, 20))
def test_how_blocks_are_cut_does_not_depend_on_where_tensors_lie(sizes: list[int], width: int):
    here = blocks([Region(100 * index, size) for index, size in enumerate(sizes)], width)
    there = blocks([Region(5000 - 64 * index, size) for index, size in enumerate(sizes)], width)
    assert [[piece.num_bytes for piece in block] for block in here] == [
        [piece.num_bytes for piece in block] for block in there
    ]
