// What a machine can do at best, for benchmarks to be compared with: read memory, and multiply what is in registers.
#pragma once

#include "formats.h"

namespace headrace::HEADRACE_ISA {

// Reads `count` bytes once, with the whole team; returns their sum by 4 bytes, so that nobody can leave the reading out.
inline int64_t read_bytes(Team& team, const uint8_t* bytes, int64_t count) {
    constexpr int64_t kPiece = 64 * 1024;
    std::atomic<int64_t> total{0};
    team.run([&](int worker) {
        int64_t mine = 0;
        while (Range range = team.claim(worker, count / kPiece))
            for (const uint8_t* at = bytes + range.begin * kPiece; at < bytes + range.end * kPiece; at += 64) {
                __builtin_prefetch(at + 4096, 0, 2);
                uint32_t numbers[16];
                std::memcpy(numbers, at, sizeof numbers);
                for (uint32_t number : numbers) mine += number;
            }
        total.fetch_add(mine, std::memory_order_relaxed);
    });
    return total.load();
}

// Multiplies a step of weights that stays in registers `rounds` times on each worker; returns the operations done.
template <class Of> int64_t multiply_registers(Team& team, int64_t rounds) {
    constexpr int kSums = W == 16 ? 24 : 8;
    using Sum = typename Of::Sum;
    alignas(64) uint8_t numbers[kStepBytes];
    std::memset(numbers, Of::kGrouped ? 1 : 0x3f, sizeof numbers); // 0.75 as a float and as bf16
    team.run([&](int) {
        Sum sum[kSums] = {};
        asm volatile("" : : "r"(sum) : "memory"); // as if each now held something else: equal sums would be made one
        auto weights = Of::weights(numbers, 0);
        auto inputs = Of::inputs(numbers);
        for (int64_t i = 0; i < rounds; i++) {
            HEADRACE_UNROLL
            for (int s = 0; s < kSums; s++) sum[s] = Of::dot(sum[s], weights, inputs);
        }
        volatile uint8_t kept[sizeof(Sum)];
        for (int s = 0; s < kSums; s++) {
            uint8_t bytes[sizeof(Sum)];
            std::memcpy(bytes, &sum[s], sizeof bytes);
            for (size_t i = 0; i < sizeof bytes; i++) kept[i] = bytes[i];
        }
        (void)kept;
    });
    return int64_t(team.size()) * rounds * kSums * W * 2 * layout_of(Of::kFormat).step_inputs;
}

inline int64_t multiply_registers_of(Team& team, Format format, int64_t rounds) {
    if (format == Format::kF32) return multiply_registers<FormatF32>(team, rounds);
    if (format == Format::kBf16) return multiply_registers<FormatBf16>(team, rounds);
    return multiply_registers<FormatInt8>(team, rounds);
}

} // namespace headrace::HEADRACE_ISA
