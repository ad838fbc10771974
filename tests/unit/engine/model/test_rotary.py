from __future__ import annotations

import numpy as np

from engine.model.rotary import rotary_table
from engine.model.spec import Llama3Scaling, LongRopeScaling, RopeSpec, YarnScaling


def test_angle_is_position_times_frequency() -> None:
    table = rotary_table(RopeSpec(theta=100.0), 4, 8)
    assert table.shape == (8, 2, 2)
    angles = np.array([5.0, 5.0 * 100 ** (-0.5)])
    np.testing.assert_allclose(table[5], np.stack([np.cos(angles), np.sin(angles)]), rtol=1e-6)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = rotary_table(RopeSpec(10.0), 8, 9), rotary_table(RopeSpec(10.0, linear_factor=4.0), 8, 9)
    np.testing.assert_allclose(scaled[8], plain[2])


def test_factors_divide_frequencies() -> None:
    plain, scaled = (
        rotary_table(RopeSpec(10.0), 4, 9, factors) for factors in (None, np.array([1.0, 4.0], np.float32))
    )
    np.testing.assert_allclose(scaled[8, :, 0], plain[8, :, 0])
    np.testing.assert_allclose(scaled[8, :, 1], plain[2, :, 1])


def test_llama3_leaves_fast_and_divides_slow_frequencies() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=8192)
    plain = rotary_table(RopeSpec(500000.0), 128, 9)
    scaled = rotary_table(RopeSpec(500000.0, scaling=scaling), 128, 9)
    np.testing.assert_allclose(scaled[:, :, 0], plain[:, :, 0])
    np.testing.assert_allclose(scaled[8, :, -1], plain[1, :, -1])


def test_a_part_of_a_head_has_frequencies_of_its_own() -> None:
    np.testing.assert_array_equal(rotary_table(RopeSpec(10.0, rotated=8), 32, 9), rotary_table(RopeSpec(10.0), 8, 9))


def test_yarn_leaves_fast_and_divides_slow_frequencies() -> None:
    scaling = YarnScaling(factor=4.0, original_context_len=32768)
    plain = rotary_table(RopeSpec(1e6), 128, 9)
    scaled = rotary_table(RopeSpec(1e6, scaling=scaling, amplitude=2.0), 128, 9)
    np.testing.assert_allclose(scaled[:, :, 0], 2 * plain[:, :, 0], rtol=1e-6)
    np.testing.assert_allclose(scaled[8, :, -1], 2 * plain[2, :, -1], rtol=1e-6)


def test_longrope_tells_long_contexts_from_short_ones() -> None:
    rope = RopeSpec(10.0, scaling=LongRopeScaling((1.0, 2.0), (4.0, 8.0), original_context_len=16))
    plain = rotary_table(RopeSpec(10.0), 4, 17)
    short, long = rotary_table(rope, 4, 16), rotary_table(rope, 4, 17)
    np.testing.assert_allclose(short[8, :, 1], plain[4, :, 1])
    np.testing.assert_allclose(long[8, :, 0], plain[2, :, 0])
    np.testing.assert_allclose(long[8, :, 1], plain[1, :, 1])
