from __future__ import annotations

import numpy as np

from engine.model.rotary import rotary_table
from engine.model.spec import Llama3Scaling, RopeSpec


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
    scaled = rotary_table(RopeSpec(500000.0, llama3=scaling), 128, 9)
    np.testing.assert_allclose(scaled[:, :, 0], plain[:, :, 0])
    np.testing.assert_allclose(scaled[8, :, -1], plain[1, :, -1])
