#include "isas.h"

#include <vector>

// Buffers of exactly the right length: a load or a store past a tail is an error of the address sanitizer.
void test_convert() {
    on_every_isa([](const headrace::Ops& ops) {
        for (int64_t count = 1; count < 40; count++) {
            std::vector<float> numbers(count), back(count);
            std::vector<uint16_t> bits(count);
            for (int64_t i = 0; i < count; i++) numbers[i] = float(i - 20) / 4;
            ops.float_to_bf16(numbers.data(), bits.data(), count);
            ops.bf16_to_float(bits.data(), back.data(), count);
            CHECK(back == numbers);
            ops.float_to_f16(numbers.data(), bits.data(), count);
            ops.f16_to_float(bits.data(), back.data(), count);
            CHECK(back == numbers);
            ops.exponential(numbers.data(), back.data(), count);
            CHECK(back[0] > 0);
        }
    });
}
