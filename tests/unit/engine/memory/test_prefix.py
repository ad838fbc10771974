from __future__ import annotations

from engine.memory import page_hash, root_hash


def test_a_hash_covers_the_tokens_their_order_and_all_before_them() -> None:
    root = root_hash("model-1")
    hashes = {
        root,
        page_hash(root, [1, 2, 3, 4]),
        page_hash(root, [1, 2, 4, 3]),
        page_hash(root, [1, 2, 3]),
        page_hash(page_hash(root, [1, 2]), [3, 4]),
        page_hash(page_hash(root, [3, 4]), [1, 2]),
    }
    assert len(hashes) == 6
    assert page_hash(root_hash("model-1"), (1, 2, 3, 4)) in hashes


def test_equal_tokens_in_two_namespaces_have_nothing_in_common() -> None:
    """https://github.com/vllm-project/vllm/issues/30931, https://github.com/vllm-project/vllm/issues/42125"""
    one, other = root_hash("rev-1/adapter-a"), root_hash("rev-1/adapter-b")
    assert one != other
    assert page_hash(one, [1, 2, 3, 4]) != page_hash(other, [1, 2, 3, 4])
