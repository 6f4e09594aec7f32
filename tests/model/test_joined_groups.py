"""Loads that join copies under way, where one GPU block number means other bytes in each KV group."""

from __future__ import annotations

import torch

from aiokvoffload import CanonicalKVCaches, KVGroup, StoreOutcome, open_offloader
from aiokvoffload.testing.device import ManualDevice


def test_a_block_joined_in_one_group_is_still_copied_in_the_other() -> None:
    layers = [torch.zeros((8, 4), dtype=torch.int8) for _ in range(2)]
    groups = [KVGroup(block_tokens=4, layers=[layer]) for layer in range(2)]
    device = ManualDevice()
    with open_offloader(
        CanonicalKVCaches.from_layers(layers, groups=groups), cpu_bytes=64 * 4, device=device
    ) as offloader:
        keys = offloader.keys(range(8))
        for group, layer in enumerate(layers):
            layer[0], layer[1] = 10 * group + 1, 10 * group + 2
        outcomes = offloader.store(keys, [0, 1, 0, 1])
        assert set(outcomes) == {StoreOutcome.ACCEPTED}
        first, second = offloader.prepare_load(keys), offloader.prepare_load(keys)
        # In group 1 both loads want the same bytes in the same blocks, in group 0 they do not.
        handles = [first.start([5, 6, 6, 5]), second.start([6, 5, 6, 5])]
        device.land_all()
        offloader.poll()
        assert all(handle.result is not None and handle.result.success for handle in handles)
        assert layers[0][[6, 5]].tolist() == [[1] * 4, [2] * 4]
        assert layers[1][[6, 5]].tolist() == [[11] * 4, [12] * 4]
